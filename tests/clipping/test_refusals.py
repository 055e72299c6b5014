"""What cannot be clipped exactly is refused, by name, with what to use instead."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dp_microadam import ClippedGradients, InputError, replace_batchnorm


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).flatten(1).square().sum(1)


def refuses(model: nn.Module, batch: Tensor, message: str, per_example_loss=loss) -> None:
    with pytest.raises(InputError, match=message):
        ClippedGradients(model, per_example_loss, max_grad_norm=1.0).accumulate(batch)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.SyncBatchNorm(4)])
def test_batchnorm_is_refused_by_name(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
    refuses(model, torch.randn(2, 3, 5, 5), r"'1' is \w*BatchNorm\w*.*replace_batchnorm")


def test_batchnorm_is_refused_again_when_it_returns_to_training_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)).eval()
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    engine.accumulate(torch.randn(2, 3, 5, 5))  # fixed statistics mix nothing
    model.train()
    with pytest.raises(InputError, match="replace_batchnorm"):
        engine.accumulate(torch.randn(2, 3, 5, 5))


def test_replace_batchnorm_makes_a_model_acceptable():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(54, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[1].weight.fill_(2.0)
    model[4].bias.requires_grad_(False)
    model.eval()
    replaced = replace_batchnorm(model)
    assert replaced is model
    assert not any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in model.modules())
    assert model[1].weight.tolist() == [2.0] * 6
    assert not model[4].bias.requires_grad
    assert not model[1].training
    assert (model[1].num_groups, model[4].num_groups) == (3, 2)
    ClippedGradients(model, loss, max_grad_norm=1.0).accumulate(torch.randn(2, 3, 5, 5))


def test_running_statistics_of_private_examples_are_refused():
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.Conv2d(3, 4, 3))
    refuses(model, torch.randn(2, 3, 5, 5), "'0' is InstanceNorm2d.*track_running_stats=False")


def test_rows_that_are_no_multiple_of_the_batch_are_refused():
    class OneMore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.cat([x, torch.ones(1, 4)]))[:-1]

    refuses(OneMore(), torch.randn(3, 4), "layer 'layer'.*first dimension must be the batch")


def test_packed_sequences_are_refused():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.lstm(packed)[1][0][0]

    refuses(Packed(), torch.randn(3, 5, 4), "LSTM was given PackedSequence; pass .* padded to a length")


def test_a_parameter_written_by_index_is_refused_by_name():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[:, 0] = self.token
            return x

    refuses(Writes(), torch.randn(3, 2, 4), "'token' is written into a tensor")


def test_a_parameter_in_an_autograd_function_is_refused_by_name():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient * weight, (gradient * x).sum(0)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(Product.apply(x, self.weight))

    refuses(Own(), torch.randn(3, 4), "'weight'.*(not observed|no operation)")


def test_a_parameter_reached_through_a_reference_is_refused_by_name():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.kept = [self.layer.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x @ self.kept[0]

    refuses(Hidden(), torch.randn(3, 4), "'layer.weight' is used where it is not observed")


def test_a_parameter_in_random_attention_is_refused_by_name():
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, self.bias, dropout_p=0.5)

    refuses(Biased(), torch.randn(3, 2, 5, 4), "'bias'.*random numbers")


def test_reentrant_checkpoints_are_refused():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=True)

    refuses(Checkpointed(), torch.randn(3, 4), "use_reentrant=False")


@pytest.mark.parametrize(
    "per_example_loss",
    [
        lambda m, x: m(x).sum(),
        lambda m, x: m(x),
        lambda m, x: m(x).sum(1, keepdim=True),
        lambda m, x: m(x).sum(1)[:-1],
        lambda m, x: 0.0,
    ],
    ids=["scalar", "matrix", "column", "too few", "number"],
)
def test_a_loss_that_is_not_one_value_per_example_is_refused(per_example_loss):
    refuses(nn.Linear(4, 2), torch.randn(3, 4), "one value per example", per_example_loss)


def test_a_loss_without_trainable_parameters_is_refused():
    model = nn.Linear(4, 2)
    refuses(model, torch.randn(3, 4), "does not depend on any trainable", lambda m, x: m(x).detach().sum(1))


def test_a_trainable_parameter_that_no_hook_saw_is_refused_by_name():
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "forgotten": nn.Linear(4, 2)})
    refuses(model, torch.randn(3, 4), "'forgotten.weight'.*requires_grad_", lambda m, x: m["used"](x).sum(1))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_look_at_the_whole_batch_are_refused(option):
    model = nn.Sequential(nn.Embedding(5, 3, **option))
    refuses(model, torch.randint(5, (3, 2)), f"embedding '0' has {next(iter(option))}")


def test_an_input_overwritten_in_place_is_refused():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            y = self.layer(x)
            x.mul_(2)
            return y + x

    refuses(Overwrites(), torch.randn(3, 4), "input of layer 'layer' was overwritten")


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), 1e-20])
def test_a_clipping_norm_that_is_not_a_usable_number_is_refused(bound):
    with pytest.raises(InputError, match="max_grad_norm"):
        ClippedGradients(nn.Linear(2, 2), loss, max_grad_norm=bound)


def test_batches_that_do_not_agree_on_their_size_are_refused():
    def two(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch[0])

    engine = ClippedGradients(nn.Linear(4, 2), two, max_grad_norm=1.0)
    with pytest.raises(InputError, match="share their first dimension"):
        engine.accumulate((torch.randn(3, 4), torch.randn(2)))
    with pytest.raises(InputError, match="without tensors"):
        engine.accumulate([])


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(InputError, match="no trainable parameter"):
        ClippedGradients(nn.Linear(2, 2).requires_grad_(False), loss, max_grad_norm=1.0)


def test_parameters_frozen_since_are_refused_by_name():
    model = nn.Linear(4, 2)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    model.bias.requires_grad_(False)
    with pytest.raises(InputError, match="'bias' was frozen"):
        engine.accumulate(torch.randn(3, 4))


def test_synthetic_examples_can_be_given_where_random_ones_do_not_fit():
    def logarithm(model: nn.Module, x: Tensor) -> Tensor:
        return model(torch.log(x - 5)).sum(1)

    model = nn.Linear(4, 2)
    with pytest.raises(InputError, match="synthetic_batch="):
        ClippedGradients(model, logarithm, max_grad_norm=1.0).accumulate(torch.rand(3, 4) + 6)
    engine = ClippedGradients(model, logarithm, max_grad_norm=1.0, synthetic_batch=torch.rand(4, 4) + 7)
    assert engine.accumulate(torch.rand(3, 4) + 6).shape == (3,)


@pytest.mark.parametrize("how", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.rand(2, 5))])
def test_torchscript_is_refused_by_name(how):
    compiled = how(nn.Sequential(nn.Linear(5, 5)))
    with pytest.raises(InputError, match="model is a TorchScript module"):
        ClippedGradients(compiled, loss, max_grad_norm=1.0)
    with pytest.raises(InputError, match="module '1' is a TorchScript module"):
        ClippedGradients(nn.Sequential(nn.Linear(5, 5), compiled), loss, max_grad_norm=1.0)


def test_a_registered_rule_is_used_and_a_wrong_one_is_refused(monkeypatch):
    from dp_microadam import register_rule
    from dp_microadam.clipping.rules import families
    from dp_microadam.clipping.rules.rule import LayerRule

    monkeypatch.setattr(families, "_REGISTERED", {})
    factor = [1.0]

    class Rule(LayerRule):
        def gradients(self, inputs, deltas, rows):
            return {"weight": factor[0] * (deltas * inputs.clamp(max=0)).flatten(1).sum(1, keepdim=True)}

    def engine():
        torch.manual_seed(0)  # some initial weights give inputs of PReLU that are all positive, where no rule matters
        model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2))
        return ClippedGradients(model, lambda model, batch: model(batch).square().sum(1), max_grad_norm=1.0)

    register_rule(nn.PReLU, Rule)
    right = engine()
    right.accumulate(torch.randn(3, 4))
    assert isinstance(right._observed.rules["1"], Rule)
    factor[0] = 0.5
    with pytest.raises(InputError, match=r"1\.weight"):
        engine().accumulate(torch.randn(3, 4))
    with pytest.raises(InputError, match=r"family is 'PReLU'; it must be a subclass of torch\.nn\.Module"):
        register_rule("PReLU", Rule)
    with pytest.raises(InputError, match=r"it must be a subclass of LayerRule"):
        register_rule(nn.PReLU, nn.PReLU)
