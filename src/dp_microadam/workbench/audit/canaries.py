"""Canary examples for audits, and the privatized gradients that the trainer computes from them.

The model is one linear layer W without bias. Canary (a, b) has the unit vector e_a as input and output b, times a constant, as
loss: its gradient is that constant at the single entry W[b, a], for any weights. So the gradients of different canaries are
orthogonal, each is clipped to exactly the clipping norm, and every step repeats the same experiment.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.data import Dataset

from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, RecordSettings
from dp_microadam.training.trainer import PrivateTrainer

# Far above the clipping norm, so that missing clipping is detected.
GRADIENT_NORM = 10.0
CLIPPING_NORM = 1.0

Batch = tuple[Tensor, Tensor]


def canary_width(directions: int) -> int:
    """Width of the smallest square layer with at least ``directions`` weights."""
    return math.isqrt(directions - 1) + 1


def canary_batch(indices: Tensor, width: int) -> Batch:
    """Inputs and output weights of the canaries ``indices``; canary i is (i div width, i mod width)."""
    return one_hot(indices // width, width).float(), GRADIENT_NORM * one_hot(indices % width, width).float()


class _Places(Dataset[int]):
    """The places of a dataset, each of which may hold a canary."""

    def __init__(self, count: int) -> None:
        self.example_ids = range(count)

    def __len__(self) -> int:
        return len(self.example_ids)

    def __getitem__(self, place: int) -> int:
        return self.example_ids[place]


def canary_loss(model: nn.Module, batch: Batch) -> Tensor:
    """One loss per canary, linear in the weights."""
    inputs, output_weights = batch
    return (model(inputs) * output_weights).sum(1)


def by_canary(gradient: Tensor) -> Tensor:
    """The layer's gradient as a vector whose entry i belongs to canary i; further entries belong to none."""
    return gradient.detach().t().reshape(-1)


def watch_trainer(
    plan: PrivacyPlan,
    present: Tensor,
    observe: Callable[[Tensor], None],
    *,
    directions: int | None = None,
    physical_batch_size: int = 256,
    seed: int | None = None,
) -> None:
    """Train on the canaries that are ``present``, and call ``observe`` with the privatized gradient of each step.

    The gradients are scaled so that a sampled canary contributes 1. A canary that is not present leaves an empty place in the
    dataset: its index may be sampled, but contributes nothing. So the two datasets have the same public size and sample rate,
    and differ exactly by the removal of examples. In a plan of users, each place is a user with twice as many equal canaries
    as may enter a step.

    ``seed`` makes all randomness repeatable; without it the run draws from the operating system's entropy, as private ones do.
    """
    width = canary_width(directions or len(present))
    unit = plan.batch_size / CLIPPING_NORM
    each = 2 * plan.examples_per_user if plan.examples_per_user is not None else 1

    def collate(places: list[int]) -> Batch:
        canaries = torch.tensor(places) // each
        here = present[canaries]
        if plan.unit == "example":
            return canary_batch(canaries[here], width)
        inputs, outputs = canary_batch(canaries, width)
        return inputs, outputs * here.unsqueeze(1)  # users who are not present have rows without a gradient

    with tempfile.TemporaryDirectory(prefix="dp-microadam-audit-", dir=memory_folder()) as folder:
        train_watched(
            nn.Linear(width, width, bias=False),
            canary_loss,
            _Places(each * len(present)),
            plan,
            Path(folder) / "run",
            lambda gradients: observe(by_canary(gradients["weight"]) * unit),
            users=None if plan.unit == "example" else torch.arange(len(present)).repeat_interleave(each),
            privacy=PrivacySettings(max_grad_norm=CLIPPING_NORM, seed=seed),
            performance=PerformanceSettings(physical_batch_size=physical_batch_size, loader_options={"collate_fn": collate}),
        )


def train_watched(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Any,
    plan: PrivacyPlan,
    run_dir: Path,
    observe: Callable[[dict[str, Tensor]], None],
    *,
    users: Any = None,
    resume: bool = False,
    **options: Any,
) -> None:
    """Train with ``PrivateTrainer``, and call ``observe`` with each parameter's privatized gradient in each step.

    Sampler, clipping, noise, ledger and MicroAdam are those of users. The only eye on them is a hook that torch has on every
    optimizer. What ``observe`` keeps it must copy.
    """
    optimizer = MicroAdam(parameter for parameter in model.parameters() if parameter.requires_grad)

    def look(*_: object) -> None:
        observe({name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(look)
    trainer = PrivateTrainer(
        model,
        optimizer,
        # RDP composes any number of steps quickly; the audit compares with a claim of its own.
        replace(plan, accountant="rdp"),
        loss,
        run_dir=run_dir,
        record=RecordSettings(evaluate_every=plan.steps, checkpoint_every=plan.steps, show_progress=False),
        **{"privacy": PrivacySettings(max_grad_norm=CLIPPING_NORM), **options},
    )
    if resume:
        trainer.resume()
    if not trainer.fit(data, users=users).finished:
        raise KeyboardInterrupt


def memory_folder() -> str | None:
    """A folder in memory, if the system has one: otherwise thousands of ledger entries are synced to disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
