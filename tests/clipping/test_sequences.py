"""Attention, recurrent layers, bags of embeddings and transposed convolutions agree with one example at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.layers import DPMultiheadAttention
from thoroughness import examples
from torch import Tensor, nn

from dp_microadam.clipping.rules import attention, recurrent

quick = settings(examples(8, quick=3), derandomize=True)


class Attention(nn.Module):
    """Self-attention, or attention to other features of the same example; may run with time first inside."""

    def __init__(self, cross: bool = False, need_weights: bool = False, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.cross, self.need_weights = cross, need_weights
        self.time_first = not options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        other = torch.tanh(x[:, :3, : self.attention.kdim]) if self.cross else x
        padding = other[..., 0] > 0.5
        padding[:, 0] = False
        if self.time_first:
            x, other = x.transpose(0, 1), x.transpose(0, 1) if other is x else other.transpose(0, 1)
        output, weights = self.attention(x, other, other, key_padding_mask=padding, need_weights=self.need_weights)
        output = output.transpose(0, 1) if self.time_first else output
        return output if weights is None else output + weights.sum(-1, keepdim=True)


@quick
@given(
    cross=st.booleans(),
    need_weights=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    extra=st.booleans(),
    other_width=st.booleans(),
    batch=st.integers(1, 5),
)
def test_multihead_attention_agrees_with_the_loop(
    assert_agrees, cross, need_weights, batch_first, bias, extra, other_width, batch
):
    torch.manual_seed(0)
    width = {"kdim": 6, "vdim": 6} if cross and other_width else {}
    model = Attention(cross, need_weights, batch_first=batch_first, bias=bias, add_bias_kv=extra, add_zero_attn=extra, **width)
    assert_agrees(model, torch.randn(batch, 5, 8), strategies=(None,))


def test_a_transformer_decoder_agrees_with_the_loop(assert_agrees):
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.layer(x, x.flip(1), tgt_mask=causal, tgt_is_causal=True)

    torch.manual_seed(0)
    assert_agrees(Decoder(), torch.randn(3, 5, 8), strategies=(None,))


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_attention_used_for_recording_is_that_of_torch(need_weights):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True).double()
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    masks = {
        "attn_mask": torch.randn(6, 5, 5, dtype=torch.float64),
        "key_padding_mask": torch.tensor([[False] * 4 + [True]] * 3),
    }
    expected = module(x, x, x, need_weights=need_weights, average_attn_weights=False, **masks)
    with attention.Unfused():
        found = module(x, x, x, need_weights=need_weights, average_attn_weights=False, **masks)
    torch.testing.assert_close(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if need_weights:
        torch.testing.assert_close(found[1], expected[1])


@quick
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    layers=st.integers(1, 2),
    both_ways=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    projection=st.booleans(),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5)),
)
def test_recurrent_layers_agree_with_the_loop(assert_agrees, kind, layers, both_ways, batch_first, bias, projection, shape):
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"proj_size": 2} if projection and kind is nn.LSTM else {}
            self.layer = kind(4, 3, layers, bias=bias, batch_first=batch_first, bidirectional=both_ways, **options)

        def forward(self, x: Tensor) -> Tensor:
            output, state = self.layer(x if batch_first else x.transpose(0, 1))
            last = (state[0] if kind is nn.LSTM else state).transpose(0, 1).flatten(1)
            return torch.cat([(output if batch_first else output.transpose(0, 1)).flatten(1), last], 1)

    torch.manual_seed(0)
    assert_agrees(Last(), torch.randn(*shape, 4), strategies=(None,))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_step_by_step_are_those_of_torch(kind):
    torch.manual_seed(0)
    options = {"nonlinearity": "relu"} if kind is nn.RNN else {}
    module = kind(4, 3, 2, bidirectional=True, **options).double()
    x, state = torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64)
    hx = (state, state.cos()) if kind is nn.LSTM else state
    expected = module(x, hx)
    with recurrent.step_by_step([module]):
        found = module(x, hx)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(module(x, hx), expected)  # and the module is its own again


@quick
@given(mode=st.sampled_from(["sum", "mean", "max"]), padding=st.booleans(), shape=st.tuples(*[st.integers(1, 5)] * 2))
def test_bags_of_embeddings_agree_with_the_loop(assert_agrees, mode, padding, shape):
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(4, 3, mode=mode, padding_idx=1 if padding else None)
    assert_agrees(bag, torch.randint(4, shape), strategies=(None,))


@pytest.mark.parametrize("last", [True, False])
def test_bags_with_offsets_and_weights_agree_with_the_loop(assert_agrees, last):
    class Bags(nn.Module):
        """Bags of different lengths in one row of indices, the second without entries."""

        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=last)

        def forward(self, ids: Tensor) -> Tensor:
            lengths = ids[:, 0]
            inside = torch.arange(ids.shape[1] - 1) < lengths.unsqueeze(1)
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            flat = ids[:, 1:][inside]
            weights = 0.5 + flat.to(self.bag.weight.dtype)
            return self.bag(flat, offsets if last else offsets[:-1], weights)

    torch.manual_seed(0)
    assert_agrees(Bags(), torch.tensor([[3, 0, 1, 1], [0, 4, 4, 4], [2, 4, 2, 0], [1, 3, 3, 3]]), strategies=(None,))


@st.composite
def transposed(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    dimensions = draw(st.integers(1, 3))
    family = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    groups, stride, dilation = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kernel, more = draw(st.integers(1, 3)), draw(st.integers(0, max(stride, dilation) - 1))
    padding = draw(st.integers(0, dilation * (kernel - 1)))
    layer = family(2 * groups, 3 * groups, kernel, stride, padding, more, groups, draw(st.booleans()), dilation)
    return layer, (2 * groups, *[draw(st.integers(2, 4)) for _ in range(dimensions)])


@quick
@given(case=transposed(), batch=st.integers(1, 4))
def test_transposed_convolutions_agree_with_the_loop(assert_agrees, case, batch):
    model, shape = case
    torch.manual_seed(0)
    assert_agrees(model, torch.randn(batch, *shape))


@pytest.mark.parametrize(
    ("stride", "more", "dilation", "padding", "groups"), [(1, 1, 2, 1, 1), (1, 2, 3, 0, 2), (2, 2, 3, 2, 1), (3, 2, 1, 1, 1)]
)
def test_output_padding_of_any_size_agrees_with_the_loop(assert_agrees, stride, more, dilation, padding, groups):
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(2 * groups, 3 * groups, 2, stride, padding, more, groups, dilation=dilation)
    assert_agrees(layer, torch.randn(3, 2 * groups, 3, 2))


class TimeFirst(nn.Module):
    """Runs a network, and what is done to its result, with the batch in the second dimension."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output = self.network(x.transpose(0, 1))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)


class Positions(nn.Module):
    """A table of positions, a token at the end, a normalization and a weight without a layer, all with time first."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(steps, 1, 4))
        self.token, self.weight = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x + self.positions, self.token.repeat(1, x.shape[1], 1)])
        return self.norm(x) @ self.weight.t()


class SelfAttention(DPMultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


class Seq2Seq(nn.Transformer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.tanh(x[:2]))


TIME_FIRST = {
    "linear": lambda steps: nn.Linear(4, 3),
    "norm": lambda steps: nn.LayerNorm(4),
    "parameters": Positions,
    "encoder layer": lambda steps: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "transformer": lambda steps: Seq2Seq(4, 2, 1, 1, 8, dropout=0.0),
    "recurrent": lambda steps: nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 3)),
    "Opacus' attention": lambda steps: SelfAttention(4, 2, add_bias_kv=True, add_zero_attn=True),
}


# As many steps as examples, as the independence check has, and as it learns from: the shape does not tell rows from columns.
@pytest.mark.parametrize("steps", [4, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 7, 14))])
@pytest.mark.parametrize("name", TIME_FIRST)
def test_layers_with_time_first_agree_with_the_loop(assert_agrees, name, steps):
    torch.manual_seed(0)
    assert_agrees(TimeFirst(TIME_FIRST[name](steps)), torch.randn(4, steps, 4), strategies=(None, "ghost"))


def test_an_embedding_with_time_first_agrees_with_the_loop(assert_agrees):
    torch.manual_seed(0)
    tokens = torch.tensor([[0, 1, 1], [2, 2, 2], [0, 2, 1], [1, 0, 0]])
    assert_agrees(TimeFirst(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))), tokens, strategies=(None,))
