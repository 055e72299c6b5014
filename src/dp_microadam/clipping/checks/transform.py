"""The independence check of the transforms before the model: augmentation, normalization, casting.

This is a randomized numerical check.

Formal guarantees: after :func:`check_transform` has returned, on synthetic raw batches of the given batch's shapes,

- there was one row for each example in every tensor that the transform returned;
- replacing one example left the rows of all others as they were, whatever the global random streams of torch, Python and
  NumPy gave. This was tried for each of three examples, and for the first, middle and last of a batch of the given size;
  with one seed, or with 33 if the transform draws random numbers;
- the row of an example stayed as it was when the others were a thousand and a million times as large, when they were copies
  of it, near copies, and these with another target, and when numbers were missing (NaN) in it or in others, unless the
  transform raises an exception on them;
- removing examples left the rows of the others as they were, which shows what depends on the size of a batch. There, torch's
  generators give the same number to all examples. This is left out for transforms that draw from Python or NumPy, or that
  draw until the result satisfies a condition;
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dp_microadam.clipping.batches import batch_size, replace_rows, select
from dp_microadam.clipping.checks.checked_model import refuse_if_out_of_memory
from dp_microadam.clipping.checks.examples import (
    CHECK_SIZE,
    SyntheticExamples,
    joined,
    new_seed,
    repeat_example,
    resembling,
    scaled,
    with_missing_numbers,
)
from dp_microadam.clipping.checks.randomness import (
    EqualDraws,
    SeedWatch,
    no_side_effects,
    python_random_state,
    torch_random_state,
)
from dp_microadam.errors import InputError

Transform = Callable[[Any], Any]

_SCALES = ((1e3, 1.0, -30.0), (-1e4, 1.0, 1e6))
_SEEDS_OF_DRAWS = 33

# The number of different examples in a large batch.
_DISTINCT = 12

# The length of a synthetic text.
_LETTERS = 16


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
    raw = _Raw(batch)
    with no_side_effects(model) as seed_all:
        check = _TransformCheck(transform, raw, seed_all, model, what)
        source = check.accepted(SyntheticExamples(raw.batch, seed=new_seed() if seed is None else seed))
        check.refuse_memory(source)
        for step in range(_SEEDS_OF_DRAWS if check.draws else 1):
            check.seed = source.reseeded(step).seed
            examples, others = source.reseeded(step).draw(CHECK_SIZE)
            for row in range(CHECK_SIZE):
                check.compare(examples, replace_rows(examples, others, torch.tensor([row])), _without([row], CHECK_SIZE))
        check.seed = source.seed
        examples, others = source.draw(CHECK_SIZE)
        for factors in _SCALES:
            check.compare(examples, scaled(examples, factors), [1])
        check.compare_resembling(examples, others, source)
        for missing in with_missing_numbers(examples):
            rest = select(examples, torch.tensor([1, 2]))
            check.compare(examples, joined(missing, rest), [1, 2])
            check.compare(joined(missing, rest), joined(missing, select(others, torch.tensor([1, 2]))), [0])
        check.compare_sizes(examples, [[0], [1], [2], [0, 1], [1, 2]])
        if raw.count > CHECK_SIZE:
            check.compare_at_size(source)


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
    """Passes through a transform, and comparisons of the rows that they return.

    Attributes:
        seed: what passes start from.
        draws: whether the transform draws random numbers.
    """

    def __init__(self, transform: Transform, raw: _Raw, seed_all: Callable[[int], None], model: nn.Module, what: str) -> None:
        self.seed = 0
        self.draws = False
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
        try:
            self._run(start.simple().draw(CHECK_SIZE)[0])
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{self._what} cannot be checked: it raises {type(error).__name__} on synthetic examples of the training "
                "data's shapes (floating-point numbers in [0, 1), integers 0 or 1, texts of letters); make it accept them"
            ) from error
        self.seed = start.seed
        return start.with_large_integers(lambda examples: self._tried(examples) is not None)

    def refuse_memory(self, source: SyntheticExamples) -> None:
        """Raise :class:`InputError` if the rows of a batch depend on the batch before it."""
        examples, others = source.draw(CHECK_SIZE)
        before = self._run(examples)
        self._run(others)
        if self._differ(examples, before, self._run(examples), range(CHECK_SIZE), range(CHECK_SIZE)):
            raise InputError(
                f"{self._what} returns other rows for the same batch and random seed after another batch has passed: it "
                "keeps something of batches, or draws from a generator of its own; keep nothing, and use torch's generators"
            )

    def compare(self, batch: Any, other: Any, rows: Sequence[int]) -> None:
        """Raise :class:`InputError` unless these rows, which both batches have in common, give the same in both."""
        before, after = self._tried(batch), self._tried(other)
        if before is not None and after is not None and self._differ(batch, before, after, rows, rows):
            raise self._mixes("replacing")

    def compare_resembling(self, examples: Any, others: Any, source: SyntheticExamples) -> None:
        """An example must give the same beside copies, near copies and other targets as beside other examples."""
        similar, repeated = resembling(examples, others)
        count = batch_size(similar)
        different = source.reseeded(1).draw(count)[0]
        for place in (*range(repeated), *range(count - repeated, count)):
            self.compare(similar, replace_rows(similar, different, torch.tensor(_without([place], count))), [place])

    def compare_sizes(self, batch: Any, chosen: Sequence[Sequence[int]]) -> None:
        """Raise :class:`InputError` unless examples give the same in batches of these rows only."""
        before = self._tried(batch, equal_draws=self.draws) if self._comparable else None
        for rows in chosen if before is not None else []:
            after = self._tried(select(batch, torch.tensor(rows)), equal_draws=self.draws)
            if not self._comparable:
                return
            if before is None or after is None or self._differ(batch, before, after, rows, range(len(rows))):
                raise self._mixes("removing")

    def compare_at_size(self, source: SyntheticExamples) -> None:
        """Replaces, and removes, the first, middle and last example of a batch that has the size of the given one."""
        count = self._raw.count
        rows = torch.arange(count) % _DISTINCT
        examples, others = (select(part, rows) for part in source.draw(_DISTINCT))
        batch, some = repeat_example(examples, count // 4, count), [0, count // 2, count - 1]
        self.compare(batch, replace_rows(batch, others, torch.tensor(some)), _without(some, count))
        self.compare_sizes(batch, [_without(some, count)] if _without(some, count) else [])

    def _tried(self, examples: Any, *, equal_draws: bool = False) -> list[Any] | None:
        try:
            return self._run(examples, equal_draws=equal_draws)
        except InputError:
            raise
        except Exception as error:
            refuse_if_out_of_memory(error)
            return None

    def _run(self, examples: Any, *, equal_draws: bool = False) -> list[Any]:
        """The leaves of the result; raises :class:`InputError` unless they have one row for each example."""
        count = batch_size(examples)
        self._seed_all(self.seed)
        torch_start, python_start = torch_random_state(self._model), python_random_state()
        mode = EqualDraws(lambda: self._seed_all(self.seed))
        with mode if equal_draws else nullcontext():
            result = self._transform(self._raw(examples))
        drew_elsewhere = python_random_state() != python_start
        self.draws |= drew_elsewhere or torch_random_state(self._model) != torch_start
        self._comparable &= not (drew_elsewhere or mode.ended)
        self._seeds.refuse_seeding(self.seed)
        rows = batch_size(result)
        if rows != count:
            raise InputError(
                f"{self._what} makes {rows} rows of {count} examples, so that an example counts more or less than once; it "
                "must return one row for each example, and several views of an example as a dimension of their own, "
                "[B, K, ...], whose losses are averaged"
            )
        return tree_leaves(result)

    def _mixes(self, how: str) -> InputError:
        return InputError(
            f"{self._what} mixes examples: {how} one example of a batch changed the rows of others; treat every example "
            "on its own, normalize by public constants or by each example's own values, fill in missing numbers from "
            f"constants, and do not combine examples (mixup, cutmix) (seed {self.seed} of the check)"
        )

    def _differ(
        self, examples: Any, before: list[Any], after: list[Any], rows: Sequence[int], rows_after: Sequence[int]
    ) -> bool:
        if len(before) != len(after):
            return True
        here, there = torch.tensor(list(rows)), torch.tensor(list(rows_after))
        given = [leaf for leaf in tree_leaves(examples) if isinstance(leaf, Tensor)]
        inputs = torch.stack([_largest(leaf[here]).cpu() for leaf in given]).amax(0)
        return any(
            _rows_differ(one[here], other[there], inputs)
            if isinstance(one, Tensor) and isinstance(other, Tensor)
            else isinstance(one, int | float | str) and one != other
            for one, other in zip(before, after, strict=True)
        )


def _without(rows: Sequence[int], count: int) -> list[int]:
    return [row for row in range(count) if row not in rows]


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
