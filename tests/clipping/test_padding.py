"""Chunks that are padded with rows of weight zero have constant shapes and the sums of the examples alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping.batches import batch_size, padded, padded_size, select
from dp_microadam.clipping.row_norms import ClippedRowNorms
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d


class Views(nn.Module):
    """Each example has three views, whose rows lie next to each other, and a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = WeightStandardizedConv2d(2, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3)
        self.table = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.table.weight
        self.seen: list[int] = []

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        self.seen.append(len(images))
        hidden = self.second(self.norm(self.first(images.flatten(0, 1))).tanh()).mean((2, 3))
        return self.head(hidden.view(-1, 3, 4).mean(1) + self.table(tokens))


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(*batch["inputs"]), batch["classes"], reduction="none")


def batch_of(count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 2, 6, 6, generator=generator)
    tokens = torch.randint(5, (count,), generator=generator)
    return {"inputs": (images, tokens), "classes": torch.randint(5, (count,), generator=generator)}


def sums_over_chunks(chunks: list[int], make: Callable[..., ClippedGradients] = ClippedGradients, **options: Any) -> tuple:
    torch.manual_seed(0)
    model = Views().double()
    whole = batch_of(sum(chunks))
    whole["inputs"] = (whole["inputs"][0].double(), whole["inputs"][1])
    engine = make(model, loss, max_grad_norm=0.3, **options)
    engine.check_independence(select(whole, torch.arange(max(chunks))))
    model.seen.clear()
    norms, start = [], 0
    for count in chunks:
        norms.append(engine.accumulate(select(whole, torch.arange(start, start + count))))
        start += count
    return engine.sums, torch.cat(norms), model.seen


@pytest.mark.parametrize(
    "strategy", ["ghost", pytest.param("keep", marks=pytest.mark.slow), pytest.param("drop", marks=pytest.mark.slow), None]
)
def test_padded_chunks_add_what_their_examples_add(strategy):
    """Several rows per example, a weight that is used twice, and a batch of dicts and tuples."""
    options = {"strategy": strategy, "clipping": "per-layer" if strategy is None else "flat"}
    expected, norms, seen = sums_over_chunks([6, 4, 1], **options)
    found, padded_norms, padded_seen = sums_over_chunks([6, 4, 1], padded_sizes=1, **options)
    assert seen == [6, 4, 1]
    assert padded_seen == [6, 6, 6]
    torch.testing.assert_close(padded_norms, norms, rtol=1e-12, atol=0)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-11, atol=1e-13)


def test_padded_chunks_add_the_row_norms_of_their_examples():
    expected, norms, _ = sums_over_chunks([6, 4, 1], ClippedRowNorms)
    found, padded_norms, seen = sums_over_chunks([6, 4, 1], ClippedRowNorms, padded_sizes=2)
    assert seen == [6, 6, 3]
    torch.testing.assert_close(padded_norms, norms, rtol=1e-12, atol=0)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("strategy", ["ghost", "keep", "drop"])
@pytest.mark.parametrize("poison", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_rows_that_pad_a_chunk_whose_first_example_is_not_finite_contribute_nothing(strategy, poison):
    batch = batch_of(3)
    model = Views()
    engine = ClippedGradients(model, loss, max_grad_norm=0.3, strategy=strategy, padded_sizes=1)
    engine.check_independence(batch_of(5))
    engine.accumulate(select(batch, torch.arange(1, 3)))
    expected = {name: total.clone() for name, total in engine.sums.items()}
    engine.reset()
    batch["inputs"][0][0] = poison
    norms = engine.accumulate(batch)
    assert norms.isfinite().tolist() == [False, True, True]
    for name, total in expected.items():
        torch.testing.assert_close(engine.sums[name], total, rtol=1e-4, atol=1e-6)


def test_chunks_keep_their_size_on_the_cpu_unless_asked():
    _, _, seen = sums_over_chunks([6, 4, 1])
    assert seen == [6, 4, 1]


def test_a_check_that_is_repeated_has_the_size_of_padded_chunks():
    """It is at calls 16, 32, …; realised sizes of chunks would otherwise show in the shapes from then on."""
    torch.manual_seed(0)
    model = Views()
    engine = ClippedGradients(model, loss, max_grad_norm=0.3, padded_sizes=1)
    engine.check_independence(batch_of(4))
    for _ in range(17):
        model.seen.clear()
        engine.accumulate(batch_of(2))
        assert model.seen[-1] == 4


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 12))
@examples(200)
def test_padded_sizes_hold_the_examples_and_are_few(count, largest, sizes):
    count = min(count, largest)
    size = padded_size(count, largest, sizes)
    assert count <= size <= largest
    assert size - count <= -(-largest // sizes) - 1
    assert len({padded_size(some, largest, sizes) for some in range(1, largest + 1)}) <= sizes


def test_a_padded_batch_keeps_its_structure_and_what_is_no_tensor():
    batch = {"x": torch.arange(6).view(3, 2), "rest": (torch.ones(3), "name", None)}
    longer = padded(batch, 5)
    assert longer["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]
    assert longer["rest"][1:] == ("name", None)
    assert batch_size({"x": longer["x"], "y": longer["rest"][0]}) == 5


def test_a_negative_number_of_sizes_is_refused():
    with pytest.raises(InputError, match="padded_sizes is -1"):
        ClippedGradients(Views(), loss, max_grad_norm=1.0, padded_sizes=-1)
