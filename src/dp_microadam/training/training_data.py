"""Training data: sampled, loaded, moved to the model's device, augmented and prepared.

On a CUDA device the next physical batch of a step is read and copied while this one is processed, if reading
it early draws no random numbers in this process: from tensors in memory, or through workers. Other Datasets are read when their
batch is needed, so that their random numbers are those of a run on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, TensorDataset, default_collate

from dp_microadam.clipping.batches import select
from dp_microadam.errors import DPMicroAdamError, PrivacyError
from dp_microadam.sampling.poisson import Chunks, LogicalStep, PoissonSampler, refuse_loader_options
from dp_microadam.sampling.users import Units, WeightedRows
from dp_microadam.training.evaluation import batches, device_of, moved
from dp_microadam.training.given_data import count_examples
from dp_microadam.training.torch_randomness import UnpredictableWorker, forked_torch, seeded_torch, unpredictable_torch
from dp_microadam.training.withheld import READING, TRANSFORMS, MutedLikeItsParent, at_stage, read_at_stage
from dp_microadam.validation import require_integer


@dataclass(frozen=True)
class Loading:
    """How training batches are loaded and transformed before the model.

    ``loader_options`` go to torch's DataLoader when the data is a Dataset: ``collate_fn``, ``pin_memory``,
    ``prefetch_factor``, ``multiprocessing_context`` and so on. ``seed`` is for tests.
    """

    physical_batch_size: int = 256
    prepare: Callable[[Any], Any] | None = None
    augment: Callable[[Any], Any] | None = None
    num_workers: int = 0
    loader_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        require_integer("physical_batch_size", self.physical_batch_size, 1)
        require_integer("num_workers", self.num_workers, 0)
        refuse_loader_options("loader_options", self.loader_options, self.num_workers)

    def transformed(self, batch: Any, model: nn.Module) -> Any:
        """A training batch on the model's device, augmented and prepared."""
        with at_stage(TRANSFORMS):
            batch = moved(batch, model)
            return self.prepared(self.augment(batch) if self.augment else batch)

    @property
    def transforms(self) -> str:
        """The names of the transforms that are set, ``augment`` and ``prepare``; empty if there are none."""
        return " or ".join(name for name in ("augment", "prepare") if getattr(self, name) is not None)

    def prepared(self, batch: Any) -> Any:
        """A batch after ``prepare``, which applies to training and evaluation alike."""
        return self.prepare(batch) if self.prepare else batch

    def stream(self, model: nn.Module, step: int, rank: int) -> AbstractContextManager[None]:
        """The random stream of dropout, augmentation and Datasets during a step."""
        return unpredictable_torch(model) if self.seed is None else seeded_torch(model, self.seed, step, rank)


class PhysicalBatch(NamedTuple):
    """Examples that go through the model at once. Of users, with the weights of their rows, (users, rows per user)."""

    examples: Any
    weights: Tensor | None = None


class TrainingData:
    """The training data of one rank, from which each step draws its sample.

    ``sampler_from(step)`` returns a sampler that begins at that step. ``units`` are the users whose examples these are, if
    users are the unit of privacy.
    """

    def __init__(
        self,
        data: Any,
        sampler_from: Callable[[int], PoissonSampler],
        first_step: int,
        loading: Loading,
        model: nn.Module,
        rank: int,
        units: Units | None = None,
    ) -> None:
        count_examples("train", data)
        self.data = data
        self.units = units
        self._sampler_from = sampler_from
        self._loading = loading
        self._model = model
        self._rank = rank
        self._options = dict(loading.loader_options)
        if loading.num_workers:
            init = MutedLikeItsParent(self._options.get("worker_init_fn"))
            self._options["worker_init_fn"] = UnpredictableWorker(init) if loading.seed is None else init
        self._options.setdefault("collate_fn", default_collate)
        if device_of(model).type == "cuda":
            self._options.setdefault("pin_memory", True)
        self.continue_at(first_step)

    def continue_at(self, step: int) -> None:
        """Continue sampling at step number ``step``."""
        self._first = True
        sampler = self._sampler_from(step)
        self._steps: Iterator[LogicalStep] = sampler.load(self.data, num_workers=self._loading.num_workers, **self._options)

    def sample(self) -> Any:
        """A batch of ``physical_batch_size`` examples before transforms; only its shapes may be used."""
        most = self._sampler_from(0).dataset_size * (1 if self.units is None else self.units.most)
        count = min(self._loading.physical_batch_size, most)
        rows = torch.arange(count) if self.units is None else self.units.some_examples(count)
        with forked_torch(self._model), at_stage(READING):
            if isinstance(self.data, Dataset):
                found = Chunks(self.data, self._options["collate_fn"], alone=count)[rows]
                if isinstance(found, DPMicroAdamError):
                    raise found
                return found
            return next(batches(self.data, count)) if self.units is None else select(self.data, rows)

    @contextmanager
    def step(self, index: int) -> Iterator[Iterator[PhysicalBatch]]:
        """The physical batches of step number ``index``; nothing is drawn or read before.

        Within the block torch's generators use the step's own random stream.
        """
        # The first step makes the loader, which seeds its workers; others draw from the sampler's own randomness alone.
        with self._loading.stream(self._model, index, self._rank) if self._first else nullcontext():
            step = next(self._steps)
        self._first = False
        if step.index != index:
            raise PrivacyError(f"the sampler is at step {step.index}, but the ledger is at step {index}; they must agree")
        with self._loading.stream(self._model, index, self._rank):
            yield map(self._transformed, read_at_stage(READING, self._copied(step.chunks)))

    def _transformed(self, chunk: Any) -> PhysicalBatch:
        if not isinstance(chunk, WeightedRows):
            return PhysicalBatch(self._loading.transformed(chunk, self._model))
        return PhysicalBatch(self._loading.transformed(chunk.rows, self._model), moved(chunk.weights, self._model))

    def _copied(self, chunks: Iterable[Any]) -> Iterable[Any]:
        """The chunks on their way to the device; on the CPU there is none."""
        device = device_of(self._model)
        if device.type != "cuda":
            return chunks
        by_us = isinstance(self.data, TensorDataset) and self._options["collate_fn"] is default_collate
        early = by_us or not isinstance(self.data, Dataset) or self._loading.num_workers > 0
        return copied_ahead(chunks, device) if early else map(pinned, chunks)


def copied_ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device, in their order. When one is given out, the copy of the next has begun.

    Formal guarantees: values and order are those of ``batches``, of which at most one more is read than was given out. Work
    that is started on the device's current stream after a batch is given out sees it complete.
    """
    copies = torch.Stream(device=device)
    waiting: deque[tuple[Any, torch.Event]] = deque()
    try:
        for batch in batches:
            waiting.append(_begin_copy(batch, device, copies))
            if len(waiting) > 1:
                yield _completed(*waiting.popleft(), device)
        while waiting:
            yield _completed(*waiting.popleft(), device)
    finally:
        # After an error: memory that a copy still writes to must not be handed on before.
        for _, copied in waiting:
            torch.accelerator.current_stream(device).wait_event(copied)


def pinned(batch: Any) -> Any:
    """The batch with its tensors on the host in pinned memory, from which copies need not be waited for."""
    return tree_map(lambda leaf: leaf.pin_memory() if _on_host(leaf) else leaf, batch)


def _begin_copy(batch: Any, device: torch.device, copies: torch.Stream) -> tuple[Any, torch.Event]:
    """The batch on the device, where its values are valid after the event."""
    # Memory is taken and given back on the stream that computes, in whose order torch hands it on. So the stream of copies has
    # to wait for what was started there so far, which may still read that memory; what is started later runs beside it.
    computing = torch.accelerator.current_stream(device)
    batch = pinned(batch)
    there = tree_map(lambda leaf: torch.empty_like(leaf, device=device) if _on_host(leaf) else leaf, batch)
    copies.wait_stream(computing)
    with _on(copies, device):
        # torch keeps pinned memory from being used again before the copies of this stream are done.
        tree_map(lambda target, leaf: target.copy_(leaf, non_blocking=True) if _on_host(leaf) else None, there, batch)
    return there, copies.record_event()


def _completed(batch: Any, copied: torch.Event, device: torch.device) -> Any:
    """The batch, for work on the current stream: the stream waits for the copy, the host does not."""
    torch.accelerator.current_stream(device).wait_event(copied)
    return batch


def _on_host(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided


@contextmanager
def _on(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Work within the block is started on this stream."""
    with torch.cuda.device(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
