"""Training data: sampled, loaded, moved to the model's device, augmented and prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from dp_microadam.clipping.batches import select
from dp_microadam.errors import DPMicroAdamError, PrivacyError
from dp_microadam.sampling.poisson import Chunks, LogicalStep, PoissonSampler
from dp_microadam.sampling.users import Units, WeightedRows
from dp_microadam.training.evaluation import batches, device_of, moved
from dp_microadam.training.given_data import count_examples
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings
from dp_microadam.training.torch_randomness import UnpredictableWorker, forked_torch, seeded_torch, unpredictable_torch
from dp_microadam.training.withheld import READING, TRANSFORMS, MutedLikeItsParent, at_stage, read_at_stage


@dataclass(frozen=True)
class Loading:
    """How training batches are loaded and transformed before the model."""

    settings: PrivacySettings
    performance: PerformanceSettings
    prepare: Callable[[Any], Any] | None = None
    augment: Callable[[Any], Any] | None = None

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
        seed = self.settings.seed
        return unpredictable_torch(model) if seed is None else seeded_torch(model, seed, step, rank)


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
        self._options: dict[str, Any] = {"num_workers": loading.performance.num_workers, **loading.performance.loader_options}
        if loading.performance.num_workers:
            init = MutedLikeItsParent(self._options.get("worker_init_fn"))
            self._options["worker_init_fn"] = UnpredictableWorker(init) if loading.settings.seed is None else init
        self._options.setdefault("collate_fn", default_collate)
        if device_of(model).type == "cuda":
            self._options.setdefault("pin_memory", True)
        self.continue_at(first_step)

    def continue_at(self, step: int) -> None:
        """Continue sampling at step number ``step``."""
        self._first = True
        self._steps: Iterator[LogicalStep] = self._sampler_from(step).load(self.data, **self._options)

    def sample(self) -> Any:
        """A batch of ``physical_batch_size`` examples before transforms; only its shapes may be used."""
        most = self._sampler_from(0).dataset_size * (1 if self.units is None else self.units.most)
        count = min(self._loading.performance.physical_batch_size, most)
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
            pinned = map(_pinned, step.chunks) if device_of(self._model).type == "cuda" else step.chunks
            yield map(self._transformed, read_at_stage(READING, pinned))

    def _transformed(self, chunk: Any) -> PhysicalBatch:
        if not isinstance(chunk, WeightedRows):
            return PhysicalBatch(self._loading.transformed(chunk, self._model))
        return PhysicalBatch(self._loading.transformed(chunk.rows, self._model), moved(chunk.weights, self._model))


def _pinned(batch: Any) -> Any:
    """The batch with its tensors on the host in pinned memory, from which copies need not be waited for."""

    def pin(leaf: Any) -> Any:
        on_host = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided
        return leaf.pin_memory() if on_host else leaf

    return tree_map(pin, batch)
