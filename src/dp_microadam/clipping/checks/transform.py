"""The independence check of the transforms before the model: augmentation, normalization, casting.

This is a randomized numerical check.

Formal guarantees: after :func:`check_transform` has returned, on synthetic raw batches of the given batch's shapes,

- there was one row for each example in every tensor that the transform returned;
- replacing three of six examples left the rows of all others as they were, whatever the global random streams of
  torch, Python and NumPy gave, with one seed, or with 33 if the transform draws random numbers; so did replacing some in a
  batch of the given size, three quarters of which were copies of one example;
- the row of an example was alone what it was beside one and two others, others a thousand and a million times as large,
  copies of it, near copies, and these with another target, and when numbers were missing (NaN) in it or in
  others, unless the transform raises an exception on them. There, torch's generators give the same number to all examples.
  For transforms that draw from Python or NumPy, or that draw until the result satisfies a condition, the others were
  exchanged instead of removed;
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dp_microadam.clipping.batches import batch_size
from dp_microadam.clipping.checks.examples import CHECK_SIZE, SyntheticExamples, copies_replaced, new_seed
from dp_microadam.clipping.checks.independence import Probe, Shown
from dp_microadam.clipping.checks.randomness import SeedAll, no_side_effects
from dp_microadam.errors import InputError

Transform = Callable[[Any], Any]

_SEEDS_OF_DRAWS = 33

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
    source = SyntheticExamples(raw.batch, seed=new_seed() if seed is None else seed)
    with no_side_effects(model) as seed_all:
        check = _TransformCheck(transform, raw, seed_all, model, what)
        check.refuse_exceptions(source.simple().draw(CHECK_SIZE)[0])
        check.seed = source.seed
        source = source.with_large_integers(lambda examples: check.tried(examples) is not None)
        check.refuse_memory(source)
        check.check_company(source)
        check.check_replacements(source, range(_SEEDS_OF_DRAWS if check.passes.draws else 1))
        if raw.count > CHECK_SIZE:
            examples, changed, kept = copies_replaced(source, raw.count)
            before, after = check.tried(examples), check.tried(changed)
            if before is not None and after is not None:
                check.compare(before, after, kept, kept)


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


class _TransformCheck(Probe):
    """Passes through a transform, which show its rows."""

    def __init__(self, transform: Transform, raw: _Raw, seed_all: SeedAll, model: nn.Module, what: str) -> None:
        super().__init__(model, seed_all, what)
        self._transform = transform
        self._raw = raw
        self._what = what

    @property
    def removes(self) -> bool:  # type: ignore[override]
        return self.passes.comparable

    def refuse_exceptions(self, simple: Any) -> None:
        """Raise :class:`InputError` if the transform takes no synthetic examples."""
        try:
            self.run(simple)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{self._what} cannot be checked: it raises {type(error).__name__} on synthetic examples of the training "
                "data's shapes (floating-point numbers in [0, 1), integers 0 or 1, texts of letters); make it accept them"
            ) from error

    def refuse_memory(self, source: SyntheticExamples) -> None:
        """Raise :class:`InputError` if the rows of a batch depend on the batch before it."""
        examples, others = source.draw(CHECK_SIZE)
        before, _, again = (self.run(batch) for batch in (examples, others, examples))
        if _differ(before, again, slice(None), slice(None)):
            raise InputError(
                f"{self._what} returns other rows for the same batch and random seed after another batch has passed: it "
                "keeps something of batches, or draws from a generator of its own; keep nothing, and use torch's generators"
            )

    def run(self, batch: Any, *, equal_draws: bool = False, thorough: bool = False) -> Shown:
        """The leaves of the result; raises :class:`InputError` unless they have one row for each example."""
        count = batch_size(batch)
        with self.passes.one(self.seed, equal_draws=equal_draws):
            result = self._transform(self._raw(batch))
        rows = batch_size(result)
        if rows != count:
            raise InputError(
                f"{self._what} makes {rows} rows of {count} examples, so that an example counts more or less than once; it "
                "must return one row for each example, and several views of an example as a dimension of their own, "
                "[B, K, ...], whose losses are averaged"
            )
        # What is no tensor counts as the same for all examples; a text is compared by its letters.
        return {
            f"{index}: {type(leaf).__name__}": leaf if isinstance(leaf, Tensor) else _of_all(leaf, count)
            for index, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor | int | float | str)
        }

    def compare(self, before: Shown, after: Shown, place: Any, at: Any = 0) -> None:
        if _differ(before, after, place, at):
            raise InputError(
                f"{self._what} mixes examples: the rows of one changed with the others of its batch; treat every example "
                "on its own, normalize by public constants or by each example's own values, fill in missing numbers from "
                f"constants, and do not combine examples (mixup, cutmix) (seed {self.seed} of the check)"
            )


def _of_all(leaf: float | str, count: int) -> Tensor:
    numbers = [float(ord(letter)) for letter in leaf] if isinstance(leaf, str) else [float(leaf)]
    return torch.tensor(numbers, dtype=torch.float64).expand(count, -1)


def _differ(before: Shown, after: Shown, place: Any, at: Any) -> bool:
    return before.keys() != after.keys() or any(_rows_differ(before[name][at], after[name][place]) for name in before)


def _rows_differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    limit = max(1e-4, 4 * torch.finfo(one.dtype).eps) * one.abs().nan_to_num(posinf=0.0).amax() if one.numel() else 0.0
    same = (one == other) | ((one != one) & (other != other))
    return not bool((same | ((one - other).abs() <= limit)).all())
