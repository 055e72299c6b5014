"""Features of a frozen backbone, computed once: what comes before the trained head is a function of single examples.

If only the last module of a model trains and nothing random comes before it, its input is the same in every step. It is
computed once for each example and kept (``feature_store.py``), and steps run on it: the head's gradients are those of the whole
model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.data import Dataset

from dp_microadam.clipping.batches import batch_size
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.synthetic_examples import CHECK_SIZE, SyntheticExamples
from dp_microadam.clipping.transform_check import check_transform
from dp_microadam.errors import InputError
from dp_microadam.training.evaluation import PerExample, batches, moved
from dp_microadam.training.feature_store import Arrays, FeatureStore
from dp_microadam.training.held_out import share_examples
from dp_microadam.training.model_split import ModelSplit
from dp_microadam.training.repeats import refuse_repeats
from dp_microadam.training.torch_randomness import forked_torch
from dp_microadam.training.withheld import withheld
from dp_microadam.validation import require_integer

_FORMAT = b"features of a frozen part, 1\n"

_COMPARED = 8
"""Examples whose features are computed again when kept ones are found."""

_CLOSE = 1e-3
"""Largest difference of these features, relative to the largest of an example: kernels round differently."""


class FrozenFeatures:
    """Computes what a model's frozen part makes of each example once, so that steps run on the trained head alone.

        features = FrozenFeatures(model, per_example_loss, prepare=normalize)
        train, validation = features.of(train, validation)
        trainer = PrivateTrainer(model, optimizer, plan, features.on(per_example_loss))
        trainer.fit(train, validation)

    The trainer holds the whole model as before: optimizer, checkpoints and exports do not notice. Its data are features, so
    that it gets no ``prepare`` and no ``augment``.

    Arguments:
        model: all its trainable parameters lie in one module, the head, which is called once in a forward pass with one tensor.
            The model returns what the head returns, as it is or inside a structure such as an output of transformers.
        per_example_loss: ``f(model, batch)`` returns one loss per example. It passes tensors of the batch to the model as they
            are, and uses the model only by calling it.
        head: the name of the head's module; by default the smallest that holds all trainable parameters.
        prepare: applied to batches before the model, as by the trainer.
        folder: where features are kept; by default ``$XDG_CACHE_HOME/dp-microadam/features``. They are as private as the data:
            only this user may read them, and ``dp-microadam data clean`` removes them.
        physical_batch_size: examples that go through the frozen part at once.
        num_workers: processes that read a Dataset.
        tell: called now and then with the fraction of a part that is computed.

    Formal guarantees: :meth:`of` returns one row per example, in their order, each a function of that example and of the frozen
    weights. A run on features therefore has the guarantee of the same run on examples. It assumes what that run assumes, which
    is checked in the same way, on synthetic examples (``clipping/independence.py``): no example changes losses or gradients of
    others, and nothing of a batch is kept in the model. A part of the check is repeated after features are computed in the
    first call, and they are not kept if it fails. A frozen part that draws random numbers is refused. Features that were kept
    passed the check when they were computed; if those of all parts are found, it is not repeated for the frozen part.
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExample,
        *,
        head: str | None = None,
        prepare: Callable[[Any], Any] | None = None,
        folder: str | Path | None = None,
        physical_batch_size: int = 64,
        num_workers: int = 0,
        tell: Callable[[float], None] | None = None,
    ) -> None:
        self.model = model
        self._split = ModelSplit(model, per_example_loss, head)
        self._loss = per_example_loss
        self._prepare = prepare
        self._store = FeatureStore(folder)
        self._batch_size = require_integer("physical_batch_size", physical_batch_size, 1)
        self._num_workers = require_integer("num_workers", num_workers, 0)
        self._tell = tell
        self._leaves: list[Tensor] = []  # of a synthetic batch with features
        self._checked = False
        self._look_again = _no_look

    @property
    def head(self) -> str:
        """The name of the head's module."""
        return self._split.head

    def on(self, measure: PerExample) -> PerExample:
        """``measure``, a function like ``per_example_loss``, for batches of features; it can be called after :meth:`of`."""
        return self._split.on(measure)

    def of(self, train: Any, *held_out: Any) -> list[Any]:
        """The same data with features in place of the model's inputs, memory-mapped. Those that were kept are used again.

        Each part is a map-style Dataset, or tensors with examples along the first dimension. The first input of the model is
        replaced by the features, and its other inputs by empty tensors; labels stay.

        Raises:
            InputError: if ``train`` holds examples twice or shares some with ``held_out``; and, in the first call, if examples
                interact in the frozen part, random numbers are drawn there, or the model cannot be split.
        """
        refuse_repeats(train)
        if any(share_examples(train, part) for part in held_out if part is not None):
            raise InputError(
                "held-out data share examples with the training data, so that their metrics would be private; "
                "remove them from one of the two"
            )
        parts = [part for part in (train, *held_out) if part is not None]
        with forked_torch(self.model):
            if not self._leaves:
                self._refuse_random_data(train)
            keys = {id(part): withheld(partial(self._key, part)) for part in parts}
            if not self._leaves:
                if not all(map(self._store.holds, keys.values())):
                    self._check(train)
                self._learn(train)
            try:
                return [None if part is None else self._features_of(part, keys[id(part)]) for part in (train, *held_out)]
            finally:
                self._look_again = _no_look  # what trains may be another part of the head from here on

    def _refuse_random_data(self, train: Any) -> None:
        first, again = (self._first(train, self._batch_size) if isinstance(train, Dataset) else None for _ in range(2))
        if not _equal(first, again):
            raise InputError(
                "the training data are others when they are read again, so that features cannot be computed once; remove "
                "random transforms from the Dataset, or do not keep features"
            )

    def _check(self, data: Any) -> None:
        """The checks of a run on examples, once; on synthetic examples."""
        if self._checked:
            return
        raw = self._first(data, self._batch_size)
        if self._prepare is not None:
            check_transform(self._prepared, raw, self.model, what="prepare")
        batch = withheld(lambda: self._prepared(raw))
        engine = ClippedGradients(self.model, self._loss, max_grad_norm=1.0)
        engine.check_independence(batch)
        like, _ = SyntheticExamples(0).draw(batch, batch_size(batch), None)

        def look_again() -> None:
            engine.check_again()
            engine.check_independence(like)

        self._look_again = look_again
        self._checked = True

    def _learn(self, train: Any) -> None:
        """How model and loss can be split, and that nothing is random before the head; on synthetic examples."""
        batch = withheld(lambda: self._prepared(self._first(train, self._batch_size)))
        examples, _ = SyntheticExamples(0).draw(batch, CHECK_SIZE, None)
        self._split.learn(examples)
        leaves = tree_leaves(self._split.with_features(examples))
        if any(leaf.dtype == torch.bfloat16 for leaf in leaves):
            raise InputError(f"the head {self.head!r} gets bfloat16, which cannot be kept in files; give it float32")
        self._leaves = leaves  # last: until all of it has passed, every call looks

    def _features_of(self, data: Any, key: str) -> Any:
        kept = self._store.read(key)
        if kept is None or not withheld(partial(self._still_right, data, kept)):
            self._check(data)
            count = len(data) if isinstance(data, Dataset | Tensor) else len(tree_leaves(data)[0])  # type: ignore[arg-type]
            shapes = [((count, *leaf.shape[1:]), leaf.cpu().numpy().dtype) for leaf in self._leaves]
            kept = self._store.write(key, shapes, lambda arrays: self._fill(arrays, data))
        return tree_unflatten([torch.from_numpy(array) for array in kept], self._split.structure)

    def _fill(self, arrays: Arrays, data: Any) -> None:
        withheld(lambda: self._compute(arrays, data))
        self._look_again()  # a frozen part may have begun to mix examples

    def _compute(self, arrays: Arrays, data: Any) -> None:
        start = 0
        for leaves in self._computed(data, self._batch_size):
            stop = start + len(leaves[0])
            for array, leaf in zip(arrays, leaves, strict=True):
                array[start:stop] = leaf
            start = stop
            if self._tell is not None:
                self._tell(start / len(arrays[0]))

    def _computed(self, data: Any, batch_size: int) -> Iterator[Arrays]:
        """Batch by batch, the leaves with features in place of inputs."""
        for raw in batches(data, batch_size, self._num_workers):
            yield [leaf.cpu().numpy() for leaf in tree_leaves(self._split.with_features(self._prepared(raw)))]

    def _still_right(self, data: Any, kept: Arrays) -> bool:
        """Whether some examples still have the features that were kept: code may have changed where weights have not."""
        now = next(self._computed(data, _COMPARED))
        return len(now) == len(kept) and all(map(_close, kept, now))

    def _key(self, data: Any) -> str:
        """A digest of frozen weights and data. It depends on private data, and shows in the names of kept features alone."""
        digest = hashlib.sha256(_FORMAT)
        for name, module in self.model.named_modules():
            digest.update(f"{name} {type(module).__qualname__} {module.training}\n".encode())
        for name, value in self.model.state_dict().items():
            if self._split.is_frozen(name):
                _add(digest, name, value)
        for raw in batches(data, 1024, self._num_workers):
            for leaf in tree_leaves(raw):
                _add(digest, "", leaf)
        return digest.hexdigest()

    def _first(self, data: Any, count: int) -> Any:
        return withheld(lambda: next(batches(data, count)))

    def _prepared(self, raw: Any) -> Any:
        batch = moved(raw, self.model)
        return batch if self._prepare is None else self._prepare(batch)


def _no_look() -> None:
    """Repeats no check."""


def _add(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if value.numel() else b"")
    else:
        digest.update(f"{name} {value!r}\n".encode())


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _close(kept: Any, now: Any) -> bool:
    kept = kept[: len(now)]
    if kept.shape != now.shape or kept.dtype != now.dtype or now.dtype.kind != "f" or not now.size:
        return bool(np.array_equal(kept, now))
    rows = now.reshape(len(now), -1)
    return bool((np.abs(kept.reshape(rows.shape) - rows) <= _CLOSE * np.abs(rows).max(1, keepdims=True)).all())
