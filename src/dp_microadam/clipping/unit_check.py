"""The check before the first step that users of several examples are clipped as a whole, each by the norm of their own.

Formal guarantees: after :func:`check_units` has returned, on synthetic users of r examples each, some of weight zero,

- the norm of each user's gradient, and the unclipped sum over users, were those that autograd computes from weighted losses;
- each user added at most the bound to the clipped sum, and together they added what each adds alone.

Why this is enough, and the many passes of the independence check (``independence.py``) are not repeated for every r: the loss
function is still one of examples. That check has shown that an example's loss, and its output gradients, depend on that example
alone, at any position and in batches of any size that occur, and which rows of every tensor are its own. A batch of U users is
such a batch of U·r examples. The weights multiply losses, so they multiply the output gradients in the rows of each example; a
user's gradient is the sum over the rows of r consecutive examples, and depends on no other user. What is new for each r is only
how the rules of the layers add up these rows, which is arithmetic of r and of shapes, and is compared with autograd here. Both
depend on k, the public number of examples per user, and not on what anyone has.

A loss that mixes the examples of one user is refused too: it is not one of examples, and what a user brings would then not be
the mean of their examples' gradients, as the documentation says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dp_microadam.clipping.batches import repeated, synthetic
from dp_microadam.clipping.checked_model import CheckedModel
from dp_microadam.clipping.clip_check import check_clip
from dp_microadam.clipping.gradient_check import check_gradients_against_autograd
from dp_microadam.clipping.no_side_effects import no_side_effects
from dp_microadam.clipping.precision import full_precision

if TYPE_CHECKING:
    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.clipping.recording import Observed

_UNITS = 3


def check_units(
    engine: ClippedGradients,
    observed: Observed,
    batch: Any,
    per_unit: int,
    room: int,
    synthetic_batch: Any = None,
    precision: float = 0.0,
) -> None:
    """Raise :class:`InputError` or :class:`PrivacyError` unless units of ``per_unit`` examples are clipped as a whole.

    Takes two passes over three units, two backward passes more, and those of ``check_clip``; over fewer units where three would
    be more than ``room`` examples, the largest batch. Only structure, shapes and types of ``batch`` are used.
    """
    units = max(1, min(_UNITS, room // per_unit))
    weights = _weights(units, per_unit)
    count = weights.numel()
    examples = synthetic(batch, count)[0] if synthetic_batch is None else repeated(synthetic_batch, count)[0]
    with full_precision(engine._device), no_side_effects(engine._model) as seed_all:
        checked = CheckedModel(engine._model, engine._loss, observed, seed_all, precision)
        check_gradients_against_autograd(checked, examples, weights)
    check_clip(engine, observed, batch, synthetic_batch, precision, weights)


def _weights(units: int, per_unit: int) -> Tensor:
    """Means over all of a unit's examples, over the first one, and over half of them."""
    present = torch.tensor([per_unit, 1, max(1, per_unit // 2)])[:units]
    return (torch.arange(per_unit) < present.unsqueeze(1)) / present.unsqueeze(1)
