"""Settings of a private run, in two types: what its guarantee rests on besides the plan, and what only changes speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dp_microadam.errors import InputError
from dp_microadam.plan.bands import DEFAULT_NOISE_MEMORY_GIB
from dp_microadam.sampling.poisson import refuse_loader_options
from dp_microadam.training.given_data import require_norm
from dp_microadam.validation import explicit, require_integer, require_one_of, require_positive


@dataclass(frozen=True)
class PrivacySettings:
    """What the guarantee of a run rests on besides its plan: clipping, randomness, and what is declared public.

    They are part of the ledger and of the privacy statement, and cannot change when a run is resumed.

    Arguments:
        max_grad_norm: the clipping norm C of each example's gradient.
        clipping: ``"flat"`` clips the whole gradient to C, ``"per-layer"`` each layer's to an equal part of C².
        secure: draw noise and samples from a cryptographic generator, and round what is published.
        seed: for tests only: makes all randomness reproducible, and the run not private.
        public: what the run declares public, in words; part of the privacy statement.
        unit_name: what a unit is called in the statement, such as ``"patient"``. If the plan's unit is the example it says that
            there is one example of each.
        show_private_metrics: also show loss and accuracy of training examples, and the text of errors raised while processing
            them. All of that is outside the guarantee.
        synthetic_batch: made-up examples for the check before the first step, for models that do not accept random ones;
            never private data.
    """

    max_grad_norm: float = 1.0
    clipping: str = "flat"
    secure: bool = False
    seed: int | None = None
    public: tuple[str, ...] = ("normalization constants of the input",)
    unit_name: str = ""
    show_private_metrics: bool = False
    synthetic_batch: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_grad_norm", require_norm(self.max_grad_norm))
        require_one_of("clipping", self.clipping, ("flat", "per-layer"))
        if isinstance(self.public, str):
            raise InputError(f"public is {self.public!r}; it must be a list of such words")
        object.__setattr__(self, "public", tuple(self.public))


@dataclass(frozen=True)
class PerformanceSettings:
    """What changes the time and memory of a run, and nothing about its guarantee.

    Arguments:
        physical_batch_size: examples that go through the model at once. With users, at least the plan's
            ``examples_per_user``.
        num_workers: worker processes that load a Dataset.
        loader_options: further options of torch's DataLoader, for Datasets: ``collate_fn``, ``pin_memory``,
            ``prefetch_factor``. ``collate_fn`` must treat each example independently; only its number of rows is checked.
        strategy: how clipped sums are computed, ``"ghost"``, ``"keep"`` or ``"drop"``; by default each layer takes its
            cheapest.
        autocast: run forward and backward pass in this precision, ``torch.bfloat16``; norms, sums and noise stay float32.
        noise_memory_gib: the largest size of the noise that a plan with bands keeps; a plan that needs more is refused.
    """

    physical_batch_size: int = 256
    num_workers: int = 0
    loader_options: Mapping[str, Any] = field(default_factory=dict)
    strategy: str | None = None
    autocast: torch.dtype | None = None
    noise_memory_gib: float = DEFAULT_NOISE_MEMORY_GIB

    def __post_init__(self) -> None:
        require_integer("physical_batch_size", self.physical_batch_size, 1)
        require_integer("num_workers", self.num_workers, 0)
        refuse_loader_options("loader_options", self.loader_options, self.num_workers)


def settings_of(
    privacy: PrivacySettings | None, performance: PerformanceSettings | None
) -> tuple[PrivacySettings, PerformanceSettings]:
    """Both, with defaults for what is None; each must be of its own type."""
    found = (PrivacySettings() if privacy is None else privacy, PerformanceSettings() if performance is None else performance)
    for name, value, kind in zip(("privacy", "performance"), found, (PrivacySettings, PerformanceSettings), strict=True):
        if not isinstance(value, kind):
            raise InputError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}")
    return found


@dataclass(frozen=True)
class RecordSettings:
    """What a trainer evaluates, writes and shows, and when.

    Arguments:
        evaluate_every, checkpoint_every: in steps; a checkpoint is also written after ``checkpoint_minutes``.
        keep_checkpoints: how many of the newest are kept.
        config: text that is saved in the run's folder as ``config.toml``.
        show_progress: show a progress bar and what happens.
    """

    evaluate_every: int = 100
    checkpoint_every: int = 100
    checkpoint_minutes: float = 5.0
    keep_checkpoints: int = 2
    config: str | None = None
    show_progress: bool = True

    def __post_init__(self) -> None:
        require_integer("evaluate_every", self.evaluate_every, 1)
        require_integer("checkpoint_every", self.checkpoint_every, 1)
        require_positive("checkpoint_minutes", self.checkpoint_minutes)


for _type in (PrivacySettings, PerformanceSettings, RecordSettings):
    _type.__init__ = explicit(where=_type.__name__)(_type.__init__)  # type: ignore[method-assign]
