"""Features of a frozen backbone, computed once: what comes before the trained head is a function of single examples.

If only one module of a model trains, the head, and nothing random comes before it, its input is the same in every step. It is
computed once for each example and kept, and steps run on it: the head's gradients are those of the whole model.

Kept features are private like the data they come from. An entry is one ``.npy`` file with a row per example. It is written
under another name, synced, and then renamed to its key and the digest of its content, so that an entry is complete if it
exists, and every byte of it is as it was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import Dataset

from dp_microadam.clipping.batches import batch_size
from dp_microadam.clipping.checks.examples import CHECK_SIZE, SyntheticExamples
from dp_microadam.clipping.checks.randomness import no_side_effects, python_random_state, torch_random_state
from dp_microadam.clipping.checks.transform import check_transform
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.durable_files import sync_folder
from dp_microadam.errors import InputError
from dp_microadam.training.evaluation import PerExample, batches, moved
from dp_microadam.training.given_data import count_examples
from dp_microadam.training.same_examples import refuse_repeats, share_examples
from dp_microadam.training.torch_randomness import forked_torch
from dp_microadam.training.withheld import withheld
from dp_microadam.validation import public, require_integer

_FORMAT = b"features of a frozen part, 2\n"
_ENTRY = re.compile(r"[0-9a-f]{64}\.([0-9a-f]{64}\.npy|\d+\.unfinished)")

_COMPARED, _CLOSE = 8, 1e-3
"""Examples whose features are computed again when kept ones are found, and the largest relative difference: kernels round."""

_ABANDONED_SECONDS = 86_400
"""After so long without a write an unfinished entry is taken for that of a process that was killed."""


@public
class FrozenFeatures:
    """Computes what a model's frozen part makes of each example once, so that steps run on the trained head alone.

        features = FrozenFeatures(model, "classifier", loss, prepare=normalize)
        train, validation = features.of(train, validation)
        trainer = PrivateTrainer(model, optimizer, plan, features.on(loss))
        trainer.fit(train, validation)

    The trainer holds the whole model as before: optimizer, checkpoints and exports do not notice. Its data are features, so
    that it gets no ``prepare`` and no ``augment``.

    Arguments:
        model: returns what its head returns, as it is or inside a structure such as an output of transformers.
        head: the name of the module that has all trainable parameters, and is called once in a forward pass with one tensor.
        per_example_loss: ``f(model, batch)`` returns one loss per example, and uses the model only by calling it,
            with the first tensor of the batch before others.
        prepare: applied to batches before the model, as by the trainer.
        folder: where features are kept; by default ``$XDG_CACHE_HOME/dp-microadam/features``. They are as private as the data:
            only this user may read them, and ``dp-microadam data clean`` removes them.
        physical_batch_size: examples that go through the frozen part at once.
        num_workers: processes that read a Dataset.
        tell: called now and then with the fraction of a part that is computed.

    Formal guarantees: :meth:`of` returns one row per example, in their order, each a function of that example and of the frozen
    weights. A run on features therefore has the guarantee of the same run on examples. It assumes what that run assumes, which
    is checked in the same way, on synthetic examples (``clipping/checks``): no example changes losses or gradients of
    others, and nothing of a batch is kept in the model. The check is repeated after features are computed in the
    first call, and they are not kept if it fails. A frozen part that draws random numbers is refused. Features that were kept
    passed the check when they were computed; if those of all parts are found, it is not repeated for the frozen part.
    """

    def __init__(
        self,
        model: nn.Module,
        head: str,
        per_example_loss: PerExample,
        *,
        prepare: Callable[[Any], Any] | None = None,
        folder: str | Path | None = None,
        physical_batch_size: int = 64,
        num_workers: int = 0,
        tell: Callable[[float], None] | None = None,
    ) -> None:
        if not head or head not in dict(model.named_modules()):
            raise InputError(f"head is {head!r}; it must be the name of a module of the model, such as 'classifier'")
        outside = [name for name, each in model.named_parameters() if each.requires_grad and not name.startswith(f"{head}.")]
        if outside:
            raise InputError(
                f"parameter {outside[0]!r} trains, but is not part of the head {head!r}; freeze it with requires_grad_(False)"
            )
        self.model = model
        self.head = head
        self._loss = per_example_loss
        self._prepare = prepare
        self._store = FeatureStore(folder)
        self._batch_size = require_integer("physical_batch_size", physical_batch_size, 1)
        self._num_workers = require_integer("num_workers", num_workers, 0)
        self._tell = tell
        self._structure: TreeSpec | None = None  # of batches, once all checks have passed
        self._output: tuple[TreeSpec, int] | None = None  # of the model, and where in it that of the head is
        self._row: np.dtype[Any] = np.dtype([])

    def on(self, measure: PerExample) -> PerExample:
        """``measure``, a function like ``per_example_loss``, for batches of features."""

        def measured(model: nn.Module, batch: Any) -> Tensor:
            return measure(_HeadAlone(model, self._headed), batch)  # type: ignore[arg-type]

        return measured

    def of(self, train: Any, *held_out: Any) -> list[Any]:
        """The same data with features in place of the first tensor of batches, memory-mapped; kept ones are used again.

        Each part is a map-style Dataset, or tensors with examples along the first dimension.

        Raises:
            InputError: if ``train`` holds examples twice or shares some with ``held_out``; and, in the first call, if examples
                interact in the frozen part, random numbers are drawn there, or the loss needs more than the features.
        """
        refuse_repeats(train)
        if any(share_examples(train, part) for part in held_out if part is not None):
            raise InputError(
                "held-out data share examples with the training data, so that their metrics would be private; "
                "remove them from one of the two"
            )
        parts = {id(part): part for part in (train, *held_out) if part is not None}
        with forked_torch(self.model):
            if self._structure is None:
                self._split(train)
            keys = {each: withheld(partial(self._key, part)) for each, part in parts.items()}
            found = {each: self._kept(part, keys[each]) for each, part in parts.items()}
            check = self._check(train) if any(each is None for each in found.values()) else None
            for each, part in parts.items():
                if found[each] is None and check is not None:
                    fill = partial(self._fill, data=part, check=check)
                    found[each] = self._tensors(self._store.write(keys[each], count_examples("data", part), self._row, fill))
            return [None if part is None else found[id(part)] for part in (train, *held_out)]

    def _split(self, train: Any) -> None:
        """Check that features are the same in every step, and that the loss needs no more; on synthetic examples."""
        raw, again = (withheld(lambda: next(batches(train, self._batch_size))) for _ in range(2))
        pairs = zip(tree_leaves(raw), tree_leaves(again), strict=True)
        if isinstance(train, Dataset) and not all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs):
            raise InputError(
                "the training data are others when they are read again, so that features cannot be computed once; remove "
                "random transforms from the Dataset, or do not keep features"
            )
        examples, _ = SyntheticExamples(withheld(lambda: self._prepared(raw))).draw(CHECK_SIZE)
        with no_side_effects(self.model), torch.no_grad():
            state = torch_random_state(self.model), python_random_state()
            leaves, structure = tree_flatten(self._with_features(examples))
            if (torch_random_state(self.model), python_random_state()) != state:
                raise InputError(
                    f"random numbers are drawn before the head {self.head!r}, by dropout for example, so that features differ "
                    "from step to step; put the frozen part into eval mode, or do not keep features"
                )
            self._refuse_other_losses(examples, tree_unflatten(leaves, structure))
        if any(leaf.dtype == torch.bfloat16 for leaf in leaves):
            raise InputError(f"the head {self.head!r} gets bfloat16, which cannot be kept in files; give it float32")
        fields = [(str(place), leaf.cpu().numpy().dtype, leaf.shape[1:]) for place, leaf in enumerate(leaves)]
        self._row, self._structure = np.dtype(fields, align=True), structure

    def _refuse_other_losses(self, examples: Any, features: Any) -> None:
        """What the loss does with a batch besides calling the model must not need what features replace."""
        for module in self.model.modules():  # two passes differ by their random numbers
            if module.training and "Drop" in type(module).__name__:
                module.eval()
        outputs: list[Any] = []
        modules = (self.model.get_submodule(self.head), self.model)
        handles = [each.register_forward_hook(lambda module, args, output: outputs.append(output)) for each in modules]
        try:
            whole = self._loss(self.model, examples)
        finally:
            for handle in handles:
                handle.remove()
        leaves, structure = tree_flatten(outputs[-1])
        places = [place for place, leaf in enumerate(leaves) if leaf is outputs[0]]
        self._output = (structure, places[0]) if len(outputs) == 2 and places else None
        try:
            found = self.on(self._loss)(self.model, features)
        except Exception:
            found = None
        if found is None or found.shape != whole.shape or not torch.allclose(whole, found, rtol=_CLOSE, atol=_CLOSE):
            raise InputError(
                f"per_example_loss does not give for features what it gives for examples; it must use the first tensor of a "
                f"batch only to call the model, and the model must return what its head {self.head!r} returns"
            )

    def _headed(self, features: Tensor) -> Any:
        """What the model would return, with nothing but the head's output in it."""
        if self._output is None:
            raise InputError("the model does not return what its head returns, or no features are computed yet; call of(train)")
        structure, place = self._output
        leaves: list[Any] = [None] * structure.num_leaves
        leaves[place] = self.model.get_submodule(self.head)(features)
        return tree_unflatten(leaves, structure)

    def _with_features(self, batch: Any) -> Any:
        """The batch with features in place of its first tensor."""
        found: list[Any] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.extend((*args, *kwargs.values()))
            raise _HeadReached

        leaves, structure = tree_flatten(batch)
        handle = self.model.get_submodule(self.head).register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad(), contextlib.suppress(_HeadReached):
                self._loss(self.model, batch)
        finally:
            handle.remove()
        if len(found) != 1 or not isinstance(found[0], Tensor) or not found[0].dim() or len(found[0]) != len(leaves[0]):
            raise InputError(
                f"the head {self.head!r} does not get one tensor with one row for each example, so that features cannot be "
                "computed once; let it take one such tensor"
            )
        return tree_unflatten([found[0].detach(), *leaves[1:]], structure)

    def _check(self, data: Any) -> Callable[[], None]:
        """The checks of a run on examples, on synthetic ones; returns a part of them to be repeated."""
        raw = withheld(lambda: next(batches(data, self._batch_size)))
        if self._prepare is not None:
            check_transform(self._prepared, raw, self.model, what="prepare")
        batch = withheld(lambda: self._prepared(raw))
        like, _ = SyntheticExamples(batch).draw(batch_size(batch))

        def check() -> None:
            ClippedGradients(self.model, self._loss, max_grad_norm=1.0).check_independence(like)

        check()
        return check

    def _kept(self, data: Any, key: str) -> Any:
        """The features that were kept, unless some examples have others now: code may have changed where weights have not."""
        rows = self._store.read(key)
        if rows is None or rows.dtype != self._row:
            return None
        now = withheld(lambda: next(self._computed(data, _COMPARED)))
        close = all(_close(rows[str(place)][: len(leaf)], leaf) for place, leaf in enumerate(now))
        return self._tensors(rows) if close else None

    def _tensors(self, rows: NDArray[Any]) -> Any:
        assert self._structure is not None
        return tree_unflatten([torch.from_numpy(rows[name]) for name in self._row.names or ()], self._structure)

    def _fill(self, rows: NDArray[Any], data: Any, check: Callable[[], None]) -> None:
        withheld(lambda: self._compute(rows, data))
        check()  # a frozen part may have begun to mix examples

    def _compute(self, rows: NDArray[Any], data: Any) -> None:
        start = 0
        for leaves in self._computed(data, self._batch_size):
            stop = start + len(leaves[0])
            for place, leaf in enumerate(leaves):
                rows[str(place)][start:stop] = leaf
            start = stop
            if self._tell is not None:
                self._tell(start / len(rows))

    def _computed(self, data: Any, batch_size: int) -> Iterator[list[NDArray[Any]]]:
        """Batch by batch, the leaves with features in place of the first."""
        for raw in batches(data, batch_size, self._num_workers):
            yield [leaf.cpu().numpy() for leaf in tree_leaves(self._with_features(self._prepared(raw)))]

    def _key(self, data: Any) -> str:
        """A digest of frozen weights and data. It depends on private data, and shows in the names of kept features alone."""
        digest = hashlib.sha256(_FORMAT)
        for name, module in self.model.named_modules():
            digest.update(f"{name} {type(module).__qualname__} {module.training}\n".encode())
        for name, value in self.model.state_dict().items():
            if not name.startswith(f"{self.head}."):
                _add(digest, name, value)
        for raw in batches(data, 1024, self._num_workers):
            for leaf in tree_leaves(raw):
                _add(digest, "", leaf)
        return digest.hexdigest()

    def _prepared(self, raw: Any) -> Any:
        batch = moved(raw, self.model)
        return batch if self._prepare is None else self._prepare(batch)


class _HeadAlone:
    """Stands in for a model in a loss: its head gets the first tensor that it is called with."""

    def __init__(self, model: nn.Module, headed: Callable[[Tensor], Any]) -> None:
        self._model = model
        self._headed = headed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._headed(next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _HeadReached(BaseException):
    """Ends a forward pass before the head. Not an Exception, so that no code of a model or loss catches it."""


def _add(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if value.numel() else b"")
    else:
        digest.update(f"{name} {value!r}\n".encode())


def _close(kept: NDArray[Any], now: NDArray[Any]) -> bool:
    if now.dtype.kind != "f" or not now.size:
        return bool(np.array_equal(kept, now))
    rows = now.reshape(len(now), -1)
    return bool((np.abs(kept.reshape(rows.shape) - rows) <= _CLOSE * np.abs(rows).max(1, keepdims=True)).all())


class FeatureStore:
    """The entries of one folder.

    Formal guarantees: an entry that :meth:`read` returns was written to its end, by this user, and every byte of it is as it
    was written. The folder has permissions 0700, entries and what interrupted processes left of theirs 0600, and :meth:`clean`
    removes both. A folder or entry that is a link, or that others own or may write to, is refused or not used.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dp-microadam" / "features"
        self.folder = Path(default if folder is None else folder).expanduser()

    def read(self, key: str) -> NDArray[Any] | None:
        """The rows of an entry, memory-mapped; None if there is none, or none as it was written."""
        for path in self._entries():
            if path.name.startswith(key) and path.suffix == ".npy" and _is_own(path) and _digest(path) == path.suffixes[-2][1:]:
                # Copy on write: torch wants arrays that can be written to, and the file must not change.
                return np.load(path, mmap_mode="c", allow_pickle=False)
        return None

    def write(self, key: str, count: int, row: np.dtype[Any], fill: Callable[[NDArray[Any]], None]) -> NDArray[Any]:
        """Make an entry of ``count`` rows, which ``fill`` fills, and read it; if it raises, nothing is left.

        Of two processes that write one entry, either's is kept.

        Raises:
            InputError: if there is not enough room on the disk.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._entries():  # of killed processes, and entries that are not as they were written
            abandoned = time.time() - left.stat().st_mtime > _ABANDONED_SECONDS
            if abandoned if left.suffix == ".unfinished" else left.name.startswith(key):
                left.unlink(missing_ok=True)
        wanted, free = count * row.itemsize, shutil.disk_usage(self.folder).free
        if wanted > free:
            raise InputError(
                f"features would take {wanted / 2**30:.1f} GiB, but {self.folder} has {free / 2**30:.1f} GiB free; make room, "
                "set XDG_CACHE_HOME to a larger disk, or do not keep them"
            )
        unfinished = self.folder / f"{key}.{os.getpid()}.unfinished"
        try:
            unfinished.touch(mode=0o600)
            rows = np.lib.format.open_memmap(unfinished, mode="w+", dtype=row, shape=(count,))
            fill(rows)
            rows.flush()
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.rename(self.folder / f"{key}.{_digest(unfinished)}.npy")
            sync_folder(self.folder)
        finally:
            unfinished.unlink(missing_ok=True)
        found = self.read(key)
        if found is None:
            raise InputError(f"features in {self.folder} changed while they were written; give a folder that nobody else uses")
        return found

    def clean(self) -> int:
        """Remove all entries and what was left unfinished; returns the number of bytes. Other files are left alone."""
        freed = 0
        for entry in self._entries():
            freed += entry.stat().st_size
            entry.unlink()
        with contextlib.suppress(OSError):  # not there, or something else is in it
            self.folder.rmdir()
        return freed

    def _entries(self) -> list[Path]:
        if os.path.lexists(self.folder) and not _is_own(self.folder):
            raise InputError(
                f"features would be kept in {self.folder}, which is a link, or which others own or may write to; give a "
                "folder of your own (chmod go-w), or set XDG_CACHE_HOME to one"
            )
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return [entry for entry in found if _ENTRY.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink()]


def _is_own(path: Path) -> bool:
    found = path.lstat()
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
