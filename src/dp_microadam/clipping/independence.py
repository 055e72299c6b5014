"""The independence check before the first step: every row belongs to one example, and every gradient is accounted for.

This is a randomized numerical check, not a mathematical proof. It runs the model on synthetic input of the batch's shape.

Formal guarantees: after :func:`check_independence` has returned, on this input,

- replacing one example, or removing one or two, left every other example as it was: its loss, the norm of its gradient in
  every layer, and a random projection of its output gradient at every use of a parameter. This was tried

  - with three examples, for each of them;
  - with examples multiplied by 1000, 1 and 30, and by -30, 1 and -1000, where each gave the same alone as beside the others;
  - with one example twice, near copies between, both with another target, and it with any one leaf of another example;
  - with one example beside others that are a million and ten thousand times as large;
  - with numbers that are NaN, infinite or exactly zero, in one example and in all of them, for losses only.

  So neither the position in the batch, nor the size of the batch, nor the range of its values decides. Integers go up to
  what they index (classes, tokens) or to 255; they agree in some examples and differ in range in others.

  These passes run in double precision on a copy of the model, which autocast leaves alone. In the copy, parameters that are
  all zero (a new head, a gain) are small random numbers instead. Differences of up to 1e-9 of the largest loss and 1e-7 of
  the largest gradient are allowed. A model that does not run in double precision throughout is checked as it is: to 1e-5
  and 1e-3 in float32, and to four roundings of the products under autocast (3e-2 in bfloat16). If it has parameters in half
  precision, frozen ones too, its copy is in float32; where that is impossible, it is checked to hardly anything. A warning
  says so if there was no copy for another reason, such as memory.
  Products of float32 are taken in full precision (no TF32, which kernels may use at one batch size and not at another);
- for models that draw random numbers, with 16 further seeds the losses of others did not change when one example was replaced;
- no parameter, buffer or extra state was changed by a forward and backward pass, and neither the loss of a batch nor any
  plain attribute of a module depended on the batch that had passed before it;
- no pass set the seed of torch's generators, and none set that of Python's or NumPy's to the same value every time;
- the loss of one example alone had an output gradient in its own rows of every observed use of a parameter and in no
  other row, so these rows are the gradient of that example;
- each example's gradient norm and the unclipped sum that the engine forms equal those of autograd, for every trainable
  parameter, so no parameter is used where it is not observed.

After :func:`check_independence_at_size` the first point holds for the first example, the last and up to four between in a
batch of exactly that size, all replaced or removed at once, at scale 1 and in the model's own precision, or else in double.

Then clipping the rows of each example bounds the change that adding or removing one example makes.

The check can miss the following, which is outside the guarantee (docs/clipping.md lists it for users):

- mixing on some inputs only: values beyond those tried (a threshold above a million; one class, token or pixel among many;
  integers below 0, such as labels to ignore), sizes between three and the largest tried (a model that mixes batches
  of exactly 17), other lengths of the dimensions that are not the batch's;
- mixing that begins later, after a number of calls or by a switch from outside: :func:`check_independence_again` takes a look
  at calls 16, 32, 64, …, so that it is refused then, but steps taken before were not bounded;
- mixing where numbers are missing, if it shows in gradients only, or if the model raises an exception on such numbers in the
  check and not in a step;
- a filter of examples that resemble each other in another way: by more than a millionth of their numbers, by more than one
  integer and otherwise than by all leaves but one, unless any two random examples resemble each other like that;
- a layer with room for a part of the batch, if everything that takes part in the check goes where the same room is;
- mixing weaker than the tolerances above;
- mixing by random draws that none of about 20 seeds gives, in the forward pass, or that none of four gives, in the backward
  pass only; every repetition has a new one;
- files, global variables and attributes of objects other than the model in which examples are stored without being used.

Randomness: all compared passes start from one seed (of torch, ``random`` and NumPy). Every check takes a new one from the
operating system and also draws its examples from it; a refusal names the seed, so that the check can be repeated. Replacing
an example leaves all shapes as they are, so dropout and stochastic depth draw what they drew before. Removing an example
would shift the random stream; there, models that draw random numbers are compared with the same numbers for every row
(``identical_random_rows.py``). A random generator that the model owns is not reset: examples then seem to change, and the
model is refused. The random numbers that are drawn for examples are assumed to be secret: someone who knows the seed of
dropout sees the masks of all other examples change when one example is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dp_microadam.clipping.batches import batch_size, repeat_example, scaled, select
from dp_microadam.clipping.checked_model import CheckedModel, precise_copy
from dp_microadam.clipping.gradient_check import (
    check_every_parameter_is_used,
    check_gradients_against_autograd,
    check_rows_of_one_example,
)
from dp_microadam.clipping.losses import PerExampleLoss
from dp_microadam.clipping.mixing_check import (
    InteractionError,
    Neighbours,
    check_no_mixing,
    check_nothing_is_kept,
    check_random_draws,
    check_similar_examples,
    check_special_values,
)
from dp_microadam.clipping.module_attributes import put_back_tensors
from dp_microadam.clipping.no_side_effects import SeedAll, no_side_effects
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed
from dp_microadam.clipping.special_values import rows_needed
from dp_microadam.clipping.synthetic_examples import CHECK_SIZE, SyntheticExamples, accepted_examples, new_seed
from dp_microadam.errors import InputError

# One example keeps its scale: its loss is not saturated, and shows what the large ones do to it.
_OTHER_SCALES = ((1e3, 1.0, 30.0), (-30.0, 1.0, -1e3))
_EXTREME_SCALES = (1e6, 1.0, -1e4)

# In a large batch of copies of one example.
_COPIES_REPLACED = 4

_ALL_BUT_ONE = [torch.tensor(rows) for rows in ([1, 2], [0, 2], [0, 1])]
_EACH = [torch.tensor([row]) for row in range(CHECK_SIZE)]
_ONE_OR_TWO = Neighbours(replaced=_EACH, removed=_EACH + _ALL_BUT_ONE)
_ALONE = Neighbours(replaced=[], removed=_ALL_BUT_ONE)
_EACH_AND_ALONE = Neighbours(replaced=_EACH, removed=_ALL_BUT_ONE[:1])
_SECOND_ALONE = Neighbours(replaced=[], removed=_ALL_BUT_ONE[1:2])


def check_independence(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    batch: Any,
    synthetic_batch: Any = None,
    precision: float = 0.0,
    seed: int | None = None,
) -> SyntheticExamples:
    """Raise :class:`InputError` unless examples are independent and every trainable parameter is observed.

    A randomized numerical check; the docstring of this module says what it can miss. It leaves random streams, parameters,
    their gradients, buffers and modes as they were.

    It takes 30 forward and backward passes of one to three examples, or 35 if the model draws random numbers, one less if the
    batch is a single tensor; one of them is of five examples and one more for each tensor of the batch. In addition it takes
    four forward passes of two or three examples, nine for floating-point input, of three examples and one more for each further
    tensor of such input, 32 if the model draws random numbers, and one or a few to find out which integers the model accepts.
    Two forward passes of 13 and 11 examples, and up to 30 more for layers that are skipped at random, teach ``observed.table``
    which tensors have rows for each example.

    Args:
        model: is copied for most passes.
        per_example_loss: as in :class:`~dp_microadam.clipping.engine.ClippedGradients`.
        observed: the layers and parameters of the model that are clipped.
        batch: whose structure, shapes and types are used, and no value.
        synthetic_batch: examples to run on instead of random ones.
        precision: the relative error of the products in the model, if it is coarser than that of its parameters.
        seed: repeats the check that was made with it; by default a new one from the operating system.

    Returns:
        How the examples were drawn, for :func:`check_independence_at_size`.
    """
    start = SyntheticExamples(new_seed() if seed is None else seed)
    simple, _ = SyntheticExamples(0).draw(batch, CHECK_SIZE, synthetic_batch)
    with full_precision(device_of(model)), no_side_effects(model) as seed_all, _seed_in_refusals(start.seed):
        own = CheckedModel(model, per_example_loss, observed, seed_all, precision)
        tracker = check_every_parameter_is_used(own, simple)
        source = accepted_examples(own, start, tracker if synthetic_batch is None else None, batch, synthetic_batch)
        examples, others = source.draw(batch, CHECK_SIZE, synthetic_batch)
        exact, cast = precise_copy(own, examples)
        later, _ = source.reseeded(1).draw(batch, CHECK_SIZE, synthetic_batch)
        later = select(later, torch.arange(CHECK_SIZE - 1))
        observed.caches.update(check_nothing_is_kept(exact, *map(cast, (examples, others, later))))
        exact.seed = source.seed
        random = check_no_mixing(exact, cast(examples), cast(others), _ONE_OR_TWO, source.magnitude)
        check_similar_examples(exact, cast(examples), cast(others), source.magnitude)
        for step, factors in enumerate(_OTHER_SCALES, start=2):
            further = source.reseeded(step)
            exact.seed = further.seed
            some, _ = further.draw(batch, CHECK_SIZE, synthetic_batch, spread=step == 2)
            scale = max(map(abs, factors)) * source.magnitude
            check_no_mixing(exact, scaled(cast(some), factors), None, _ALONE, scale, required=False)
        if exact is not own and exact.in_double:
            extreme = scaled(cast(examples), _EXTREME_SCALES)
            check_no_mixing(exact, extreme, None, _SECOND_ALONE, max(_EXTREME_SCALES) * source.magnitude, required=False)
        if count := rows_needed(examples):
            exact.seed = source.seed
            some, ordinary = source.draw(batch, count, synthetic_batch)
            check_special_values(exact, cast(some), cast(ordinary), source.magnitude)
        if random:
            check_random_draws(exact, source, lambda one: map(cast, one.draw(batch, CHECK_SIZE, synthetic_batch)))
        for row in range(CHECK_SIZE):
            check_rows_of_one_example(own, simple, row)
        check_gradients_against_autograd(own, simple)
    return source


def check_independence_at_size(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    batch: Any,
    synthetic_batch: Any = None,
    precision: float = 0.0,
    source: SyntheticExamples | None = None,
) -> None:
    """Raise :class:`InputError` unless examples are also independent in batches as large as this one.

    A randomized numerical check like :func:`check_independence`, which comes first and returns ``source``. It takes three
    forward and backward passes of the batch's size, four if the model draws random numbers. The engine makes it when a batch
    is larger than all before: of T batches of random sizes about ln T are.

    Three quarters of the batch are copies of one example, so that a layer with room for only a part of the batch runs out of
    it. The first four copies and the last are replaced or removed, together with the first example of the batch. A single one
    could be replaced by an example that takes the same room.

    A difference that is found is looked at again in double precision, if the model has it. Kernels round differently for
    different numbers of examples; where that moves a ReLU's input across zero, a gradient changes by far more than its
    rounding, in a Wide-ResNet by half a percent.
    """
    source = SyntheticExamples(new_seed()) if source is None else source
    with _unobtrusive(model, observed, source.seed) as seed_all:
        checked = CheckedModel(model, per_example_loss, observed, seed_all, precision)
        # Losses of random examples may not be finite; those of seed 0, which check_independence accepted, come last.
        for attempt in (source, SyntheticExamples(0)):
            if _unmixed_at_size(checked, batch, synthetic_batch, attempt, required=attempt.seed == 0):
                return


def check_independence_again(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    batch: Any,
    synthetic_batch: Any,
    precision: float,
    source: SyntheticExamples,
) -> None:
    """Raise :class:`InputError` if examples interact by now, or if a parameter is used where it is not observed by now.

    A look at a model that was checked before, with a new seed, for what changes with time: a layer that mixes after a number
    of calls, a switch from outside, weights that have moved. It takes five forward and backward passes of one to three examples
    and compares their gradients with autograd's in two more, in the model's own precision. Two passes of the size of ``batch``
    replace the first example, the last and up to four between. What :func:`check_independence` knows to do besides (values of
    other scales, NaN, equal examples, further seeds) is not repeated.

    A difference is looked at again in double precision, if the model has it. Examples that the model does not accept are
    passed over.
    """
    source = replace(source, seed=new_seed())
    simple, _ = SyntheticExamples(0).draw(batch, CHECK_SIZE, synthetic_batch)
    with _unobtrusive(model, observed, source.seed) as seed_all:
        checked = CheckedModel(model, per_example_loss, observed, seed_all, precision)
        checked.seed = source.seed
        examples, others = source.draw(batch, CHECK_SIZE, synthetic_batch)
        _unmixed(checked, examples, others, _EACH_AND_ALONE, source.magnitude, required=False)
        check_gradients_against_autograd(checked, simple)
        if batch_size(batch) > CHECK_SIZE:
            _unmixed_at_size(checked, batch, synthetic_batch, source, removed=False, required=False)


def _unmixed_at_size(
    checked: CheckedModel, batch: Any, synthetic_batch: Any, source: SyntheticExamples, *, required: bool, removed: bool = True
) -> bool:
    """Whether the model accepted examples in a batch of this size; raises unless they did not interact in it."""
    count = batch_size(batch)
    quarter = count // 4
    copies = min(_COPIES_REPLACED, max(1, quarter))
    rows = torch.tensor([0, *range(quarter, quarter + copies), count - 1])
    examples, others = source.draw(batch, count, synthetic_batch)
    checked.seed = source.seed
    neighbours = Neighbours(replaced=[rows], removed=[rows] if removed else [])
    return _unmixed(checked, repeat_example(examples, quarter, count), others, neighbours, source.magnitude, required=required)


def _unmixed(
    checked: CheckedModel, examples: Any, others: Any, neighbours: Neighbours, scale: float, *, required: bool
) -> bool:
    """Whether the model accepted the examples; raises if they interact, also in double precision where the model has it."""
    try:
        found = check_no_mixing(checked, examples, others, neighbours, scale, required=required)
    except InteractionError:
        exact, cast = precise_copy(checked, examples)
        if exact is checked:
            raise
        exact.seed = checked.seed
        found = check_no_mixing(exact, cast(examples), cast(others), neighbours, scale, required=required)
    return found is not None


@contextmanager
def _unobtrusive(model: nn.Module, observed: Observed, seed: int) -> Iterator[SeedAll]:
    """Passes within the block leave no trace in the model: realised sizes of batches are private. Refusals name the seed."""
    with (
        put_back_tensors(model, observed.caches),
        full_precision(device_of(model)),
        no_side_effects(model) as seed_all,
        _seed_in_refusals(seed),
    ):
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
