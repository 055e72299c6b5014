"""What cannot be clipped exactly is refused, by name, with what to use instead; so is an engine that does not clip."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dp_microadam import ClippedGradients, InputError, register_rule, replace_batchnorm
from dp_microadam.clipping.engine import ClippedRowNorms
from dp_microadam.clipping.rules import families
from dp_microadam.clipping.rules.embedding import EmbeddingCall
from dp_microadam.clipping.rules.rule import LayerRule, PartsCall
from dp_microadam.errors import PrivacyError

from .conftest import square_loss as loss


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


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Odd(nn.Module):
    """Uses its layer or its parameter in a way that cannot be observed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer, self.token = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.kept = [self.layer.weight]
        self.lstm.requires_grad_(how == "packed")
        self.layer.requires_grad_(how != "packed")
        self.token.requires_grad_(how in PARAMETER)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "one row more":
                return self.layer(torch.cat([x, torch.ones(1, 4)]))[:-1]
            case "packed":
                steps, lengths = x.view(-1, 1, 4).repeat(1, 2, 1), torch.full((len(x),), 2)
                return self.lstm(nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True))[1][0][0]
            case "written by index":
                x = self.layer(x).view(-1, 1, 4).repeat(1, 2, 1)
                x[:, 0] = self.token
                return x
            case "autograd function":
                return self.layer(Product.apply(x, self.token))
            case "reference":
                return self.layer(x) + x @ self.kept[0]
            case "random attention":
                y = self.layer(x).view(-1, 1, 2, 2)
                return F.scaled_dot_product_attention(y, y, y, self.token.view(2, 2), dropout_p=0.5)
            case "reentrant checkpoint":
                return checkpoint(self.layer, self.layer(x), use_reentrant=True)
        x = x + 1
        y = self.layer(x)
        x.mul_(2)
        return y + x


PARAMETER = ("written by index", "autograd function", "random attention")
ODD = {
    "one row more": "layer 'layer'.*first dimension must be the batch",
    "packed": "LSTM was given PackedSequence; pass .* padded to a length",
    "written by index": "'token' is written into a tensor",
    "autograd function": "'token'.*(not observed|no operation)",
    "reference": "'layer.weight' is used where it is not observed",
    "random attention": "'token'.*random numbers",
    "reentrant checkpoint": "use_reentrant=False",
    "overwritten in place": "input of layer 'layer' was overwritten",
}


@pytest.mark.parametrize("how", ODD)
def test_a_use_that_cannot_be_observed_is_refused_by_name(how):
    torch.manual_seed(0)
    refuses(Odd(how), torch.randn(3, 4), ODD[how])


MODELS = {
    "running statistics": (
        lambda: nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.Conv2d(3, 4, 3)),
        torch.randn(2, 3, 5, 5),
        "'0' is InstanceNorm2d.*track_running_stats=False",
    ),
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)),
        torch.randint(5, (3, 2)),
        "embedding '0' has max_norm",
    ),
    "counts": (
        lambda: nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True)),
        torch.randint(5, (3, 2)),
        "embedding '0' has scale_grad_by_freq",
    ),
    "unused": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Identity()).append(nn.ModuleDict({"forgotten": nn.Linear(4, 2)})),
        torch.randn(3, 4),
        "'2.forgotten.weight'.*requires_grad_",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_cannot_be_clipped_is_refused_by_name(kind):
    build, batch, message = MODELS[kind]
    refuses(build(), batch, message, (lambda m, x: loss(m[0], x)) if kind == "unused" else loss)


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


def test_parameters_frozen_since_are_refused_by_name():
    model = nn.Linear(4, 2)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    model.bias.requires_grad_(False)
    with pytest.raises(InputError, match="'bias' was frozen"):
        engine.accumulate(torch.randn(3, 4))
    with pytest.raises(InputError, match="no trainable parameter"):
        ClippedGradients(model.requires_grad_(False), loss, max_grad_norm=1.0)


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
    monkeypatch.setattr(families, "_REGISTERED", {})
    factor = [1.0]

    class Rule(LayerRule):
        def gradients(self, inputs, deltas, rows):
            return {"weight": factor[0] * (deltas * inputs.clamp(max=0)).flatten(1).sum(1, keepdim=True)}

    def engine():
        torch.manual_seed(0)  # some initial weights give inputs of PReLU that are all positive, where no rule matters
        model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2))
        return ClippedGradients(model, loss, max_grad_norm=1.0)

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


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


OPTIONS = {
    "flat": {},
    "a bound that no gradient reaches": {"max_grad_norm": 1e6},
    "per layer": {"clipping": "per-layer"},
    "scaled": {"scale": {"0.weight": torch.full((6, 4), 3.0)}},
    "some rows": {"row_masks": {"0.weight": torch.arange(6) % 2 == 0}},
}


def ones(norms: Tensor, bound: float) -> Tensor:
    return torch.ones_like(norms)


def one_for_all(norms: Tensor, bound: float) -> Tensor:
    return (bound / torch.linalg.vector_norm(norms).clamp(min=bound)).expand_as(norms)


def does_not_clip(engine: ClippedGradients, batch: Tensor) -> None:
    for way in (engine.check_independence, engine.accumulate):
        with pytest.raises(PrivacyError, match="fault of the clipping engine"):
            way(batch)
    assert all(not total.any() for total in engine.sums.values())


@pytest.mark.parametrize("kind", [ClippedGradients, ClippedRowNorms])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_clipping_coefficients_that_are_all_one_are_refused_before_the_first_step(monkeypatch, kind, options):
    engine = kind(mlp(), loss, **{"max_grad_norm": 1.0, **options})
    bounds = engine.sensitivity, engine.layer_bounds
    engine.check_independence(torch.randn(8, 4))  # and one that clips is left as it was
    assert (engine.sensitivity, engine.layer_bounds) == bounds
    assert all(not total.any() for total in engine.sums.values())
    engine.scale = engine.scale  # refused within a step
    monkeypatch.setattr(ClippedGradients, "_coefficients", staticmethod(ones))
    does_not_clip(kind(mlp(), loss, **{"max_grad_norm": 1.0, **options}), torch.randn(8, 4))


def test_one_coefficient_for_a_whole_chunk_is_refused(monkeypatch):
    monkeypatch.setattr(ClippedGradients, "_coefficients", staticmethod(one_for_all))
    does_not_clip(ClippedGradients(mlp(), loss, max_grad_norm=1.0), torch.randn(8, 4))


def test_a_clip_that_leaves_out_biases_is_refused(monkeypatch):
    def clipped_sums(self: PartsCall, coefficients: Tensor) -> dict[str, Tensor]:
        ones = torch.ones_like(coefficients)
        return {name: part.weighted_sum(ones if name == "bias" else coefficients) for name, part in self.parts.items()}

    monkeypatch.setattr(PartsCall, "clipped_sums", clipped_sums)
    does_not_clip(ClippedGradients(mlp(), loss, max_grad_norm=1.0), torch.randn(8, 4))


def test_a_clip_that_leaves_out_embeddings_is_refused(monkeypatch):
    original = EmbeddingCall.clipped_sums
    monkeypatch.setattr(EmbeddingCall, "clipped_sums", lambda self, c: original(self, torch.ones_like(c)))
    does_not_clip(ClippedGradients(nn.Embedding(5, 3), loss, max_grad_norm=1.0), torch.randint(5, (8, 4)))


def test_models_that_draw_random_numbers_are_checked_on_the_examples_that_are_given(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 60), nn.Dropout(0.5), nn.Linear(60, 2))
    state = torch.get_rng_state()
    given = torch.arange(20.0).view(5, 4)
    ClippedGradients(model, loss, max_grad_norm=1.0, synthetic_batch=given).check_independence(torch.ones(8, 4))
    monkeypatch.setattr(ClippedGradients, "_coefficients", staticmethod(ones))
    does_not_clip(ClippedGradients(model, loss, max_grad_norm=1.0, synthetic_batch=given), torch.ones(8, 4))
    assert torch.equal(torch.get_rng_state(), state)
