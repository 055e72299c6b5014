"""The check of the clip itself, before the first step: no synthetic example adds more than the bound to the sum.

The independence check (``independence.py``) compares norms and unclipped sums with autograd. This check covers the step
between them: coefficients must follow from the norms, apply to every part of the gradient, and belong to the right example.
"""

from __future__ import annotations

import copy
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dp_microadam.clipping.batches import batch_size, repeated, select, synthetic
from dp_microadam.clipping.no_side_effects import no_side_effects
from dp_microadam.clipping.precision import full_precision
from dp_microadam.errors import PrivacyError

if TYPE_CHECKING:
    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.clipping.recording import Observed

_EXAMPLES = 3
# Relative to the bound. An example that is not clipped at all exceeds the bound by all of it.
_ROUNDING = 1e-3
# Relative to the bound, for each example: passes over one example and over several differ in the order of their additions.
_ROUNDING_OF_SUMS = 3e-2
# Examples whose gradients are smaller than this part of the largest may be clipped or not.
_SMALL = 1e-3


def check_clip(
    engine: ClippedGradients,
    observed: Observed,
    batch: Any,
    synthetic_batch: Any = None,
    precision: float = 0.0,
    weights: Tensor | None = None,
) -> None:
    """Raise :class:`PrivacyError` unless each of three synthetic examples adds at most the bound to the sum.

    With ``weights``, (units, examples per unit), the same of units of several examples.

    The examples are shaped like those of ``batch``, or taken from ``synthetic_batch``. They go through a copy of the engine
    whose bound is half of their smallest gradient norm, so that every one has to be clipped. First each goes alone: what it
    adds has at most that norm, up to rounding. Then all go together: the sum must be that of what each adds alone, so none was
    clipped by the norm of another. The second part is left out for models that draw random numbers, which differ from pass to
    pass. ``precision`` is that of the products in the model. It takes five forward and backward passes of one to three
    examples.

    Formal guarantees: after it has returned, the engine's sum moved by at most the bound for each of these examples.
    """
    count = _EXAMPLES if weights is None else weights.numel()
    examples = synthetic(batch, count)[0] if synthetic_batch is None else repeated(synthetic_batch, count)[0]
    precision = max(precision, *(torch.finfo(p.dtype).eps for p in engine._trainable.values()))
    rows = torch.arange(count).view(-1, 1 if weights is None else weights.shape[1])
    everyone = torch.arange(len(rows))
    with full_precision(engine._device), no_side_effects(engine._model) as seed_all:
        trial = _EngineCopy(engine)

        def add(bound: float, units: Tensor) -> Tensor:
            seed_all(0)
            chosen = select(examples, rows[units].flatten())
            return trial.add(bound, observed, chosen, None if weights is None else weights[units])

        norms = add(engine.sensitivity, everyone).cpu()
        largest = float(norms.max())
        if not (largest > 0 and math.isfinite(largest)):
            return  # nothing to clip
        bound = 0.5 * float(norms[norms > _SMALL * largest].min())
        limit = bound * (1 + max(_ROUNDING, 4 * precision))
        total = {name: torch.zeros_like(part) for name, part in trial.sums.items()}
        drew = False
        for unit in everyone:
            before = _random_state()
            add(bound, unit.view(1))
            drew = drew or _random_state() != before
            if not _norm(trial.sums) <= limit:
                raise PrivacyError(
                    f"an example adds {_norm(trial.sums):.6g} to the sum of clipped gradients, but the clipping norm was "
                    f"{bound:.6g}; this is a fault of the clipping engine, do not train with it"
                )
            for name, part in trial.sums.items():
                total[name] += part
        if drew:
            return
        add(bound, everyone)
        for name, part in trial.sums.items():
            total[name] -= part
        if not _norm(total) <= max(_ROUNDING_OF_SUMS, 8 * precision) * bound * len(everyone):
            raise PrivacyError(
                "examples add something else to the sum of clipped gradients together than one by one, so at least one is not "
                "clipped by its own norm; this is a fault of the clipping engine, do not train with it"
            )


class _EngineCopy:
    """A copy of an engine that shares its model and what was learned about it, with a bound and sums of its own."""

    def __init__(self, engine: ClippedGradients) -> None:
        self._engine = engine
        self._copy = copy.copy(engine)

    @property
    def sums(self) -> dict[str, Tensor]:
        return self._copy.sums

    def add(self, bound: float, observed: Observed, batch: Any, weights: Tensor | None = None) -> Tensor:
        """Reset the sums and add these examples, clipped to this bound; returns the norms."""
        engine = self._engine
        self._copy._bound = bound
        if engine._layer_bounds is not None:
            self._copy._layer_bounds = {name: own * bound / engine._bound for name, own in engine._layer_bounds.items()}
        self._copy.reset()
        return self._copy._add(observed, batch, batch_size(batch), weights=weights)


def _norm(parts: dict[str, Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts.values()]).norm())


def _random_state() -> tuple[Any, ...]:
    """The state of all random streams; a pass that changes it has drawn random numbers."""
    gpus = [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    numpy_state = np.random.get_state()  # noqa: NPY002 - the global stream is the one a model may use
    return torch.get_rng_state().tolist(), gpus, random.getstate(), str(numpy_state)
