"""The part of the independence check that looks for mixing: does one example change the loss or gradient of another?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.batches import batch_size, repeat_example, replace_rows, resembling, select
from dp_microadam.clipping.check_errors import refuse_if_out_of_memory
from dp_microadam.clipping.checked_model import CheckedModel, PassResult
from dp_microadam.clipping.losses import losses_of
from dp_microadam.clipping.module_attributes import copy_with_own_attributes, differing, holds_tensors, plain_attributes
from dp_microadam.clipping.special_values import GuardedPasses, special_batches, with_extremes
from dp_microadam.clipping.synthetic_examples import SyntheticExamples
from dp_microadam.errors import InputError

# Models that draw random numbers are tried with this many further seeds.
_SEEDS_OF_DRAWS = 16

# The key of the losses among those of attributes; no attribute has this name.
_LOSSES = ""


class InteractionError(InputError):
    """Examples were seen to interact, on random examples and draws that follow from the seed of the check."""


@dataclass(frozen=True)
class Neighbours:
    """Neighbouring batches: rows that are replaced together, and rows that are removed together."""

    replaced: list[Tensor]
    removed: list[Tensor]


def check_no_mixing(
    checked: CheckedModel, batch: Any, others: Any, neighbours: Neighbours, scale: float, *, required: bool = True
) -> bool | None:
    """Replace some examples, and remove some: losses and gradients of the rest must not change.

    Returns whether random numbers were drawn, or None if the model did not accept the examples, which is an error where
    they are ``required``.
    """
    count = batch_size(batch)
    before = _first_run(checked, batch, required)
    if before is None:
        return None
    for rows in neighbours.replaced:
        after = checked.run(replace_rows(batch, others, rows))
        kept = without(rows, count)
        _refuse_difference(checked, before, after, kept, kept, scale, "replacing")
    random, used_random = before.used_torch_random, before.used_random
    if random and neighbours.removed:
        before = checked.run(batch, identical_rows=True)
    for rows in neighbours.removed:
        kept = without(rows, count)
        after = checked.run(select(batch, kept), identical_rows=random)
        _refuse_difference(checked, before, after, kept, torch.arange(len(kept)), scale, "removing", random)
    return used_random


def check_similar_examples(checked: CheckedModel, batch: Any, others: Any, scale: float) -> None:
    """An example gives what it gives alone, before and after a copy, near copies, and these with another target.

    So does the example with the other target: where the loss of one is saturated, that of the other is not.

    So no layer has a capacity that some copies exceed, and no loss leaves out, or weighs, examples that resemble others.
    """
    similar, repeated = resembling(batch, others)
    together = _first_run(checked, similar, required=False)
    if together is None:  # an example's leaves may belong together
        similar, repeated = repeat_example(batch, 0, batch_size(batch)), 1
        together = _first_run(checked, similar, required=False)
    if together is None:
        return
    random = together.used_torch_random
    if random:
        together = checked.run(similar, identical_rows=True)
    for row in range(repeated):
        alone = checked.run(select(similar, torch.tensor([row])), identical_rows=random)
        places = torch.tensor([row, batch_size(similar) - repeated + row])
        _refuse_difference(checked, together, alone, places, torch.zeros_like(places), scale, "removing", random)


def check_random_draws(
    checked: CheckedModel, examples: SyntheticExamples, draw: Callable[[SyntheticExamples], Iterable[Any]]
) -> None:
    """With further seeds, replacing an example must not change the losses of others. Forward passes only."""
    for step in range(_SEEDS_OF_DRAWS):
        further = examples.reseeded(step + 4)
        batch, others = draw(further)
        rows = torch.tensor([step % batch_size(batch)])
        kept = without(rows, batch_size(batch))
        try:
            before, after = (
                PassResult(checked.losses(one, further.seed), {}, {}, used_torch_random=True, used_random=True)
                for one in (batch, replace_rows(batch, others, rows))
            )
        except InputError:
            raise
        except Exception as error:  # a model that does not accept these examples
            refuse_if_out_of_memory(error)
            continue
        if bool(torch.isfinite(before.losses).all()):
            _refuse_difference(checked, before, after, kept, kept, examples.magnitude, "replacing")


def check_special_values(checked: CheckedModel, examples: Any, ordinary: Any, scale: float) -> None:
    """Where numbers are NaN, infinite or exactly zero, losses must not depend on other examples. Nine forward passes.

    All compared batches have one size and start from one seed, so that an example whose loss is not finite alone has none
    beside others either. Examples that the model does not accept are not compared.
    """
    passes = GuardedPasses()

    def losses(batch: Any) -> Tensor | None:
        found = passes.try_pass(lambda: checked.losses(batch, checked.seed))
        return None if found is None else torch.where(torch.isfinite(found), found, torch.nan)

    ordinary = with_extremes(ordinary)
    before = losses(ordinary)
    if before is None:
        return
    for special in special_batches(examples, ordinary, checked.seed):
        one, several = losses(special.one), losses(special.several)
        others = without(special.middle, len(before))
        for left, right, rows in ((one, before, others), (one, several, special.middle)):
            if left is None or right is None:
                continue
            limit = _limit_of_losses(checked, left[rows], scale)
            if _differ(left[rows], right[rows], limit):
                raise InteractionError(
                    f"per_example_loss mixes examples in which numbers are {special.kind}: replacing some examples of a batch "
                    "changed the loss of others; fill in such numbers from constants or from the example itself"
                )


def check_nothing_is_kept(checked: CheckedModel, first: Any, other: Any, later: Any) -> set[str]:
    """Neither the losses of a batch nor plain attributes of modules may depend on the batch that came before it.

    Returns the names of attributes that hold tensors which no batch changes: caches of positions and the like. ``later``
    should have another size than the others, so that what depends on the size of a batch is none of them.
    """
    caches: set[str] = set()
    try:
        one, two, control = (copy_with_own_attributes(checked.model) for _ in range(3))
        after_first = _after_both(checked, one, first, later, caches)
        after_other = _after_both(checked, two, other, later)
        suspects = differing(after_first, after_other)
        if suspects:  # unless it differs by itself, as a clock does
            suspects -= differing(after_first, _after_both(checked, control, first, later))
    except InputError:
        raise
    except Exception as error:  # a model that cannot be copied, or does not accept these examples
        refuse_if_out_of_memory(error)
        return set()
    if suspects:
        name = min(suspects)
        what = "a loss" if name == _LOSSES else f"attribute {name!r} of the model"
        raise InteractionError(
            f"{what} depends on examples of an earlier batch, so that an example influences the gradients of steps it is not "
            "part of; do not keep features, sums or counts of examples in attributes from one batch to the next"
        )
    return caches


def _after_both(
    checked: CheckedModel, model: nn.Module, first: Any, later: Any, caches: set[str] | None = None
) -> dict[str, list[Any]]:
    """Plain attributes and losses after two batches; adds to ``caches`` the attributes with tensors that both left alike."""
    found: list[dict[str, list[Any]]] = []
    for batch in (first, later):
        with checked.one_pass():
            losses = losses_of(model, checked.loss, batch).detach()
        found.append(plain_attributes(model, copied=caches is not None))
    if caches is not None:
        caches |= {name for name, values in found[1].items() if holds_tensors(values)} - differing(*found)
    return {**found[1], _LOSSES: [losses]}


def _first_run(checked: CheckedModel, batch: Any, required: bool) -> PassResult | None:
    """None if the model does not accept these examples, which is an error where they are ``required``."""
    try:
        result = checked.run(batch)
    except InputError:
        raise
    except Exception as error:
        if required:
            raise
        refuse_if_out_of_memory(error)
        return None
    if result.is_finite():
        return result
    if required:
        raise InputError(
            "per_example_loss or its gradient is not finite on synthetic examples (floating-point numbers uniform in [0, 1), "
            "integers 0 or 1), so that independence cannot be checked; pass synthetic_batch= with examples that the model "
            "accepts"
        )
    return None


def _refuse_difference(
    checked: CheckedModel,
    before: PassResult,
    after: PassResult,
    rows: Tensor,
    rows_after: Tensor,
    scale: float,
    what: str,
    random: bool = False,
) -> None:
    limit = _limit_of_losses(checked, before.losses, scale)
    if _differ(before.losses[rows], after.losses[rows_after], limit):
        raise InteractionError(
            f"per_example_loss mixes examples: {what} one example of a batch changed the loss of others; "
            "remove batch statistics and losses between examples (use GroupNorm or LayerNorm, and compute each example's "
            "loss from that example alone, not divided by the number of examples)"
            + (", and drop out only tensors whose first dimension is the batch" if random else "")
        )
    for part, part_after in ((before.norms, after.norms), (before.projections, after.projections)):
        of_gradients = 4 * checked.precision or 100 * _of_losses(before.losses.dtype)
        limit = of_gradients * _largest(part.values()) + _floor(before.losses.dtype, scale)
        for name in part.keys() | part_after.keys():
            gone = name not in part or name not in part_after
            if gone or _differ(part[name][rows], part_after[name][rows_after], limit):
                raise InteractionError(
                    f"{name} mixes examples: {what} one example of a batch changed the gradient of others; "
                    "several rows of one example must be next to each other, and no operation, forward or "
                    "backward, may combine examples"
                )


def _limit_of_losses(checked: CheckedModel, losses: Tensor, scale: float) -> float:
    """How far losses may differ by rounding."""
    relative = 4 * checked.precision or _of_losses(losses.dtype)  # losses may be wider than the products they come from
    return relative * _largest([losses]) + _floor(losses.dtype, scale)


def _of_losses(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 100 * torch.finfo(dtype).eps


def _floor(dtype: torch.dtype, scale: float) -> float:
    """For cancellation in losses near zero."""
    return 100 * torch.finfo(dtype).eps * max(1.0, abs(scale))


def without(rows: Tensor, count: int) -> Tensor:
    """The rows from 0 to ``count`` - 1 except these."""
    everything = torch.arange(count)
    return everything[~torch.isin(everything, rows)]


def _differ(before: Tensor, after: Tensor, limit: float) -> bool:
    """Whether a value changed by more than the limit, or became NaN."""
    same = (before == after) | ((before != before) & (after != after))
    return not bool((same | ((before - after).abs() <= limit)).all())


def _largest(values: Iterable[Tensor]) -> float:
    """The largest finite magnitude."""
    return max((float(value.abs().nan_to_num(posinf=0.0).max()) for value in values), default=0.0)
