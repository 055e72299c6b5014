"""The independence check of what happens to a batch before the model sees it: augmentation, normalization, types.

A randomized numerical check. Formal guarantees: after :func:`check_transform` has returned, on synthetic raw batches of the
given batch's shapes,

- there was one row for each example, in every tensor that came out;
- replacing one example left the rows of all others as they were, whatever the global random streams of torch, Python and
  NumPy gave; tried for each of three examples, and for the first, middle and last of a batch of the given size; with real
  numbers in [0, 1) and multiplied by 1000, 1 and 30, with whole numbers up to what they index, or 255; with one seed, or with
  32 if the transform draws random numbers;
- so did taking one or two examples out, which shows what depends on the size of a batch; there, torch's draws give one
  number for all examples. It is left out for transforms that draw from Python or NumPy,
  or until they like what they get;
- the same batch and seed gave the same rows again after another batch had passed, so nothing was kept of that one.

Then each row is a function of its own example and of random numbers, and clipping its gradient bounds what the example adds.

Several views of an example are a dimension of their own, [B, K, …], whose losses are averaged before the clip: rows of their
own would be clipped and added one by one, and the example would count K times.

Not seen, and outside the guarantee if it happens: mixing on other values, other sizes or other lengths of the dimensions
that are not the batch's; mixing by draws that none of the seeds gives (with probability p in a batch, all 33 miss it with
(1 - p)³³); a change of a row below one part in 10,000; what begins later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dp_microadam.clipping.batches import alike, at_bounds, batch_size, scaled, select, with_other_rows
from dp_microadam.clipping.integer_ranges import WatchIndices
from dp_microadam.clipping.ownership import Interaction, Trial, new_seed, other_random_state, random_state, without
from dp_microadam.clipping.undisturbed import undisturbed
from dp_microadam.errors import InputError

Transform = Callable[[Any], Any]

_EXAMPLES = 3
_SCALES = (1e3, 1.0, 30.0)
_SEEDS_OF_DRAWS = 32

# Rows of a large batch are made of so many different ones.
_DISTINCT = 12

# Letters of a synthetic text.
_LETTERS = 16

# A loop that draws until it likes what it gets must end.
_EQUAL_DRAWS = 5_000


def check_transform(transform: Transform, batch: Any, model: nn.Module, *, what: str, seed: int | None = None) -> None:
    """Raise :class:`InputError` unless ``transform`` treats the examples of a batch one by one.

    Args:
        transform: takes a raw batch and returns what the model gets.
        batch: a raw batch, of which structure, shapes and types are used and no value.
        model: whose device the transform may draw random numbers on.
        what: what the transform is called in refusals.
        seed: repeats a check; by default a new one from the operating system.
    """
    start = Trial(new_seed() if seed is None else seed)
    raw = _Raw(batch)
    with undisturbed(model) as rewind:
        check = _TransformCheck(transform, raw, rewind, model, what)
        trial = check.accepted(start)
        examples, others = trial.examples(raw.batch, _EXAMPLES, None)
        drew = check.examples_do_not_mix(examples, others, trial.seed, [[0], [1], [2]], [[0], [2], [1, 2], [0, 1]])
        further = trial.again(1)
        examples, others = further.examples(raw.batch, _EXAMPLES, None, spread=True)
        check.examples_do_not_mix(scaled(examples, _SCALES), others, further.seed, [[0], [2]], [[0, 2]], required=False)
        for step in range(_SEEDS_OF_DRAWS if drew else 0):
            further = trial.again(2 + step)
            examples, others = further.examples(raw.batch, _EXAMPLES, None)
            check.examples_do_not_mix(examples, others, further.seed, [[0], [1], [2]], [], required=False)
        count = raw.count
        if count > _EXAMPLES:
            rows = torch.arange(count) % _DISTINCT
            examples, others = (select(part, rows) for part in trial.examples(raw.batch, _DISTINCT, None))
            some = [[0, count // 2, count - 1]]
            check.examples_do_not_mix(alike(examples, count // 4, count), others, trial.seed, some, some)


class _Raw:
    """A raw batch in which texts, one for each example, are rows of letters, so that it can be made up and taken apart."""

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
        """The batch as the transform takes it; its own to write into."""
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
    def __init__(self, transform: Transform, raw: _Raw, rewind: Callable[[int], None], model: nn.Module, what: str) -> None:
        self._transform = transform
        self._raw = raw
        self._rewind = rewind
        self._model = model
        self._what = what
        # Whether batches of different sizes can be given the same random numbers.
        self._comparable = True

    def accepted(self, start: Trial) -> Trial:
        """Examples with whole numbers as large as the transform takes them."""
        simple, _ = Trial(0).examples(self._raw.batch, _EXAMPLES, None)
        watched = WatchIndices(simple)
        self._rewind(0)
        try:
            with watched:
                self._transform(self._raw(simple))
        except Exception as error:
            raise InputError(
                f"{self._what} cannot be checked: it raises {type(error).__name__} on synthetic examples of the training "
                "data's shapes (real numbers in [0, 1), whole numbers 0 or 1, texts of letters); make it accept them"
            ) from error
        for bounds in watched.candidates():
            trial = Trial(start.seed, bounds)
            examples, _ = trial.examples(self._raw.batch, _EXAMPLES, None)
            if all(self._first_run(some, trial.seed) is not None for some in (at_bounds(examples, bounds), examples)):
                return trial
        return start

    def _first_run(self, examples: Any, seed: int) -> list[Any] | None:
        try:
            return self._run(examples, seed)
        except InputError:
            raise
        except Exception:
            return None

    def _run(self, examples: Any, seed: int, one_number: bool = False) -> list[Any]:
        """The leaves of what comes out; refused unless they have a row for each example."""
        count = batch_size(examples)
        self._rewind(seed)
        mode = _OneNumber(lambda: self._rewind(seed))
        with mode if one_number else nullcontext():
            result = self._transform(self._raw(examples))
        self._comparable &= not mode.ended
        rows = batch_size(result)
        if rows != count:
            raise InputError(
                f"{self._what} makes {rows} rows of {count} examples, so that an example counts more or less than once; return "
                "one row for each example, and several views of an example as a dimension of their own, [B, K, ...], whose "
                "losses are averaged"
            )
        return tree_leaves(result)

    def examples_do_not_mix(
        self,
        examples: Any,
        others: Any,
        seed: int,
        replaced: Sequence[Sequence[int]],
        removed: Sequence[Sequence[int]],
        *,
        required: bool = True,
    ) -> bool:
        """Replace and take out the examples of these rows: the rest stay as they are. Returns whether anything was drawn."""
        count = batch_size(examples)
        self._rewind(seed)
        start, other_start = random_state(self._model), other_random_state()
        before = self._run(examples, seed) if required else self._first_run(examples, seed)
        if before is None:
            return False
        drew, drew_elsewhere = random_state(self._model) != start, other_random_state() != other_start
        self._run(others, seed)
        if self._differ(examples, before, self._run(examples, seed), torch.arange(count), torch.arange(count)):
            raise InputError(
                f"{self._what} gives other rows for the same batch after another one, with the same random numbers: it keeps "
                "something of batches, or draws from a generator of its own; keep nothing, and draw from torch's generators"
            )
        for rows in replaced:
            mixed = self._run(with_other_rows(examples, others, torch.tensor(rows)), seed)
            kept = without(torch.tensor(rows), count)
            self._refuse_difference(examples, before, mixed, kept, kept, seed, "replacing")
        self._comparable &= not drew_elsewhere
        one_number = drew and self._comparable
        if one_number and removed:
            before = self._run(examples, seed, one_number)
        for rows in removed:
            kept = without(torch.tensor(rows), count)
            less = self._run(select(examples, kept), seed, one_number)
            if self._comparable:
                self._refuse_difference(examples, before, less, kept, torch.arange(len(kept)), seed, "taking out")
        return drew or drew_elsewhere

    def _refuse_difference(
        self, examples: Any, before: list[Any], after: list[Any], rows: Tensor, rows_after: Tensor, seed: int, how: str
    ) -> None:
        if self._differ(examples, before, after, rows, rows_after):
            raise Interaction(
                f"{self._what} mixes examples: {how} one example of a batch changed the rows of others; treat every example "
                "on its own, normalize by public constants or by each example's own values, and mix no two (mixup, cutmix) "
                f"(seed {seed} of the check)"
            )

    def _differ(self, examples: Any, before: list[Any], after: list[Any], rows: Tensor, rows_after: Tensor) -> bool:
        if len(before) != len(after):
            return True
        given = [leaf for leaf in tree_leaves(examples) if isinstance(leaf, Tensor)]
        inputs = torch.stack([_largest(leaf[rows.to(leaf.device)]).cpu() for leaf in given]).amax(0)
        return any(
            _rows_differ(one[rows.to(one.device)], other[rows_after.to(other.device)], inputs)
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
    limit = max(1e-4, 4 * eps) * _largest(one).nan_to_num(posinf=0.0) + 10 * eps * inputs.to(one.device)
    same = (one == other) | ((one != one) & (other != other))
    near = (one - other).abs() <= limit.view(-1, *[1] * (one.dim() - 1))
    return not bool((same | near).all())


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude in each row."""
    if rows.numel() == 0:
        return torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    return rows.detach().abs().flatten(1).amax(1).double() if rows.dim() > 1 else rows.detach().abs().double()


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


class _OneNumber(TorchDispatchMode):
    """A random tensor is one number everywhere, and every draw begins the stream again.

    So what is drawn for an example depends neither on its place nor on how many there are, in whatever dimension the
    examples are and however often is drawn. A permutation leaves everything in its place.
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
