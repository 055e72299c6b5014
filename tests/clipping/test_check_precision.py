"""The independence check compares in full precision, and says so where it cannot compare in double."""

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping.precision import full_precision
from dp_microadam.errors import PrivacyWarning
from dp_microadam.workbench.models.resnets import wide_resnet

SIZE = 15  # above the batches of 13 that the check itself learns from


pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "conv"), reason="before torch 2.9 the settings have other names"
)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def tf32(values: Tensor) -> Tensor:
    """Rounded to the ten bits of mantissa that TF32 keeps; the gradient passes through."""
    bits = values.detach().contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return values + (rounded - values.detach())


def tf32_is_allowed() -> bool:
    """Whether convolutions on the CPU may use TF32, by the setting that is beside that of cuDNN."""
    return torch.backends.mkldnn.conv.fp32_precision != "ieee"


@contextlib.contextmanager
def convolutions_in_tf32(*, obedient: bool) -> Iterator[list[bool]]:
    """Convolutions of large batches round as cuDNN's may, which use TF32 by default; yields whether each was allowed to.

    An ``obedient`` one rounds only if the setting allows it.
    """
    allowed: list[bool] = []
    plain = nn.Conv2d._conv_forward

    def rounding(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        allowed.append(tf32_is_allowed())
        if len(x) >= SIZE and x.dtype == torch.float32 and (allowed[-1] or not obedient):
            x = tf32(x)
        return plain(self, x, weight, bias)

    nn.Conv2d._conv_forward = rounding  # type: ignore[method-assign]
    try:
        yield allowed
    finally:
        nn.Conv2d._conv_forward = plain  # type: ignore[method-assign]


def engine_and_batch() -> tuple[ClippedGradients, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = wide_resnet(10, 1, 10)
    return ClippedGradients(model, cross_entropy, max_grad_norm=1.0), (torch.randn(SIZE, 3, 8, 8), torch.arange(SIZE) % 10)


def test_full_precision_on_a_gpu_rules_out_tf32():
    backends = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    with full_precision(torch.device("cuda")):
        assert [place.fp32_precision for place in places] == ["ieee"] * 3
    assert [place.fp32_precision for place in places] == before


def test_a_sound_model_is_accepted_where_convolutions_of_large_batches_would_use_tf32():
    assert tf32_is_allowed(), "torch's default"
    engine, batch = engine_and_batch()
    with convolutions_in_tf32(obedient=True) as allowed:
        engine.check_independence(batch)
        assert allowed
        assert not any(allowed)
        with torch.no_grad():
            engine._model(batch[0])
        assert allowed[-1], "the setting is back"


def test_rounding_that_depends_on_the_batch_size_is_no_mixing():
    """Convolutions that use TF32 whatever the setting stand for kernels that round differently for large batches."""
    engine, batch = engine_and_batch()
    with convolutions_in_tf32(obedient=False):
        engine.check_independence(batch)


def test_mixing_at_one_batch_size_is_refused():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + 1e-3 * x.mean(0) if len(x) >= SIZE else x)

    engine = ClippedGradients(Mixing(), cross_entropy, max_grad_norm=1.0)
    with pytest.raises(InputError, match="mixes examples"):
        engine.check_independence((torch.randn(SIZE, 5), torch.arange(SIZE) % 4))


class Failing(nn.Module):
    """Raises the given error in double precision."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise self.error
        return self.layer(x)


OUT_OF_MEMORY = {
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "host": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "Python": MemoryError(),
}


@pytest.mark.parametrize("where", OUT_OF_MEMORY)
def test_a_check_that_runs_out_of_memory_in_double_precision_says_that_it_is_weaker(where):
    engine = ClippedGradients(Failing(OUT_OF_MEMORY[where]), cross_entropy, max_grad_norm=1.0)
    with pytest.warns(PrivacyWarning, match="not enough memory"):
        engine.check_independence((torch.randn(5, 5), torch.arange(5) % 4))


def test_a_check_that_fails_in_double_precision_for_an_unknown_reason_says_that_it_is_weaker():
    engine = ClippedGradients(Failing(LookupError("table")), cross_entropy, max_grad_norm=1.0)
    with pytest.warns(PrivacyWarning, match="LookupError"):
        engine.check_independence((torch.randn(5, 5), torch.arange(5) % 4))


def test_a_model_without_double_precision_is_checked_as_it_is():
    class InFloat32(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.float())

    engine = ClippedGradients(InFloat32(), cross_entropy, max_grad_norm=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        engine.check_independence((torch.randn(5, 5), torch.arange(5) % 4))


def test_running_out_of_memory_later_in_the_check_is_no_reason_to_leave_something_out():
    """On large numbers, say: a model may refuse those, but memory says nothing about the model."""

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            if bool(x.detach().abs().max() > 100):
                raise OUT_OF_MEMORY["GPU"]
            return self.layer(x)

    engine = ClippedGradients(Greedy(), cross_entropy, max_grad_norm=1.0)
    with pytest.raises(torch.OutOfMemoryError):
        engine.check_independence((torch.randn(5, 5), torch.arange(5) % 4))
