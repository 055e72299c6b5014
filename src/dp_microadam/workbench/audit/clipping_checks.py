"""Checks of the clipped sums, for every family of layers that the clipping engine supports.

For each, ``ClippedGradients`` sums six examples in two chunks, half of them above the clipping norm C, and each of them alone.
The sum must be that of gradients taken one at a time by autograd in double precision and clipped in plain sight, none alone may
exceed C, and an example whose loss is no number must add nothing. Then the six are those of three users, with three, one and
two of them, and the sum must be that of the users' clipped mean gradients. There is no chance in it: errors are measured
against C, and a float32 sum is allowed 2e-5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.clipping.batches import select
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.layer_bounds import layer_of
from dp_microadam.clipping.per_example import clipped, norm, of_users, per_example_gradients
from dp_microadam.clipping.row_norms import ClippedRowNorms
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.workbench.audit.check import Check, refused
from dp_microadam.workbench.audit.layer_families import FAMILIES, Family

TOLERANCE = 2e-5
"""Tolerance in units of the clipping norm. An example that is not or only partly clipped exceeds it ten-thousandfold."""

_EXAMPLES = 6
_FIRST_CHUNK = 4
_WEIGHTS = torch.tensor([0.3, 3.0, 1.0, 2.0, 0.5, 1.5])
# Three users with three, one and two of the examples; the second's and third's rows are filled up with their first.
_ROWS_OF_USERS = torch.tensor([0, 1, 2, 3, 3, 3, 4, 5, 4])
_SHARES_OF_USERS = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
_QUESTION = (
    "does each example, or user, move the sum by its clipped gradient, by at most C, and by nothing if it is not finite?"
)

Sums = dict[str, Tensor]


def clipping_checks(advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """One check for every family of layers."""
    checks = []
    for number, family in enumerate(FAMILIES):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            checks.append(family_check(family))
        advance(1)
    return checks


def family_check(family: Family) -> Check:
    """The check of one family: the largest error of the engine, in units of the clipping norm."""
    model = _randomized(family.model())
    batch = family.inputs(_EXAMPLES), _WEIGHTS.clone()
    options = dict(family.options(model))
    scale = _factors(model, options)
    gradients = [
        {name: part * scale[name] if name in scale else part for name, part in gradient.items()}
        for gradient in per_example_gradients(*_in_double(model, family, batch))
    ]
    bound = 0.999 * sorted(norm(gradient) for gradient in gradients)[_EXAMPLES // 2]
    try:
        with family.engine(model, family.loss, max_grad_norm=bound, **options) as engine:
            errors = _errors(engine, gradients, batch, bound)
    except DPMicroAdamError as error:
        return refused("clipping", family.name, _QUESTION, error)
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Check(
        "clipping",
        family.name,
        _QUESTION,
        "largest error over C",
        errors[worst],
        0.0,
        TOLERANCE,
        0.0,
        f"{_EXAMPLES} examples, {sum(p.numel() for p in model.parameters()):,} parameters",
        worst,
    )


def _errors(engine: ClippedGradients, gradients: list[Sums], batch: tuple[Tensor, Tensor], bound: float) -> Mapping[str, float]:
    """Errors in units of the clipping norm C."""
    expected = _total([_published(_clipped(gradient, engine, bound), engine) for gradient in gradients])
    everyone = torch.arange(_EXAMPLES)
    whole = _sums(engine, [select(batch, rows) for rows in everyone.split(_FIRST_CHUNK)])
    alone = [_sums(engine, [select(batch, everyone[row : row + 1])]) for row in range(_EXAMPLES)]
    inputs, weights = batch
    poisoned = weights.clone()
    poisoned[1] = float("nan")
    without = _total([part for row, part in enumerate(alone) if row != 1])
    return {
        "distance from the sum of clipped gradients": _distance(whole, expected) / bound,
        "what an example alone adds beyond C": max(0.0, max(norm(part) for part in alone) / bound - 1),
        "what an example whose loss is no number adds": _distance(_sums(engine, [(inputs, poisoned)]), without) / bound,
        "distance from the sum of users' clipped mean gradients": _distance_of_users(engine, gradients, batch, bound) / bound,
    }


def _distance_of_users(engine: ClippedGradients, gradients: list[Sums], batch: Any, bound: float) -> float:
    """How far the sum of three users is from that of their mean gradients, each clipped as a whole."""
    rows = [gradients[row] for row in _ROWS_OF_USERS.tolist()]
    expected = _total([_published(_clipped(mean, engine, bound), engine) for mean in of_users(rows, _SHARES_OF_USERS)])
    engine.reset()
    engine.accumulate(select(batch, _ROWS_OF_USERS), _SHARES_OF_USERS)
    return _distance({name: total.double() for name, total in engine.sums.items()}, expected)


def _sums(engine: ClippedGradients, chunks: list[Any]) -> Sums:
    engine.reset()
    for chunk in chunks:
        engine.accumulate(chunk)
    return {name: total.double() for name, total in engine.sums.items()}


def _clipped(gradient: Sums, engine: ClippedGradients, bound: float) -> Sums:
    """Reference clipping: the whole gradient, or each layer's, scaled to at most its clipping norm."""
    if engine.layer_bounds is None:
        return clipped(gradient, bound)
    parts: Sums = {}
    for layer, own in engine.layer_bounds.items():
        parts |= clipped({name: part for name, part in gradient.items() if layer_of(name) == layer}, own)
    return parts


def _published(gradient: Sums, engine: ClippedGradients) -> Sums:
    """The part of a clipped gradient that is summed up."""
    if not isinstance(engine, ClippedRowNorms):
        return gradient
    return {name: torch.linalg.vector_norm(part.reshape(len(part), -1), dim=1) for name, part in gradient.items()}


def _total(parts: list[Sums]) -> Sums:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def _distance(first: Sums, second: Sums) -> float:
    return norm({name: first[name] - second[name] for name in first})


def _factors(model: nn.Module, options: Mapping[str, Any]) -> Sums:
    """Scale or row mask of each parameter, in double precision."""
    masks = {
        name: mask.double().view(-1, *[1] * (dict(model.named_parameters())[name].dim() - 1))
        for name, mask in options.get("row_masks", {}).items()
    }
    return {**{name: factor.double() for name, factor in options.get("scale", {}).items()}, **masks}


def _in_double(model: nn.Module, family: Family, batch: Any) -> tuple[nn.Module, Any, Any]:
    wide = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)
    return copy.deepcopy(model).double(), family.loss, wide


def _randomized(model: nn.Module) -> nn.Module:
    """Perturb the parameters: with gains of one and biases of zero, a wrong gradient may look right."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model
