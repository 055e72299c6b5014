"""A parameter's gradient is the sum over all its uses, wherever they are, before it is clipped."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import THOROUGH, examples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dp_microadam import ClippedGradients
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

quick = settings(examples(6, quick=3), derandomize=True)
# A parameter with several uses is clipped the same way, whatever is forced for layers with one.
STRATEGIES = (None, "ghost", "keep", "drop") if THOROUGH else (None, "ghost")


class Repeated(nn.Module):
    """The same layers several times, as in networks that share weights over depth."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.standardized = WeightStandardizedConv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(torch.tanh(self.linear(x)))
            x = self.convolution(x.unsqueeze(1)).sum(1)
            x = x + self.standardized(x.view(-1, 1, 2, 3)).flatten(1)
        return x


@quick
@given(times=st.integers(1, 4), batch=st.integers(1, 5))
def test_layers_called_several_times_agree_with_the_loop(assert_agrees, times, batch):
    torch.manual_seed(0)
    assert_agrees(Repeated(times), torch.randn(batch, 6), strategies=(None, "drop"))


class Tied(nn.Module):
    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.functional = functional
        if not functional:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.embedding(ids.flip(1)).sin()
        x = torch.tanh(self.mix(x + self.positions(torch.arange(ids.shape[1]))))
        return F.linear(x, self.embedding.weight) + self.head(x) if self.functional else self.head(x)


@pytest.mark.parametrize("functional", [True, False])
def test_tied_embeddings_agree_with_the_loop(assert_agrees, functional):
    torch.manual_seed(0)
    assert_agrees(Tied(functional), torch.randint(7, (4, 5)), strategies=STRATEGIES)


class TiedOnce(nn.Module):
    """A language model's table: looked up once, and the weight of the output layer."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(50, 4), nn.Linear(4, 4), nn.Linear(4, 50, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(ids)).sin())


@pytest.mark.parametrize("bias", [False, True])
def test_a_table_that_is_input_and_output_is_clipped_without_forming_its_gradients(assert_agrees, bias, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("dp_microadam.clipping.passes.JointCall", None)  # which forms them
    assert_agrees(TiedOnce(bias), torch.randint(50, (4, 5)), strategies=STRATEGIES)


@pytest.mark.parametrize("bias", [False, True])
def test_where_the_two_uses_of_a_table_cancel_its_gradient_is_formed(bias):
    """λxᵀ + δ at the token looked up, with δ = −λx up to one part in 10⁵: what is left is below what Gram products resolve."""
    torch.manual_seed(0)

    class Cancelling(TiedOnce):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            own = self.head(x.detach())[..., 0]  # λ is 1 at token 0, x its row
            return own - (1 - 1e-5) * (x * x.detach()).sum(-1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return 1e4 * model(batch).sum(1)

    model, batch = Cancelling(bias), torch.zeros(3, 2, dtype=torch.long)
    model.mix.requires_grad_(False)
    with torch.no_grad():
        model.head.weight.normal_(std=3.0)
    engine = ClippedGradients(model, loss, max_grad_norm=1e-3)
    norms = engine.accumulate(batch)
    for example, norm in zip(batch, norms, strict=True):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss(model, example.unsqueeze(0)).sum(), trainable)
        expected = torch.cat([part.flatten() for part in gradients]).norm()
        assert float(norm) == pytest.approx(float(expected), rel=1e-4)
    total = torch.cat([part.flatten() for part in engine.sums.values()]).norm()
    assert float(total) == pytest.approx(3e-3, rel=1e-4)


class Bare(nn.Module):
    """What vision transformers add to their layers, and other ways to use a parameter."""

    def __init__(self, tokens: int = 5) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, tokens + 1, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.biases = nn.Parameter(torch.randn(9, 2))
        self.temperature = nn.Parameter(torch.randn(()))
        self.queries = nn.Parameter(torch.randn(3, 4))
        self.learned = nn.Embedding(tokens + 1, 4)
        self.layer, self.pair = nn.Linear(4, 4), nn.Linear(4, 8)
        self.register_buffer("index", torch.randint(9, (tokens + 1, tokens + 1)))

    def forward(self, x: Tensor) -> Tensor:
        count = len(x)
        x = torch.cat([self.token.expand(count, -1, -1), x], 1) + self.positions
        x = x + self.learned(torch.arange(x.shape[1]))
        x = x + self.scale * self.layer(x)
        q, k = self.pair(x).unflatten(2, (2, 2, 2)).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.temperature.exp()
        scores = scores + self.biases[self.index].permute(2, 0, 1).unsqueeze(0)
        x = torch.einsum("bhij,bjd->bid", scores.softmax(-1), x)
        x = torch.cat([x, self.layer(self.queries).repeat(count, 1, 1)], 1)
        return F.layer_norm(x @ self.queries.T - self.scale.sum(), (3,), self.biases[:3, 0])


@quick
@given(tokens=st.integers(1, 6), batch=st.integers(1, 8))
def test_parameters_outside_layers_agree_with_the_loop(assert_agrees, tokens, batch):
    # Among the shapes are batches as long as the sequence.
    torch.manual_seed(0)
    assert_agrees(Bare(tokens), torch.randn(batch, tokens, 4), strategies=(None,))


@pytest.mark.parametrize("batch", [pytest.param(5, marks=pytest.mark.slow), 7, 14])
def test_rows_that_equal_the_batch_by_coincidence_are_told_apart(assert_agrees, batch):
    # 7 positions and 14 entries: multiples of the sizes that rows are learned with.
    class Coincidence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.table = nn.Parameter(torch.randn(7, 2)), nn.Parameter(torch.randn(14, 5))
            self.mix = nn.Linear(2, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.positions.cos()
            return self.mix(x).flatten(1) + (self.table.sin() @ self.table.T).sum(0).view(7, 2).repeat(1, 7)[:, :7].flatten()

    torch.manual_seed(0)
    assert_agrees(Coincidence(), torch.randn(batch, 7, 2), strategies=(None,))


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(4, 3, 2)])
def test_parametrized_weights_agree_with_the_loop(assert_agrees, layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(layer))
    assert_agrees(model, torch.randn(3, 4, 4), strategies=(None,))


def test_a_penalty_on_weights_counts_for_every_example(assert_agrees):
    def penalized(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sin().sum(1) + 0.1 * model[0].weight.square().sum()

    torch.manual_seed(0)
    assert_agrees(nn.Sequential(nn.Linear(4, 3)), torch.randn(3, 4), loss=penalized)


@pytest.mark.parametrize("strategy", [None, "ghost", "keep", "drop"])
def test_views_of_an_example_are_averaged_inside_the_clip(assert_agrees, strategy):
    def averaged(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch.flatten(0, 1))
        pattern = torch.linspace(-1, 1.3, output.shape[1], dtype=output.dtype)
        return (output.sin() * pattern).sum(1).view(batch.shape[:2]).mean(1)

    torch.manual_seed(0)
    model = nn.Sequential(
        WeightStandardizedConv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Flatten(2),
        nn.Linear(9, 3),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    for views in (1, 3) if THOROUGH or strategy is None else (3,):
        assert_agrees(model, torch.randn(4, views, 2, 8, 8), loss=averaged, strategies=(strategy,))


def test_windowed_attention_with_a_table_of_biases_agrees_with_the_loop(assert_agrees):
    class Windows(nn.Module):
        """Four windows of four tokens per example."""

        def __init__(self) -> None:
            super().__init__()
            self.pair, self.norm = nn.Linear(4, 12), nn.LayerNorm(4)
            self.biases = nn.Parameter(torch.randn(7, 2))
            self.register_buffer("index", torch.arange(4).view(4, 1) - torch.arange(4) + 3)

        def forward(self, x: Tensor) -> Tensor:
            windows = self.norm(x.reshape(-1, 4, 4))
            q, k, v = self.pair(windows).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(2, 3) + self.biases[self.index].permute(2, 0, 1)
            return (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)

    torch.manual_seed(0)
    assert_agrees(Windows(), torch.randn(3, 16, 4), strategies=(None,))


def test_checkpointed_blocks_with_parameters_of_their_own_agree_with_the_loop(assert_agrees):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            self.scale = nn.Parameter(torch.randn(1, 4))

        def run(self, x: Tensor) -> Tensor:
            return self.block(x) * self.scale.exp() + self.scale

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):  # the first block holds the first trainable layer
                x = checkpoint(self.run, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    assert_agrees(Checkpointed(), torch.randn(3, 4), strategies=STRATEGIES)


def test_every_layer_of_a_block_that_shares_nothing_is_clipped_to_its_own_bound():
    torch.manual_seed(0)
    model = Bare()
    engine = ClippedGradients(model, lambda m, b: 1e4 * m(b).flatten(1).sin().sum(1), max_grad_norm=0.3, clipping="per-layer")
    engine.accumulate(torch.randn(1, 5, 4))
    own = torch.cat([engine.sums[f"pair.{key}"].flatten() for key in ("weight", "bias")]).norm()
    assert float(own) == pytest.approx(engine.layer_bounds["pair"], rel=1e-5)
