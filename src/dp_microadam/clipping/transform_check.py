"""The independence check of the transforms before the model: augmentation, normalization, casting.

This is a randomized numerical check.

Formal guarantees: after :func:`check_transform` has returned, on synthetic raw batches of the given batch's shapes,

- there was one row for each example in every tensor that the transform returned;
- replacing one example left the rows of all others as they were, whatever the global random streams of torch, Python and
  NumPy gave. This was tried for each of three examples, and for the first, middle and last of a batch of the given size;
  with floating-point numbers in [0, 1), and multiplied by 1000, 1 and 30; with integers up to what they index, or 255; with
  one seed, or with 32 if the transform draws random numbers. It was also tried with numbers that are NaN, infinite or exactly
  zero, in one example and in all, unless the transform raises an exception on them;
- so did removing copies of an example, near copies, and these with another target;
- so did removing one or two examples, which shows what depends on the size of a batch. There, torch's generators give
  the same number to all examples. This is left out for transforms that draw from Python or NumPy, or that draw until the
  result satisfies a condition;
- the same batch and seed gave the same rows again after another batch had passed, so nothing was kept of that batch;
- no pass set the seed of torch's generators, and none set that of Python's or NumPy's to the same value every time.

Then each row is a function of its own example and of random numbers, and clipping its gradient bounds what the example adds.

Several views of an example are a dimension of their own, [B, K, …], whose losses are averaged before the clip. As separate
rows they would be clipped and added one by one, and the example would count K times.

The check can miss the following, which is outside the guarantee: mixing on other values, other sizes or other lengths of the
dimensions that are not the batch's; mixing by random draws that none of the seeds gives (with probability p in a batch, all 33
miss it with (1 - p)³³); a change of a row below one part in 10,000; mixing that begins later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dp_microadam.clipping.batches import (
    batch_size,
    repeat_example,
    replace_rows,
    resembling,
    scaled,
    select,
    with_extreme_integers,
)
from dp_microadam.clipping.check_errors import refuse_if_out_of_memory
from dp_microadam.clipping.integer_ranges import IndexTracker
from dp_microadam.clipping.mixing_check import without
from dp_microadam.clipping.no_side_effects import SeedWatch, no_side_effects, python_random_state, torch_random_state
from dp_microadam.clipping.special_values import GuardedPasses, rows_needed, special_batches, with_extremes
from dp_microadam.clipping.synthetic_examples import SyntheticExamples, new_seed
from dp_microadam.errors import InputError

Transform = Callable[[Any], Any]

_EXAMPLES = 3
_SCALES = (1e3, 1.0, 30.0)
_SEEDS_OF_DRAWS = 32

# How many batches have classes that all differ: whichever is the largest is replaced in turn.
_SPREAD = 2

# The number of different examples in a large batch.
_DISTINCT = 12

# The length of a synthetic text.
_LETTERS = 16

# A transform that draws until the result satisfies a condition would not end on equal numbers; after so many it gets others.
_EQUAL_DRAWS = 5_000


def check_transform(transform: Transform, batch: Any, model: nn.Module, *, what: str, seed: int | None = None) -> None:
    """Raise :class:`InputError` unless ``transform`` treats the examples of a batch independently.

    A randomized numerical check; the docstring of this module says what it can miss.

    Args:
        transform: takes a raw batch and returns what the model gets.
        batch: a raw batch; only its structure, shapes and types are used, no values.
        model: the transform may draw random numbers on its device.
        what: the name of the transform in error messages.
        seed: repeats the check that was made with it; by default a new one from the operating system.
    """
    start = SyntheticExamples(new_seed() if seed is None else seed)
    raw = _Raw(batch)
    with no_side_effects(model) as seed_all:
        check = _TransformCheck(transform, raw, seed_all, model, what)
        source = check.accepted(start)
        examples, others = source.draw(raw.batch, _EXAMPLES, None)
        drew = check.check_no_mixing(examples, others, source.seed, [[0], [1], [2]], [[0], [2], [1, 2], [0, 1]])
        for step in range(1, 1 + _SPREAD):
            further = source.reseeded(step)
            examples, others = further.draw(raw.batch, _EXAMPLES, None, spread=True)
            check.check_no_mixing(scaled(examples, _SCALES), others, further.seed, [[0], [1], [2]], [[0, 2]], required=False)
        similar, _ = resembling(*source.draw(raw.batch, _EXAMPLES, None))
        each = list(range(batch_size(similar)))
        check.check_no_mixing(similar, similar, source.seed, [], [each[1:], each[:-1]], required=False)
        check.check_special_values(source)
        for step in range(_SEEDS_OF_DRAWS if drew else 0):
            further = source.reseeded(1 + _SPREAD + step)
            examples, others = further.draw(raw.batch, _EXAMPLES, None)
            check.check_no_mixing(examples, others, further.seed, [[0], [1], [2]], [], required=False)
        count = raw.count
        if count > _EXAMPLES:
            rows = torch.arange(count) % _DISTINCT
            examples, others = (select(part, rows) for part in source.draw(raw.batch, _DISTINCT, None))
            some = [[0, count // 2, count - 1]]
            check.check_no_mixing(repeat_example(examples, count // 4, count), others, source.seed, some, some)


class _Raw:
    """A raw batch in which texts, one for each example, are encoded as rows of letters, so that rows can be replaced."""

    def __init__(self, batch: Any) -> None:
        self.count = batch_size(batch) if any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)) else _texts_in(batch)
        columns, self._structure = tree_flatten(batch, is_leaf=self._is_texts)
        self._texts = [type(column) if self._is_texts(column) else None for column in columns]
        self.batch = [
            torch.zeros(self.count, _LETTERS, dtype=torch.uint8) if texts else column
            for column, texts in zip(columns, self._texts, strict=True)
        ]

    def _is_texts(self, node: Any) -> bool:
        return isinstance(node, list | tuple) and len(node) == self.count and all(isinstance(text, str) for text in node)

    def __call__(self, columns: Sequence[Any]) -> Any:
        """The batch as the transform takes it; a copy, so that it may be modified in place."""
        found = []
        for column, texts in zip(columns, self._texts, strict=True):
            if texts:
                found.append(texts("".join(chr(97 + int(code) % 26) for code in row) for row in column))
            else:
                found.append(column.clone() if isinstance(column, Tensor) else column)
        return tree_unflatten(found, self._structure)


def _texts_in(batch: Any) -> int:
    if isinstance(batch, list | tuple) and batch and all(isinstance(text, str) for text in batch):
        return len(batch)
    inside = list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, list | tuple) else []
    return next((count for count in map(_texts_in, inside) if count), 0) or batch_size(batch)


class _TransformCheck:
    def __init__(self, transform: Transform, raw: _Raw, seed_all: Callable[[int], None], model: nn.Module, what: str) -> None:
        self._transform = transform
        self._raw = raw
        self._seed_all = seed_all
        self._model = model
        self._what = what
        self._seeds = SeedWatch(model, what)
        # Whether batches of different sizes can be given the same random numbers.
        self._comparable = True

    def accepted(self, start: SyntheticExamples) -> SyntheticExamples:
        """Examples with integers as large as the transform accepts."""
        simple, _ = SyntheticExamples(0).draw(self._raw.batch, _EXAMPLES, None)
        tracker = IndexTracker(simple)
        self._seed_all(0)
        try:
            with tracker:
                self._transform(self._raw(simple))
        except Exception as error:
            raise InputError(
                f"{self._what} cannot be checked: it raises {type(error).__name__} on synthetic examples of the training "
                "data's shapes (floating-point numbers in [0, 1), integers 0 or 1, texts of letters); make it accept them"
            ) from error
        for bounds in tracker.candidates():
            source = SyntheticExamples(start.seed, bounds)
            examples, _ = source.draw(self._raw.batch, _EXAMPLES, None)
            if all(
                self._first_run(some, source.seed) is not None for some in (with_extreme_integers(examples, bounds), examples)
            ):
                return source
        return start

    def _first_run(self, examples: Any, seed: int) -> list[Any] | None:
        try:
            return self._run(examples, seed)
        except InputError:
            raise
        except Exception as error:
            refuse_if_out_of_memory(error)
            return None

    def _run(self, examples: Any, seed: int, constant_draws: bool = False) -> list[Any]:
        """The leaves of the result; raises :class:`InputError` unless they have one row for each example."""
        count = batch_size(examples)
        self._seed_all(seed)
        mode = _ConstantDraws(lambda: self._seed_all(seed))
        with mode if constant_draws else nullcontext():
            result = self._transform(self._raw(examples))
        self._seeds.refuse_seeding(seed)
        self._comparable &= not mode.ended
        rows = batch_size(result)
        if rows != count:
            raise InputError(
                f"{self._what} makes {rows} rows of {count} examples, so that an example counts more or less than once; it "
                "must return one row for each example, and several views of an example as a dimension of their own, "
                "[B, K, ...], whose losses are averaged"
            )
        return tree_leaves(result)

    def check_no_mixing(
        self,
        examples: Any,
        others: Any,
        seed: int,
        replaced: Sequence[Sequence[int]],
        removed: Sequence[Sequence[int]],
        *,
        required: bool = True,
    ) -> bool:
        """Replace and remove the examples of these rows: the rest must not change. Returns whether it is random."""
        count = batch_size(examples)
        self._seed_all(seed)
        start, other_start = torch_random_state(self._model), python_random_state()
        before = self._run(examples, seed) if required else self._first_run(examples, seed)
        if before is None:
            return False
        drew, drew_elsewhere = torch_random_state(self._model) != start, python_random_state() != other_start
        self._run(others, seed)
        if self._differ(examples, before, self._run(examples, seed), torch.arange(count), torch.arange(count)):
            raise InputError(
                f"{self._what} returns other rows for the same batch and random seed after another batch has passed: it "
                "keeps something of batches, or draws from a generator of its own; keep nothing, and use torch's generators"
            )
        for rows in replaced:
            mixed = self._run(replace_rows(examples, others, torch.tensor(rows)), seed)
            kept = without(torch.tensor(rows), count)
            self._refuse_difference(examples, before, mixed, kept, kept, seed, "replacing")
        self._comparable &= not drew_elsewhere
        constant_draws = drew and self._comparable
        if constant_draws and removed:
            before = self._run(examples, seed, constant_draws)
        for rows in removed:
            kept = without(torch.tensor(rows), count)
            less = self._run(select(examples, kept), seed, constant_draws)
            if self._comparable:
                self._refuse_difference(examples, before, less, kept, torch.arange(len(kept)), seed, "removing")
        return drew or drew_elsewhere

    def check_special_values(self, source: SyntheticExamples) -> None:
        """Where numbers are NaN, infinite or exactly zero, rows must not depend on other examples. Nine passes."""
        count = rows_needed(self._raw.batch)
        if not count:
            return
        passes = GuardedPasses()
        examples, ordinary = source.draw(self._raw.batch, count, None)
        ordinary = with_extremes(ordinary)
        run = partial(self._run, seed=source.seed)
        before = passes.try_pass(partial(run, ordinary))
        if before is None:
            return
        for special in special_batches(examples, ordinary, source.seed):
            one, several = (passes.try_pass(partial(run, some)) for some in (special.one, special.several))
            others = without(special.middle, count)
            for other, rows in ((before, others), (several, special.middle)):
                if one is not None and other is not None and self._differ(special.one, one, other, rows, rows):
                    raise InputError(
                        f"{self._what} mixes examples in which numbers are {special.kind}: replacing some examples of a batch "
                        "changed the rows of others; fill in such numbers from constants or from the example itself "
                        f"(seed {source.seed} of the check)"
                    )

    def _refuse_difference(
        self, examples: Any, before: list[Any], after: list[Any], rows: Tensor, rows_after: Tensor, seed: int, how: str
    ) -> None:
        if self._differ(examples, before, after, rows, rows_after):
            raise InputError(
                f"{self._what} mixes examples: {how} one example of a batch changed the rows of others; treat every example "
                "on its own, normalize by public constants or by each example's own values, and do not combine examples "
                f"(mixup, cutmix) (seed {seed} of the check)"
            )

    def _differ(self, examples: Any, before: list[Any], after: list[Any], rows: Tensor, rows_after: Tensor) -> bool:
        if len(before) != len(after):
            return True
        given = [leaf for leaf in tree_leaves(examples) if isinstance(leaf, Tensor)]
        inputs = torch.stack([_largest(leaf[rows]).cpu() for leaf in given]).amax(0)
        return any(
            _rows_differ(one[rows], other[rows_after], inputs)
            if isinstance(one, Tensor) and isinstance(other, Tensor)
            else isinstance(one, int | float | str) and one != other
            for one, other in zip(before, after, strict=True)
        )


def _rows_differ(one: Tensor, other: Tensor, inputs: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    eps = torch.finfo(one.dtype).eps
    limit = max(1e-4, 4 * eps) * _largest(one) + 10 * eps * inputs.to(one.device)
    same = (one == other) | ((one != one) & (other != other))
    near = (one - other).abs() <= limit.view(-1, *[1] * (one.dim() - 1))
    return not bool((same | near).all())


def _largest(rows: Tensor) -> Tensor:
    """The largest finite magnitude in each row."""
    if rows.numel() == 0:
        return torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    numbers = rows.detach() if rows.is_complex() else rows.detach().double()
    sizes = numbers.abs().nan_to_num(nan=0.0, posinf=0.0).double()
    return sizes.flatten(1).amax(1) if rows.dim() > 1 else sizes


_aten = torch.ops.aten
_SHAPED_BY_A_LIST = {_aten.rand, _aten.randn, _aten.randint}
_SHAPED_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like}
_IN_PLACE = {
    _aten.uniform_,
    _aten.normal_,
    _aten.random_,
    _aten.exponential_,
    _aten.geometric_,
    _aten.cauchy_,
    _aten.log_normal_,
}

_DRAWS = (
    _SHAPED_BY_A_LIST
    | _SHAPED_LIKE
    | _IN_PLACE
    | {
        _aten.randperm,
        _aten.bernoulli,
        _aten.bernoulli_,
        _aten.native_dropout,
    }
)


class _ConstantDraws(TorchDispatchMode):
    """Fills every random tensor with one number, and reseeds before every draw.

    So the random numbers of an example depend neither on its position nor on the batch size, in whatever dimension the
    examples are and however many draws there are. A random permutation is the identity.
    """

    def __init__(self, restart: Callable[[], None]) -> None:
        super().__init__()
        self._restart = restart
        self._draws = 0
        self.ended = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if operation not in _DRAWS:
            return func(*args, **kwargs)
        self._draws += 1
        self.ended = self._draws > _EQUAL_DRAWS
        if not self.ended:
            self._restart()
        if operation is _aten.randperm:
            result = func(*args, **kwargs)
            return torch.arange(len(result), dtype=result.dtype, device=result.device)
        if operation in _IN_PLACE:
            return args[0].copy_(func(args[0].new_empty(()), *args[1:], **kwargs).expand_as(args[0]))
        if operation in _SHAPED_LIKE:
            return func(args[0].new_empty(()), *args[1:], **kwargs).expand(args[0].shape).clone()
        if operation in _SHAPED_BY_A_LIST:
            size = next(value for value in args if isinstance(value, list | tuple))
            return func(*([] if value is size else value for value in args), **kwargs).expand(tuple(size)).clone()
        if operation in (_aten.bernoulli, _aten.bernoulli_):
            return self._bernoulli(operation is _aten.bernoulli_, args, kwargs)
        if operation is _aten.native_dropout and args[2] is not False:
            kept = torch.rand((), device=args[0].device) >= args[1]
            return args[0] * kept / max(1 - args[1], 1e-9), kept.expand(args[0].shape).clone()
        return func(*args, **kwargs)

    def _bernoulli(self, in_place: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if in_place else args[0])
        value = (torch.rand((), device=args[0].device) < chance).to(args[0].dtype).expand(args[0].shape)
        return args[0].copy_(value) if in_place else value.clone()
