"""Runs ``PrivateTrainer`` and records the privatized gradients that its optimizer receives, and the run's privacy statement."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.training.run_folder import privacy_of
from dp_microadam.training.trainer import PrivateTrainer


@dataclass(frozen=True)
class Stated:
    """Steps that the optimizer of a run took, and what the run states about them."""

    updates: int
    steps_recorded: int
    epsilon: float


def published_steps(
    model: nn.Module,
    per_example_loss: Callable[[nn.Module, Any], Tensor],
    data: tuple[Tensor, ...],
    plan: PrivacyPlan,
    observe: Callable[[dict[str, Tensor]], None],
    *,
    max_grad_norm: float,
    physical_batch_size: int = 256,
    users: Any = None,
) -> Stated:
    """Train with ``plan`` as users do, and call ``observe`` with each parameter's privatized gradient in each step.

    Sampler, clipping, noise, ledger and MicroAdam are real, and draw from the operating system's entropy. The only eye on them
    is a hook that torch has on every optimizer. What ``observe`` keeps it must copy.
    """
    optimizer = MicroAdam(model.parameters())
    updates = 0

    def look(*_: object) -> None:
        nonlocal updates
        updates += 1
        observe({name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(look)
    with tempfile.TemporaryDirectory(prefix="dp-microadam-audit-", dir=memory_folder()) as folder:
        run = Path(folder) / "run"
        trainer = PrivateTrainer(
            model,
            optimizer,
            plan,
            per_example_loss,
            max_grad_norm=max_grad_norm,
            physical_batch_size=physical_batch_size,
            evaluate_every=plan.steps,
            checkpoint_every=plan.steps,
            run_dir=run,
            show_progress=False,
        )
        if not trainer.fit(data, users=users).finished:
            raise KeyboardInterrupt
        return Stated(updates, read_ledger(run).steps, privacy_of(run)["epsilon"])


def memory_folder() -> str | None:
    """A folder in memory, if the system has one: otherwise thousands of ledger entries are synced to disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
