"""The runs of the leaderboard: who takes part, at which learning rates, and a line in a file for every run.

All runs of a problem share initial weights, data, batches and noise by their seed, so that differences between methods are
differences of pairs. What ours gets, rivals get too: the tighter accountant, correlated noise where it helps, the average of
the weights and, on pretrained features, their norm. Beside each rival at its paper's rate stands the same one at the best rate
of a grid, which is extended where its last rate is the best. That rate is chosen by accuracy on the test part, which nobody
can do who trains privately: an oracle.
"""

from __future__ import annotations

import json
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam import PerformanceSettings, PrivacyPlan, PrivacySettings, PrivateStep, methods
from dp_microadam.errors import InputError
from dp_microadam.methods.defaults import with_bands
from research.leaderboard.problems import PROBLEMS, Part, Problem
from research.measuring import machine

DELTA = 1e-5
SEEDS = 5
AVERAGE = 0.99
LONGEST_EXTENSION = 3
DISTANCES = (0.75, 1.5, 3.0)
ALL_DISTANCES_AT = 3.0


@dataclass(frozen=True)
class Entrant:
    """A method: its name for readers, how it is built, and its rates, that of its paper first.

    ``build`` is None for Opacus, which trains by itself. With ``equipped`` it gets what ours gets. ``distances`` says that its
    rates are distances, which need no oracle: all of them run with all seeds at ε = 3, elsewhere the default one does.
    """

    title: str
    build: Callable[..., methods.Method] | None
    rates: tuple[float | None, ...] = (None,)
    distances: bool = False
    equipped: bool = True


DEFAULT, THRESHOLD = "default", "dp-threshold"
ENTRANTS = {
    DEFAULT: Entrant("default", methods.dp_threshold),
    "dp-walk": Entrant("dp-walk", methods.dp_walk, DISTANCES, distances=True),
    "dp-sgd": Entrant("DP-SGD", methods.dp_sgd, (4.0, 0.5, 1.0, 2.0, 8.0)),
    "dp-adam": Entrant("DP-Adam", methods.dp_adam, (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)),
    "dp-adambc": Entrant("DP-AdamBC", methods.dp_adambc, (1e-3, 3e-4, 3e-3, 1e-2)),
    "dp-microadam": Entrant("DP-MicroAdam", methods.dp_microadam, (1e-3, 4e-3, 16e-3)),
    "dp-microadam-alone": Entrant("DP-MicroAdam alone", methods.dp_microadam, (1e-3,), equipped=False),
    "opacus": Entrant("Opacus, Adam", None, equipped=False),
    THRESHOLD: Entrant("dp-threshold", methods.dp_threshold, DISTANCES, distances=True),
}
"""The default is dp-threshold at the problem's distance, which is therefore not run under that name once more."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    problem: str
    epsilon: float
    entrant: str
    rate: float | None
    seed: int


def runs_of(problem: str, epsilon: float, entrant: str, known: dict[Run, float]) -> Iterator[Run]:
    """The runs of an entrant that are not ``known`` yet: its grid with one seed, then all seeds at the first and best rate."""
    rates = ENTRANTS[entrant].rates
    if ENTRANTS[entrant].distances:
        own = PROBLEMS[problem].distance
        distances = [one for one in rates if (one == own or epsilon == ALL_DISTANCES_AT) and (entrant, one) != (THRESHOLD, own)]
        wanted = [Run(problem, epsilon, entrant, rate, seed) for rate in distances for seed in range(1, SEEDS + 1)]
        yield from (run for run in wanted if run not in known)
        return
    grid = [Run(problem, epsilon, entrant, rate, 1) for rate in rates]
    yield from (run for run in grid if run not in known)
    best = best_rate(problem, epsilon, entrant, known)
    while len(tried := _rates_tried(problem, epsilon, entrant, known)) < len(rates) + LONGEST_EXTENSION and len(tried) > 1:
        beyond = {tried[0]: tried[0] ** 2 / tried[1], tried[-1]: tried[-1] ** 2 / tried[-2]}
        if best not in beyond:
            break
        yield Run(problem, epsilon, entrant, float(f"{beyond[best]:.3g}"), 1)
        best = best_rate(problem, epsilon, entrant, known)
    chosen = dict.fromkeys((rates[0], best))
    wanted = [Run(problem, epsilon, entrant, rate, seed) for rate in chosen for seed in range(1, SEEDS + 1)]
    yield from (run for run in wanted if run not in known)


def first_runs(problem: str, epsilon: float, entrant: str, known: dict[Run, float]) -> dict[Run, float]:
    """The known runs of an entrant with the first seed, by which the oracle chooses."""
    return {run: known[run] for run in known if run == Run(problem, epsilon, entrant, run.rate, 1)}


def _rates_tried(problem: str, epsilon: float, entrant: str, known: dict[Run, float]) -> list[float]:
    return sorted(run.rate for run in first_runs(problem, epsilon, entrant, known) if run.rate is not None)


def best_rate(problem: str, epsilon: float, entrant: str, known: dict[Run, float]) -> float | None:
    """The rate with the highest test accuracy of the first seed."""
    runs = first_runs(problem, epsilon, entrant, known)
    return max(runs, key=lambda run: runs[run]).rate


def run_all(
    folder: Path, problems: Sequence[str], entrants: Sequence[str], epsilons: Sequence[float], command: str, minutes: float
) -> None:
    """Run what is missing in ``folder``, problem by problem, until it is complete or the minutes are over."""
    facts = {"command": command, "commit": clean_commit(), "machine": machine()}
    stop = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    for name in problems:
        for epsilon in epsilons or PROBLEMS[name].epsilons:
            for entrant in entrants:
                known = {run: line["accuracy"] for run, line in read(folder).items()}
                for run in runs_of(name, epsilon, entrant, known):
                    if time.monotonic() > stop:
                        return
                    begin = time.monotonic()
                    accuracy, details = trained(run)
                    known[run] = accuracy
                    line = {**vars(run), "accuracy": accuracy, **details, "seconds": round(time.monotonic() - begin, 1)}
                    line |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", **facts}
                    with open(folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    print(f"{run.problem} ε={run.epsilon:g} {run.entrant} {run.rate} #{run.seed}: {accuracy:.2f} %", flush=True)


def read(folder: Path) -> dict[Run, dict[str, Any]]:
    """All lines of results by their run."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in map(json.loads, path.read_text("utf-8").splitlines()):
            found[Run(*(line[name] for name in Run.__dataclass_fields__))] = line
    return found


def clean_commit() -> str:
    """The commit that runs.

    Raises:
        InputError: if the code that is imported has changes that are not committed.
    """
    import dp_microadam

    found = []
    for folder in (Path(str(dp_microadam.__file__)).parent, Path(__file__).parents[1]):
        if _git(folder, "status", "--porcelain", "."):
            raise InputError(f"{folder} has changes that are not committed; commit them, so that results name their code")
        found.append(_git(folder, "rev-parse", "--short=7", "HEAD"))
    if len(set(found)) > 1:
        raise InputError(f"dp_microadam is at commit {found[0]}, research at {found[1]}; they must be of one checkout")
    return found[0]


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def trained(run: Run) -> tuple[float, dict[str, Any]]:
    """Test accuracy in percent after training, and what else is worth a line."""
    problem, entrant = PROBLEMS[run.problem], ENTRANTS[run.entrant]
    torch.manual_seed(run.seed)
    model = problem.network(entrant.equipped)
    train, test = problem.load()
    if entrant.build is None:
        return _by_opacus(model, problem, train, test, run), {}
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    plan = _plan(len(train[1]), problem, run.epsilon)
    if run.entrant == DEFAULT:
        method, plan = methods.default(model, plan)
    else:
        rate = {"distance" if entrant.distances else "lr": run.rate}
        method = entrant.build(model, **rate, average=AVERAGE if entrant.equipped else 0.0)
        plan = with_bands(plan, count) if entrant.equipped else plan
    with TemporaryDirectory() as folder:
        step = PrivateStep(
            model,
            method,
            plan,
            _loss,
            train,
            run_dir=folder,
            privacy=PrivacySettings(seed=run.seed),
            performance=PerformanceSettings(physical_batch_size=problem.batch_size),
        )
        for gradients in step:
            method.update(model, gradients)
        step.close()
    last = _accuracy(model, test)
    details = {"last_weights": last, "parameters": count, "bands": plan.bands, "noise_multiplier": plan.noise_multiplier}
    with method.averaged(model):
        return _accuracy(model, test), details


@cache
def _plan(size: int, problem: Problem, epsilon: float) -> PrivacyPlan:
    return PrivacyPlan.solve(
        dataset_size=size, batch_size=problem.batch_size, delta=DELTA, epsilon=epsilon, steps=problem.steps, bands=1
    )


def _loss(model: nn.Module, batch: Part) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@torch.no_grad()
def _accuracy(model: nn.Module, test: Part) -> float:
    hits = sum(
        int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in zip(*(p.split(500) for p in test), strict=True)
    )
    return 100 * hits / len(test[1])


def _by_opacus(model: nn.Module, problem: Problem, train: Part, test: Part, run: Run) -> float:
    """Opacus as its tutorials have it: Poisson sampling, clipping norm 1, Adam at its default rate, PRV accountant."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    model.train()
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(trains),
        data_loader=DataLoader(TensorDataset(*train), batch_size=problem.batch_size),
        noise_multiplier=_noise_of_opacus(len(train[1]), problem, run.epsilon),
        max_grad_norm=1.0,
    )
    taken = 0
    while taken < problem.steps:
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(private(inputs), labels).backward()
            optimizer.step()
            taken += 1
            if taken == problem.steps:
                break
    model.eval()
    return _accuracy(model, test)


@cache
def _noise_of_opacus(size: int, problem: Problem, epsilon: float) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    return get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=problem.batch_size / size,
        steps=problem.steps,
        accountant="prv",
    )
