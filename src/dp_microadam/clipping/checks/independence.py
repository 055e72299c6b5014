"""The independence check before the first step: what an example gives must not depend on the examples beside it.

This is a randomized numerical check, not a mathematical proof. It runs the model on synthetic input of the batch's shape.

Formal guarantees: after :func:`check_independence` has returned, on this input,

- two examples gave beside a third what they gave alone: the same loss, the same norm of the gradient in every layer, and the
  same random projection of the output gradient at every use of a parameter. So did, for the loss alone, an example

  - beside just one other;
  - beside others that are a thousand times and a million times as large;
  - beside its copy, near copies, these with another target, and itself with any one leaf of another example;
  - with numbers that are NaN in one of its leaves, beside others (on the CPU only, where code may raise on them).

  These passes run in double precision on a copy of the model, which autocast leaves alone. In the copy, parameters that are
  all zero (a new head, a gain) are small random numbers instead. Differences of up to 1e-9 of the largest loss and 1e-7 of
  the largest gradient are allowed. A model that does not run in double precision throughout is checked as it is: to 1e-5
  and 1e-3 in float32, and to four roundings of the products under autocast (3e-2 in bfloat16). If it has parameters in half
  precision, frozen ones too, its copy is in float32. A warning says so if there was no copy for another reason;
- for models that draw random numbers, with 6 further seeds the losses of others did not change when three of six examples
  were replaced;
- no parameter, buffer or extra state was changed by a pass, and neither the loss of a batch nor any plain attribute of a
  module depended on the batch that had passed before it;
- no pass set the seed of torch's generators, and none set that of Python's or NumPy's to the same value every time;
- gradient norms, sums and clipped sums were those of autograd, example by example (``autograd.py``).

After :func:`check_independence_at_size` the losses of others did not change either when the first example, the last and up to
four between were replaced in a batch of exactly that size, three quarters of which were copies of one example.

Then clipping the rows of each example bounds the change that adding or removing one example makes.

The check can miss the following, which is outside the guarantee (docs/clipping.md lists it for users):

- mixing on some inputs only: values beyond those tried (a threshold above a million; one class, token or pixel among many;
  infinite numbers), sizes between three and the largest tried, or numbers of examples beyond three that count by themselves;
- mixing that begins later, after a number of calls or by a switch from outside;
- mixing in the backward pass only, at other scales or sizes than those of three examples between 0 and 1;
- a filter of examples that resemble each other in another way: by more than a millionth of their numbers, by more than one
  integer and otherwise than by all leaves but one, unless any two random examples resemble each other like that;
- a layer with room for a part of the batch, if everything that takes part in the check goes where the same room is;
- mixing weaker than the tolerances above, or by random draws that none of the seeds gives;
- files, global variables and attributes of objects other than the model in which examples are stored without being used.

Randomness: all compared passes start from one seed (of torch, ``random`` and NumPy). Every check takes a new one from the
operating system and also draws its examples from it; a refusal names the seed, so that the check can be repeated. Alone and
in company, examples have the same random numbers (``randomness.EqualDraws``). A random generator that the model owns is not
reset: examples then seem to change, and the model is refused. The random numbers that are drawn for examples are assumed to be
secret: someone who knows the seed of dropout sees the masks of all other examples change when one example is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dp_microadam.clipping.batches import PerExampleLoss, batch_size, is_floating, losses_of, replace_rows, select
from dp_microadam.clipping.checks.attributes import (
    copy_of,
    differing,
    holds_tensors,
    plain_attributes,
    put_back_tensors,
)
from dp_microadam.clipping.checks.checked_model import LOSSES, CheckedModel, Shown, precise_copy, refuse_if_out_of_memory
from dp_microadam.clipping.checks.examples import (
    CHECK_SIZE,
    SyntheticExamples,
    joined,
    repeat_example,
    resembling,
    scaled,
    with_missing_numbers,
)
from dp_microadam.clipping.checks.randomness import SeedAll, no_side_effects
from dp_microadam.clipping.checks.state import values_unchanged
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import LEARNING_SIZES, Observed, Recording, RestartLearning, Use
from dp_microadam.errors import InputError

# The last example keeps its scale: its loss is not saturated, and shows what the large ones do to it.
_SCALES = ((1e3, -30.0, 1.0), (-1e4, 1e6, 1.0))

# Models that draw random numbers are tried with this many further seeds.
_SEEDS_OF_DRAWS = 6

# In a large batch of copies of one example.
_COPIES_REPLACED = 4

# A block may be skipped at random in training (stochastic depth): a parameter counts as unused after this many passes.
_PASSES_UNTIL_UNUSED = 16


class InteractionError(InputError):
    """Examples were seen to interact, on random examples and draws that follow from the seed of the check."""


def check_independence(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    examples: SyntheticExamples,
    precision: float = 0.0,
) -> SyntheticExamples:
    """Raise :class:`InputError` unless examples are independent and every trainable parameter is observed.

    A randomized numerical check; the docstring of this module says what it can miss. It leaves random streams, parameters,
    their gradients, buffers and modes as they were. Most passes are of one to three examples. Two forward passes of 13 and 11
    examples, and up to 30 more for layers that are skipped at random, teach ``observed.table`` which tensors have rows for
    each example.

    Args:
        model: is copied for most passes.
        per_example_loss: as in :class:`~dp_microadam.clipping.engine.ClippedGradients`.
        observed: the layers and parameters of the model that are clipped.
        examples: how to draw examples; its seed is that of the check.
        precision: the relative error of the products in the model, if it is coarser than that of its parameters.

    Returns:
        The examples with integers as large as the model accepts, for :func:`check_independence_at_size`.
    """
    simple, _ = examples.simple().draw(CHECK_SIZE)
    with (
        full_precision(device_of(model)),
        no_side_effects(model) as seed_all,
        _seed_in_refusals(examples.seed),
        values_unchanged(model),
    ):
        own = CheckedModel(model, per_example_loss, observed, seed_all, precision)
        _check_every_parameter_is_used(own, simple)
        observed.caches.update(_check_nothing_is_kept(own, examples))
        examples = examples.with_large_integers(lambda drawn: _accepted(own, drawn))
        own.seed = examples.seed
        if not _accepted(own, examples.draw(CHECK_SIZE)[0]):  # losses of random examples need not be finite
            examples = examples.simple()
            own.seed = examples.seed
        exact, cast = precise_copy(own, simple)
        _check_company(exact, cast, examples)
        if exact.draws:
            _check_random_draws(own, examples)
    return examples


def _check_every_parameter_is_used(own: CheckedModel, simple: Any) -> None:
    """Raise :class:`InputError` if a trainable parameter is not used; the passes also fill ``observed.table``."""
    table = own.observed.table
    table.learning = True
    try:
        while True:
            try:
                unused = _unused_parameters(own, simple)
                break
            except RestartLearning:  # each time one coincidence fewer
                continue
    finally:
        table.learning = False
    if unused:
        raise InputError(
            f"parameter {unused[0]!r} is trainable, but no operation uses it; use it, or freeze it with requires_grad_(False)"
        )


def _unused_parameters(own: CheckedModel, simple: Any) -> list[str]:
    unused = list(own.observed.parameters)
    for seed in range(_PASSES_UNTIL_UNUSED):
        for size in LEARNING_SIZES:
            examples = select(simple, torch.arange(size) % batch_size(simple))
            with own.one_pass(seed), Recording(own.observed, size, _ignore) as recording:
                losses_of(own.model, own.loss, examples)
            unused = [name for name in unused if not recording.uses[name]]
        if not unused:
            break
    return unused


def _check_company(exact: CheckedModel, cast: Callable[[Any], Any], source: SyntheticExamples) -> None:
    """Two examples give beside a third, and each other, what they give alone; so does one beside unusual examples."""
    drawn, others = map(cast, source.draw(CHECK_SIZE))
    first, second = torch.tensor([0]), torch.tensor([1])
    # The first has smaller integers than the others, and differs from the last in every number; two of three classes agree.
    examples = joined(select(drawn, second), select(drawn, first), select(others, second))
    alone = [_alone(exact, select(examples, torch.tensor([row]))) for row in (0, 2)]
    if not all(map(_is_finite, alone)):
        raise InputError(
            "per_example_loss or its gradient is not finite on synthetic examples (floating-point numbers uniform in [0, 1), "
            "integers 0 or 1), so that independence cannot be checked; pass synthetic_batch= with examples that the model "
            "accepts"
        )
    together = exact.run(examples, equal_draws=exact.draws)
    pair = exact.losses(select(examples, torch.tensor([2, 0])), equal_draws=exact.draws)
    for one, place, place_in_pair in zip(alone, (0, 2), (1, 0), strict=True):
        _refuse_difference(exact, one, together, place)
        _refuse_difference(exact, one, pair, place_in_pair)
    for factors in _SCALES if any(map(is_floating, tree_leaves(examples))) else ():
        company = _tried(exact, scaled(examples, factors), equal_draws=exact.draws)
        if company is not None:
            _refuse_difference(exact, alone[1], company, 2)
    _check_resembling(exact, drawn, others)
    if device_of(exact.model).type == "cpu":
        _check_missing_numbers(exact, examples, alone[1])


def _alone(exact: CheckedModel, example: Any) -> Shown:
    try:
        return exact.run(example, equal_draws=exact.draws)
    except InputError:
        raise
    except Exception as error:
        refuse_if_out_of_memory(error)
        raise InteractionError(
            f"per_example_loss mixes examples: it accepts several, but raises {type(error).__name__} for one alone; remove "
            "batch statistics and losses between examples (use GroupNorm or LayerNorm)"
        ) from error


def _check_resembling(exact: CheckedModel, examples: Any, others: Any) -> None:
    """No layer has a capacity that some copies exceed, and no loss leaves out, or weighs, examples that resemble others.

    The example with the other target is compared too: where the loss of one is saturated, that of the other is not.
    """
    similar, repeated = resembling(examples, others)
    company = _tried(exact, similar, equal_draws=exact.draws)
    if company is None or not _is_finite(company):  # an example's leaves may belong together
        similar, repeated = repeat_example(examples, 0, CHECK_SIZE), 1
        company = _tried(exact, similar, equal_draws=exact.draws)
    if company is None:
        return
    count = batch_size(similar)
    for row in range(repeated):
        alone = exact.losses(select(similar, torch.tensor([row])), equal_draws=exact.draws)
        for place in (row, count - repeated + row):
            _refuse_difference(exact, alone, company, place)


def _check_missing_numbers(exact: CheckedModel, examples: Any, ordinary: Shown) -> None:
    """Missing numbers are what code fills in from the whole batch, as by the mean of a column: examples with NaN show it."""
    missing = with_missing_numbers(examples)
    if not missing:
        return
    alone = [_tried(exact, one, equal_draws=exact.draws) for one in missing]
    company = _tried(exact, joined(examples, *missing), equal_draws=exact.draws)
    if company is None:
        return
    _refuse_difference(exact, ordinary, company, 2)
    for place, one in enumerate(alone, start=CHECK_SIZE):
        if one is not None:
            _refuse_difference(exact, one, company, place)


def _check_random_draws(own: CheckedModel, source: SyntheticExamples) -> None:
    """With further seeds, replacing half of the examples must not change the losses of the others. Forward passes only."""
    kept = torch.arange(CHECK_SIZE)
    for step in range(1, 1 + _SEEDS_OF_DRAWS):
        further = source.reseeded(step)
        batch, others = further.draw(2 * CHECK_SIZE)
        own.seed = further.seed
        before, after = _tried(own, batch), _tried(own, replace_rows(batch, others, kept + CHECK_SIZE))
        if before is not None and after is not None:
            _refuse_difference(own, before, after, kept, at=kept)


def check_independence_at_size(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    count: int,
    source: SyntheticExamples,
    precision: float = 0.0,
) -> None:
    """Raise :class:`InputError` unless examples are also independent in batches of ``count``.

    A randomized numerical check like :func:`check_independence`, which comes first and returns ``source``. It takes two forward
    passes of the batch's size. The engine makes it when a batch is larger than all before: of T batches of random sizes about
    ln T are.

    Three quarters of the batch are copies of one example, so that a layer with room for only a part of the batch runs out of
    it. The first four copies and the last are replaced, together with the first example of the batch. A single one could be
    replaced by an example that takes the same room.
    """
    quarter = count // 4
    replaced = torch.tensor([0, *range(quarter, quarter + min(_COPIES_REPLACED, max(1, quarter))), count - 1])
    with unobtrusive(model, observed) as seed_all, _seed_in_refusals(source.seed):
        own = CheckedModel(model, per_example_loss, observed, seed_all, precision)
        # Losses of random examples may not be finite; those of seed 0 come last.
        for attempt in (source, source.simple()):
            own.seed = attempt.seed
            examples, others = attempt.draw(count)
            examples = repeat_example(examples, quarter, count)
            before = _tried(own, examples)
            if before is None or not _is_finite(before):
                continue
            batch = replace_rows(examples, others, replaced)
            kept = torch.arange(count)[~torch.isin(torch.arange(count), replaced)]
            after = _tried(own, batch)
            try:
                if after is not None:
                    _refuse_difference(own, before, after, kept, at=kept, finely=True)
            except InteractionError:  # or rounding, of which double precision has less
                exact, cast = precise_copy(own, examples)
                _refuse_difference(exact, exact.losses(cast(examples)), exact.losses(cast(batch)), kept, at=kept)
            return


def _check_nothing_is_kept(own: CheckedModel, source: SyntheticExamples) -> set[str]:
    """Neither the losses of a batch nor plain attributes of modules may depend on the batch that came before it.

    Returns the names of attributes that hold tensors which no batch changes: caches of positions and the like. The last batch
    has another size than the others, so that what depends on the size of a batch is none of them.
    """
    first, other = source.draw(CHECK_SIZE)
    later, _ = source.reseeded(1).draw(CHECK_SIZE - 1)
    caches: set[str] = set()
    try:
        after_first = _after_both(own, copy_of(own.model, share_state=True), first, later, caches)
        after_other = _after_both(own, copy_of(own.model, share_state=True), other, later)
        suspects = differing(after_first, after_other)
        if suspects:  # unless it differs by itself, as a clock does
            suspects -= differing(after_first, _after_both(own, copy_of(own.model, share_state=True), first, later))
    except InputError:
        raise
    except Exception as error:  # a model that cannot be copied, or does not accept these examples
        refuse_if_out_of_memory(error)
        return set()
    if suspects:
        name = min(suspects)
        what = "a loss" if name == LOSSES else f"attribute {name!r} of the model"
        raise InteractionError(
            f"{what} depends on examples of an earlier batch, so that an example influences the gradients of steps it is not "
            "part of; do not keep features, sums or counts of examples in attributes from one batch to the next"
        )
    return caches


def _after_both(
    own: CheckedModel, model: nn.Module, first: Any, later: Any, caches: set[str] | None = None
) -> dict[str, list[Any]]:
    """Plain attributes and losses after two batches; adds to ``caches`` the attributes with tensors that both left alike."""
    found: list[dict[str, list[Any]]] = []
    for batch in (first, later):
        with own.one_pass():
            losses = losses_of(model, own.loss, batch).detach()
        found.append(plain_attributes(model, copied=caches is not None))
    if caches is not None:
        caches |= {name for name, values in found[1].items() if holds_tensors(values)} - differing(*found)
    return {**found[1], LOSSES: [losses]}


def _tried(checked: CheckedModel, batch: Any, *, equal_draws: bool = False) -> Shown | None:
    """The losses of a forward pass; None if the model raises an exception on these examples."""
    try:
        return checked.losses(batch, equal_draws=equal_draws)
    except InputError:
        raise
    except Exception as error:  # an index out of range, say
        refuse_if_out_of_memory(error)
        return None


def _accepted(checked: CheckedModel, batch: Any) -> bool:
    """Whether the losses of these examples are finite."""
    shown = _tried(checked, batch)
    return shown is not None and _is_finite(shown)


def _is_finite(shown: Shown) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in shown.values())


def _refuse_difference(
    checked: CheckedModel, before: Shown, after: Shown, place: int | Tensor, *, at: int | Tensor = 0, finely: bool = False
) -> None:
    """Raise :class:`InteractionError` unless rows ``place`` of ``after`` are rows ``at`` of ``before``, up to rounding.

    Batches of one size hardly differ by rounding, and can be compared ``finely``.
    """
    eps = torch.finfo(before[LOSSES].dtype).eps
    of_losses = 4 * checked.precision or (1e-9 if eps < 1e-10 else 100 * eps)
    of_losses = 10 * eps if finely else of_losses
    of_gradients = 4 * checked.precision or 100 * of_losses
    largest = max((_largest(value) for name, value in before.items() if name != LOSSES), default=0.0)
    for name in before.keys() & after.keys() if after.keys() == {LOSSES} else before.keys() | after.keys():
        limit = of_losses * _largest(before[LOSSES]) if name == LOSSES else of_gradients * largest
        gone = name not in before or name not in after
        if not gone and not _differ(before[name][at], after[name][place], limit + (10 if finely else 100) * eps):
            continue
        if name == LOSSES:
            raise InteractionError(
                "per_example_loss mixes examples: other examples of a batch changed the loss of one; "
                "remove batch statistics and losses between examples (use GroupNorm or LayerNorm, fill in missing numbers from "
                "constants, and compute each example's loss from that example alone, not divided by the number of examples)"
            )
        raise InteractionError(
            f"{name} mixes examples: other examples of a batch changed the gradient of one; several rows of one example must "
            "be next to each other, and no operation, forward or backward, may combine examples"
        )


def _differ(before: Tensor, after: Tensor, limit: float) -> bool:
    """Whether a value changed by more than the limit, or became NaN."""
    same = (before == after) | ((before != before) & (after != after))
    return not bool((same | ((before - after).abs() <= limit)).all())


def _largest(values: Tensor) -> float:
    """The largest finite magnitude."""
    return float(values.abs().nan_to_num(posinf=0.0).max()) if values.numel() else 0.0


@contextmanager
def unobtrusive(model: nn.Module, observed: Observed) -> Iterator[SeedAll]:
    """Passes within the block leave no trace in the model: realised sizes of batches are private."""
    with put_back_tensors(model, observed.caches), full_precision(device_of(model)), no_side_effects(model) as seed_all:
        yield seed_all


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.parameters()).device


@contextmanager
def _seed_in_refusals(seed: int) -> Iterator[None]:
    """Adds the seed of the check to its refusals, so that it can be repeated."""
    try:
        yield
    except InteractionError as error:
        raise InputError(f"{error} (to repeat this check: check_independence(batch, seed={seed}))") from error


def _ignore(use: Use, gradient: Tensor) -> None:
    """For forward passes without a backward pass."""
