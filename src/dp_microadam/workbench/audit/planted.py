"""Plants mistakes into real runs that would lose the guarantee without a sign, and looks whether something stops them.

A fault is caught if the library refuses the run, or if what the run states covers what an observer finds in what it publishes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor, distributed, multiprocessing, nn

from dp_microadam.accounting.costs import SubsampledGaussian, epsilon
from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.plan import LEAST_DELTA, PrivacyPlan
from dp_microadam.workbench.audit.canaries import CLIPPING_NORM, memory_folder, train_watched

_SIZE = 8
_COPIES = 20
_NOISE = 0.005
_MOST_MOVED = 3.0
"""Replacing an example moves a sum by twice the clipping norm at most; the rest is more than 50 deviations of the noise."""


class Reaction(NamedTuple):
    """What became of a fault, of which it is known whether anything here can see it."""

    fault: str
    expected: bool
    caught: bool
    how: str

    @property
    def violated(self) -> bool:
        """Whether it went through, and should not have."""
        return self.expected and not self.caught


def plant(fault: str) -> Reaction:
    """Plant one of ``PLANTED`` into a run of its own. Chance plays no part, but for noise beyond 50 of its deviations."""
    work, expected = PLANTED[fault]
    try:
        with tempfile.TemporaryDirectory(prefix="dp-microadam-audit-", dir=memory_folder()) as folder:
            return Reaction(fault, expected, *work(Path(folder)))
    except DPMicroAdamError as error:
        return Reaction(fault, expected, True, f"refused: {error}")


def _different_parameters(folder: Path) -> tuple[bool, str]:
    """Two ranks divide the noise among them in the order of names; rank 0 trains {a, p}, rank 1 {p, z}.

    The examples have no gradient: what is published is noise, and a coordinate that is exactly zero has none.
    """
    if not distributed.is_available():
        return True, "not tried: this torch has no torch.distributed, without which there are no ranks"
    multiprocessing.start_processes(_train_as_rank, (folder,), nprocs=2, start_method="spawn")
    found = (folder / "found").read_text("utf-8")
    return not found.startswith("without"), found


def _train_as_rank(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    model = nn.ParameterDict([(name, nn.Parameter(torch.zeros(_SIZE))) for name in "paz"])
    model["za"[rank]].requires_grad_(False)
    found: list[str] = []

    def observe(gradients: dict[str, Tensor]) -> None:
        bare = sum(int((gradient == 0).sum()) for gradient in gradients.values())
        found.append(f"without noise: {bare} of {2 * _SIZE} coordinates" if bare else "every coordinate has noise")

    try:
        plan = PrivacyPlan(dataset_size=2, batch_size=2, noise_multiplier=1.0, steps=1, delta=1e-5)
        train_watched(model, _no_gradient, torch.zeros(2, _SIZE), plan, folder / "run", observe)
    except DPMicroAdamError as error:
        found.append(f"refused: {error}")  # too late, if anything was published before
    if rank == 0:
        write_text_durably(folder / "found", found[0])
    os._exit(0)  # threads of gloo that wait for a rank that is gone would abort an orderly end


def _no_gradient(model: nn.Module, batch: Tensor) -> Tensor:
    return sum((batch * part).sum(1) for part in model.parameters())  # type: ignore[return-value]


def _another_order(folder: Path) -> tuple[bool, str]:
    """A run with bands is resumed after every step, with the target in the place of those who are due."""
    plan = PrivacyPlan(_SIZE, 1, 0.2, 2 * _SIZE, 1e-5, "rdp", bands=_SIZE)
    taken: list[bool] = []
    for session in range(plan.steps):
        before = len(taken)
        train_watched(
            nn.Linear(_SIZE, 1, bias=False),
            lambda model, batch: 10 * model(batch).flatten(),
            torch.eye(_SIZE).roll(session, 0),
            plan,
            folder / "run",
            lambda gradients: taken.append(bool(gradients["weight"][0, 0] > 0.5)),
            resume=session > 0,
            max_steps=session + 1,
        )
        if len(taken) == before:
            break
    stated = read_ledger(folder / "run").epsilon()
    # Noise begins anew with each session: so many Gaussians, of deviation σ over the first coefficient.
    one = SubsampledGaussian(1.0, plan.noise_multiplier / float(plan.noise_coefficients[0]), sum(taken))
    spent = epsilon([one], plan.delta, "pld")
    return (
        stated >= spent,
        f"an example took part in {sum(taken)} steps, which cost ε = {spent:.1f}; the run states {stated:.1f}",
    )


def _noise_ends(_: Path) -> tuple[bool, str]:
    """The most extreme bits there are. An output beyond the largest number has one possible neighbour."""
    largest = 0.0
    for word in (0, (1 << 64) - 1):
        randomness = Randomness.seeded(0)

        def extreme(label: bytes, block: int, count: int, draw: int = 0, word: int = word) -> NDArray[np.uint64]:
            return np.full(count, word if draw < 50 else 0, dtype=np.uint64)  # more in a row than chance gives to anyone

        randomness._bits = extreme  # type: ignore[method-assign]
        largest = max(largest, float(randomness.normals("noise", 0, 2, torch.float64).abs().max()))
    beyond = float(ndtr(5.0 - largest))
    return beyond <= LEAST_DELTA, f"noise reaches {largest:.2f} deviations; at σ = 0.2, δ is at least {beyond:.1g}"


def _moved(loss: Any, data: Callable[[float], tuple[Tensor, ...]], folder: Path) -> tuple[bool, str]:
    """One step, nearly without noise, on ``data`` with the target, and with another example in its place."""
    sums: list[Tensor] = []
    for present in (1.0, 0.0):
        rows = data(present)
        count, width = rows[0].shape

        def observe(gradients: dict[str, Tensor], count: int = count) -> None:
            sums.append(gradients["weight"] * count / CLIPPING_NORM)

        train_watched(
            nn.Linear(width, 1, bias=False),
            loss,
            rows,
            PrivacyPlan(count, count, _NOISE, 1, 1e-5),
            folder / str(present),
            observe,
        )
    distance = float((sums[0] - sums[1]).norm())
    return distance <= _MOST_MOVED, f"one example moves the sum by {distance:.1f} times the clipping norm"


def _steep(model: nn.Module, inputs: Tensor) -> Tensor:
    return 10 * model(inputs).flatten()


def _without_contradicted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    same = (inputs[:, None] == inputs).all(2)
    return _steep(model, inputs) * ~(same & (labels[:, None] != labels)).any(1)


def _contradicting(present: float) -> tuple[Tensor, Tensor]:
    """The target contradicts all others."""
    return torch.eye(1, _SIZE).repeat(_COPIES + 1, 1), torch.tensor([0.0] * _COPIES + [present])


def _similar(least: float, most: float) -> Callable[[Path], tuple[bool, str]]:
    """A loss that leaves out rows whose distance from another is between these: that of the target from all others is."""

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (inputs,) = batch
        apart = torch.cdist(inputs, inputs, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
        return _steep(model, inputs) * ~((least < apart) & (apart < most)).any(1)

    def data(present: float) -> tuple[Tensor]:
        others = torch.ones(_COPIES, _COPIES) + 0.9 * most * torch.eye(_COPIES)
        return (torch.cat([others, torch.full((1, _COPIES), 2 - present)]),)

    return partial(_moved, loss, data)


def _scaled(present: float) -> tuple[Tensor]:
    inputs = torch.eye(1, _SIZE).repeat(_COPIES + 1, 1)
    inputs[-1] *= 1e3**present
    return (inputs / inputs.max(),)


def _many_times(present: float) -> tuple[Tensor]:
    return (torch.eye(2, _SIZE)[[int(present)] * _COPIES + [0]],)


PLANTED: dict[str, tuple[Callable[[Path], tuple[bool, str]], bool]] = {
    "two ranks train different parameters": (_different_parameters, True),
    "a run with bands goes on with its data in another order": (_another_order, True),
    "a loss leaves out rows that occur with another label": (partial(_moved, _without_contradicted, _contradicting), True),
    "a loss leaves out rows that nearly equal another": (_similar(0.0, 1e-5), True),
    "noise ends early, so that some outputs have one possible neighbour": (_noise_ends, True),
    "a loss leaves out rows a tenth apart, and no closer ones": (_similar(0.05, 0.1), False),
    "data is divided by its own maximum before training": (
        partial(_moved, lambda model, batch: model(batch[0]).flatten(), _scaled),
        False,
    ),
    "one person is in the data twenty times": (
        partial(_moved, lambda model, batch: _steep(model, batch[0]), _many_times),
        False,
    ),
}
"""Faults, how they are planted, and whether anything here can see them; the last ones stay as a measure of what cannot be."""
