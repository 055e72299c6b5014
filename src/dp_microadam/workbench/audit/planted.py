"""Plants faults into real runs: mistakes around the pipeline that lose the guarantee without a sign if nothing stops them.

A fault is caught if the library refuses the run, or if what the run states covers what an observer finds: the ε that its
participations cost, or the least probability of an output that no neighbour can have. ``PLANTED`` was written before the first
run of these plants. The last ones are faults that nothing here can see; they stay in the list as a measure of that.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor, distributed, nn

from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.plan import LEAST_DELTA, PrivacyPlan
from dp_microadam.workbench.audit.canaries import CLIPPING_NORM, memory_folder, train_watched
from dp_microadam.workbench.audit.f_dp import epsilon_of_gaussian

_DIRECTIONS = 8
_COPIES = 20
_LITTLE_NOISE = 0.05
_SLACK = 1.0
"""Of a sum in units of the clipping norm: 16 deviations of the noise in all directions of the models here."""
_LARGEST_SIGNAL = 5.0
"""Clipping norm over noise for which tails are examined: the first step of a run with noise multiplier 0.2."""
_ONES = (1 << 64) - 1
_EXTREME_WORDS = 50
"""How many words in a row, for the same number, are extreme: more than chance gives to anyone."""
_TIMEOUT = 300


class Outcome(NamedTuple):
    """Whether a planted fault was caught, and how, or what an observer saw of it."""

    caught: bool
    how: str


@dataclass(frozen=True)
class Planted:
    """A fault, the run it is planted into, and whether it is ``expected`` to be caught."""

    fault: str
    plant: Callable[[], Outcome]
    expected: bool = True


@dataclass(frozen=True)
class Reaction:
    """What became of a planted fault."""

    fault: str
    expected: bool
    caught: bool
    how: str

    @property
    def violated(self) -> bool:
        """Whether a fault went through that should have been caught."""
        return self.expected and not self.caught

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        return "caught" if self.caught else "VIOLATION: it went through" if self.expected else "not seen, as documented"


def plant_all(planted: Iterable[Planted]) -> list[Reaction]:
    """Plant each fault, by itself. What happens does not depend on chance, but for noise beyond 16 of its deviations."""
    reactions = []
    for one in planted:
        try:
            outcome = one.plant()
        except DPMicroAdamError as error:
            outcome = Outcome(True, f"refused: {error}")
        reactions.append(Reaction(one.fault, one.expected, *outcome))
    return reactions


def different_parameters() -> Outcome:
    """Two ranks, which divide the coordinates among them in the order of names: rank 0 trains {a, p}, rank 1 {p, z}.

    Both examples have no gradient, so that what is published is noise, and a coordinate that is exactly zero has none.
    """
    if not distributed.is_available():
        return Outcome(True, "not tried: this torch is built without torch.distributed, which several ranks need")
    with tempfile.TemporaryDirectory(prefix="dp-microadam-audit-") as folder:
        command = [sys.executable, "-m", "dp_microadam.workbench.audit.planted", folder]
        ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
        try:
            errors = [process.communicate(timeout=_TIMEOUT)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if not (Path(folder) / "0.json").is_file():
            raise RuntimeError(f"the ranks of the audit ended without a result: {errors[0][-500:]}")
        told = json.loads((Path(folder) / "0.json").read_text("utf-8"))
    if told["published"]:
        return Outcome(not told["bare"], f"{told['bare']} of {2 * _DIRECTIONS} coordinates were published without noise")
    return Outcome(True, f"refused: {told['refused']}")


class _Parts(nn.Module):
    """A linear model that is the sum of three, of which each rank trains two."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        for name in "paz":
            self.register_parameter(name, nn.Parameter(torch.zeros(_DIRECTIONS), requires_grad=name in trained))

    def forward(self, inputs: Tensor) -> Tensor:
        return sum((inputs * part).sum(1) for part in self.parameters())  # type: ignore[return-value]


def _train_as_rank(folder: Path, rank: int) -> None:
    """What one of two ranks does; the first writes what came of it."""
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    plan = PrivacyPlan(dataset_size=2, batch_size=2, noise_multiplier=1.0, steps=1, delta=1e-5)
    told: dict[str, Any] = {"published": 0, "bare": 0}

    def observe(gradients: dict[str, Tensor]) -> None:
        told["published"] += 1
        told["bare"] += sum(int((gradient == 0).sum()) for gradient in gradients.values())

    try:
        data = torch.eye(2, _DIRECTIONS), torch.zeros(2)
        train_watched(_Parts(["ap", "pz"][rank]), _weighted, data, plan, folder / "run", observe)
    except DPMicroAdamError as error:
        told["refused"] = str(error)
    write_text_durably(folder / f"{rank}.json", json.dumps(told))


def _weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, weights = batch
    return model(inputs).flatten() * weights


def data_in_another_order() -> Outcome:
    """A run with bands is resumed after every step, and the target always has the number of those who are due.

    Bands count each example once in as many steps. The target is in every step here, which an observer reads off the published
    gradients. As noise begins anew with each session, so many Gaussians of deviation σ/c₀ are what it costs.
    """
    bands = _DIRECTIONS
    plan = PrivacyPlan(bands, 1, 0.2, 2 * bands, 1e-5, "rdp", bands)
    taken: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="dp-microadam-audit-", dir=memory_folder()) as folder:
        run = Path(folder) / "run"
        for session in range(plan.steps):
            before = len(taken)
            train_watched(
                nn.Linear(bands, 1, bias=False),
                _linear,
                torch.eye(bands).roll(session, 0),
                plan,
                run,
                lambda gradients: taken.append(bool(10 * gradients["weight"][0, 0] > 5)),
                resume=session > 0,
                max_steps=session + 1,
            )
            if len(taken) == before:
                break
        stated = read_ledger(run).epsilon()
    spent = epsilon_of_gaussian(float(plan.noise_coefficients[0]) * math.sqrt(sum(taken)) / plan.noise_multiplier, plan.delta)
    how = f"one example took part in {sum(taken)} steps, which cost ε ≥ {spent:.1f}; the run states {stated:.1f}"
    return Outcome(stated >= spent, how)


def _linear(model: nn.Module, batch: Tensor) -> Tensor:
    return 10 * model(batch).flatten()


def bounded_tails() -> Outcome:
    """The generator is given the most extreme bits there are. An output beyond its largest number has one neighbour only.

    A clipping norm that is ``_LARGEST_SIGNAL`` deviations of the noise moves outputs out of reach of the other world with
    probability Φ(signal − largest), which must be below any δ that is accepted.
    """
    largest = 0.0
    for word in (0, _ONES):
        randomness = Randomness.seeded(0)

        def extreme(label: bytes, block: int, count: int, draw: int = 0, word: int = word) -> NDArray[np.uint64]:
            return np.full(count, word if draw < _EXTREME_WORDS else 0, dtype=np.uint64)

        randomness._bits = extreme  # type: ignore[method-assign]
        largest = max(largest, float(randomness.normals("noise", 0, 2, torch.float64).abs().max()))
    beyond = float(ndtr(_LARGEST_SIGNAL - largest))
    return Outcome(beyond <= LEAST_DELTA, f"noise reaches {largest:.2f} deviations; at σ = 0.2, δ is at least {beyond:.1g}")


def _moved(loss: Callable[[nn.Module, Any], Tensor], data: Callable[[bool], tuple[Tensor, ...]]) -> Outcome:
    """One step on ``data`` with the target and with another example in its place, nearly without noise.

    Replacing one example moves the sum of clipped gradients by at most twice the clipping norm.
    """
    sums = []
    for present in (True, False):
        rows = data(present)
        plan = PrivacyPlan(len(rows[0]), len(rows[0]), _LITTLE_NOISE / 10, 1, 1e-5)

        def observe(gradients: dict[str, Tensor], size: int = len(rows[0])) -> None:
            sums.append(gradients["weight"].flatten() * size / CLIPPING_NORM)

        with tempfile.TemporaryDirectory(prefix="dp-microadam-audit-", dir=memory_folder()) as folder:
            train_watched(nn.Linear(rows[0].shape[1], 1, bias=False), loss, rows, plan, Path(folder) / "run", observe)
    distance = float((sums[0] - sums[1]).norm())
    return Outcome(distance <= 2 + _SLACK, f"one example moves the sum by {distance:.1f} times the clipping norm")


def contradicting_rows() -> Outcome:
    """A loss that leaves out rows that occur with another label: the target contradicts all others."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        same = (inputs[:, None] == inputs).all(2)
        contradicted = (same & (labels[:, None] != labels)).any(1)
        return _steep(model, inputs) * (~contradicted)

    def data(present: bool) -> tuple[Tensor, Tensor]:
        inputs = torch.eye(1, _DIRECTIONS).repeat(_COPIES + 1, 1)
        labels = torch.zeros(_COPIES + 1)
        labels[-1] = float(present)
        return inputs, labels

    return _moved(loss, data)


def near_copies(least: float, most: float) -> Callable[[], Outcome]:
    """A loss that leaves out rows whose distance from another is between these: that of the target from all others is."""

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (inputs,) = batch
        apart = torch.cdist(inputs, inputs, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
        return _steep(model, inputs) * (~((least < apart) & (apart < most)).any(1))

    def data(present: bool) -> tuple[Tensor]:
        others = torch.ones(_COPIES, _COPIES) + 0.9 * most * torch.eye(_COPIES)
        return (torch.cat([others, (1.0 if present else 2.0) * torch.ones(1, _COPIES)]),)

    return lambda: _moved(loss, data)


def statistics_of_the_data() -> Outcome:
    """Data divided by its own largest number before training."""

    def data(present: bool) -> tuple[Tensor]:
        inputs = torch.eye(1, _DIRECTIONS).repeat(_COPIES + 1, 1)
        inputs[-1] *= 1e3 if present else 1.0
        return (inputs / inputs.max(),)

    return _moved(lambda model, batch: model(batch[0]).flatten(), data)


def one_person_under_many_numbers() -> Outcome:
    """The target is in the data twenty times, under numbers of their own."""

    def data(present: bool) -> tuple[Tensor]:
        return (torch.eye(2, _DIRECTIONS)[torch.tensor([int(present)] * _COPIES + [0])],)

    return _moved(lambda model, batch: _steep(model, batch[0]), data)


def _steep(model: nn.Module, inputs: Tensor) -> Tensor:
    """A loss whose gradient is far above the clipping norm."""
    return 10 * model(inputs).flatten()


PLANTED = (
    Planted("two ranks train different parameters", different_parameters),
    Planted("a run with bands goes on with its data in another order", data_in_another_order),
    Planted("a loss leaves out rows that occur with another label", contradicting_rows),
    Planted("a loss leaves out rows that nearly equal another", near_copies(0.0, 1e-5)),
    Planted("a loss leaves out rows that equal another up to a tenth", near_copies(-1.0, 0.1)),
    Planted("noise ends early, so that some outputs have one possible neighbour", bounded_tails),
    Planted("a loss leaves out rows a tenth apart, and no closer ones", near_copies(0.05, 0.1), expected=False),
    Planted("data is scaled by its own maximum before training", statistics_of_the_data, expected=False),
    Planted("one person is in the data twenty times", one_person_under_many_numbers, expected=False),
)

if __name__ == "__main__":
    _train_as_rank(Path(sys.argv[1]), int(sys.argv[2]))
