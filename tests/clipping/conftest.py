"""Compares the engine with its slow reference implementation."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum

STRATEGIES = (None, "ghost", "keep", "drop")


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Parameters away from their special initial values (gains of one, biases of zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def random_loss(model: nn.Module, batch: object) -> Tensor:
    """A loss with another output gradient at every position and in every example."""
    output = model(**batch) if isinstance(batch, dict) else model(batch[0] if isinstance(batch, tuple) else batch)
    output = getattr(output, "logits", output)
    output = output[0] if isinstance(output, tuple) else output
    pattern = torch.linspace(-1, 1.3, output[0].numel(), dtype=output.dtype).view_as(output[0])
    return (output.sin() * pattern + 0.1 * output).flatten(1).sum(1)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def square_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).flatten(1).square().sum(1)


def linear_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The output gradient is the second tensor, whatever the model computes."""
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def size(sums: dict[str, Tensor]) -> float:
    """The norm over all parameters together, in double precision."""
    return float(flat(sums).norm())


def flat(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([sums[name].flatten().double() for name in sorted(sums)])


@pytest.fixture(scope="session")
def assert_agrees() -> Callable[..., None]:
    """The engine's sums and norms are the twin's: to 1e-9 in float64 and to 1e-5 of the gradient's norm in float32.

    Every engine checks the model anew, which takes most of the time: in ``make test`` only the first strategy runs in float32.
    """

    def check(
        model: nn.Module,
        batch: object,
        *,
        strategies: tuple[str | None, ...] = STRATEGIES,
        loss: Callable = random_loss,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        randomize(model)
        then()
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            model.to(dtype)
            converted = tree_map(lambda leaf, dtype=dtype: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)
            _, norms = clipped_sum(model, loss, converted, max_grad_norm=1.0)
            bound = sorted(norms)[len(norms) // 2] * 0.999 + 1e-6  # some examples are clipped, some are not
            expected, norms = clipped_sum(model, loss, converted, max_grad_norm=bound)
            for strategy in strategies if THOROUGH or dtype == torch.float64 else strategies[:1]:
                engine = ClippedGradients(model, loss, max_grad_norm=bound, strategy=strategy)
                found = engine.accumulate(converted)
                scale = max(norms) + 1e-30
                assert (found.double() - torch.tensor(norms, dtype=torch.float64)).abs().max() <= tolerance * scale
                error = (flat(engine.sums) - flat(expected)).norm()
                assert error <= tolerance * max(float(flat(expected).norm()), bound), (strategy, dtype)

    return check
