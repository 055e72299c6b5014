"""Private search for hyperparameters: a random number of private runs, of which only the best is published.

Papernot and Steinke 2022, "Hyperparameter tuning with Rényi differential privacy". ``accounting/selection.py`` has the theorem.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dp_microadam.durable_files import sync_folder, write_durably, write_text_durably
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.ledger.ledger import LEDGER_NAME, NO_HEAD, chained_line, planned_event, read_ledger, read_object
from dp_microadam.ledger.statement import statement_in_words, write_privacy_report
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.progress import Interruptible, clock, tell
from dp_microadam.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    DECLARATION,
    LOG,
    METRICS,
    SELECTION,
    STATISTICS,
    never_trained,
    privacy_of,
    read_metrics,
    refuse_existing,
    search_folder,
)
from dp_microadam.training.trainer import PrivateTrainer
from dp_microadam.training.withheld import muted
from dp_microadam.validation import public

_STATE, _STATE_BYTES = "state", 4096
_PUBLISHED = "published"
_PLACES = {"a": "b", "b": "a"}
_TELL_SECONDS = 15.0

Settings = dict[str, Any]


@dataclass(frozen=True)
class SearchResult:
    """The result of ``PrivateSearch.fit``: the folder of the published run, its hyperparameters and its metrics.

    If the search was interrupted, ``finished`` is False, nothing is published, and the rest is empty.
    """

    run_dir: Path
    finished: bool
    settings: dict[str, Any]
    metrics: dict[str, float]
    epsilon: float
    delta: float


@public
class PrivateSearch:
    """Private selection of hyperparameters: trains a random number of private runs and publishes only the best.

        plan = SelectionPlan.solve(dataset_size=5_000, batch_size=256, delta=1e-5, epsilon=8, steps=200, expected_runs=10)

        def make_trainer(settings, run_dir):
            model = make_model()
            optimizer = MicroAdam(model.parameters(), lr=settings["lr"])
            return PrivateTrainer(model, optimizer, plan, loss, max_grad_norm=settings["norm"], run_dir=run_dir)

        values = {"lr": [3e-4, 1e-3, 3e-3], "norm": [0.3, 1.0]}
        result = PrivateSearch(plan, values, make_trainer, score="validation_loss", run_dir="runs/best").fit(train, validation)

    Each run draws its hyperparameters uniformly from ``values``, independently of all others. While the search runs, its state
    and at most two runs are in the folder ``run_dir`` + ``.unpublished``, which only its owner may read. In the end ``run_dir``
    has the files of the best run, and that folder is removed. A search that was interrupted or killed goes on where it was when
    ``fit`` is called again with the same declaration, with the number of runs that was drawn when it began; the run it was in
    begins again if the plan has bands.

    Arguments:
        plan: the plan of each run, whose ε covers the selection; :meth:`SelectionPlan.solve` gives it.
        values: for each hyperparameter, the list to draw from. Public, like the plan: choose it without looking at the data.
        make_trainer: ``f(settings, run_dir)`` returns a new trainer for these hyperparameters, with ``plan`` and ``run_dir``.
        score: the name of the validation metric that decides. Names that end in "loss" are minimised, others maximised.
        run_dir: the folder to publish to; a new one under ``runs/`` by default, whose name does not tell when it began.
        config: text that is kept until the search ends; ``dp-microadam resume`` goes on with a search from its recipe.
        show_progress: tell every few seconds how long the search has been running. Neither the number of runs nor the time left
            is told: with either, the published run would be worth more than its ε says.

    Formal guarantees: what ``run_dir`` contains in the end is (ε, δ)-differentially private in the training data, under adding
    or removing one unit of the plan, with its ε; also if the search was interrupted at moments that do not depend on the data.
    Excepted are how long the search takes, which suggests the number of runs, and the folder ``.unpublished`` while it exists,
    with everything that a file system keeps of it. Assumes the guarantees of :class:`PrivateTrainer` for each run; that
    validation data, on which the choice and the published metrics depend, is not part of the training data; and that
    ``make_trainer`` does not depend on the training data, and shows nothing of its runs.

    Searches that look at earlier scores to propose what to try next (Bayesian optimisation, Optuna's samplers and pruners) are
    not covered by the theorem, which needs independent runs. There is no callback for them.
    """

    def __init__(
        self,
        plan: SelectionPlan,
        values: Mapping[str, Sequence[Any]],
        make_trainer: Callable[[dict[str, Any], Path], PrivateTrainer],
        *,
        score: str = "validation_accuracy",
        run_dir: str | Path | None = None,
        config: str | None = None,
        show_progress: bool = True,
    ) -> None:
        if not isinstance(plan, SelectionPlan):
            raise InputError(f"plan is a {type(plan).__name__}; a search needs a SelectionPlan, as SelectionPlan.solve gives")
        self.plan = plan
        self.values = _checked(values)
        self.score = score
        self.run_dir = default_search_folder("search") if run_dir is None else Path(run_dir)
        self.show_progress = show_progress
        self._make_trainer = make_trainer
        self._config = config

    @property
    def finished(self) -> bool:
        """Whether the best run was published."""
        return (self.run_dir / SELECTION).is_file()

    def fit(self, train: Any, validation: Any, *, users: Any = None, validation_users: Any = None) -> SearchResult:
        """Search until the best run is published, or Ctrl-C is pressed; goes on with a search that was stopped.

        All arguments are those of :meth:`PrivateTrainer.fit`, which every run is given. Raises InputError if ``run_dir`` holds
        something else, or the search in it was declared otherwise.
        """
        if validation is None:
            raise InputError("validation is None; the runs of a search are compared on validation data, pass some")

        def train_one(trainer: PrivateTrainer) -> bool:
            return trainer.fit(train, validation, users=users, validation_users=validation_users).finished

        if not self.finished and not self._search(train_one):
            return SearchResult(self.run_dir, False, {}, {}, self.plan.epsilon, self.plan.delta)
        _remove(self._working)
        return self.result()

    def result(self) -> SearchResult:
        """The published run; InputError if the search is not finished."""
        if not self.finished:
            raise InputError(f"the search in {str(self.run_dir)!r} is not finished; call fit")
        declared = json.loads((self.run_dir / SELECTION).read_text(encoding="utf-8"))
        chosen = declared.pop("chosen")
        if declared != json.loads(json.dumps(self._declared())):
            raise InputError(f"run_dir is {str(self.run_dir)!r}, where another search has published; use a new folder")
        measured = [line for line in read_metrics(self.run_dir) if self.score in line]
        metrics = {name: value for name, value in measured[-1].items() if "validation_" in name}
        return SearchResult(self.run_dir, True, chosen, metrics, read_ledger(self.run_dir).epsilon(), self.plan.delta)

    @property
    def _working(self) -> Path:
        return search_folder(self.run_dir)

    def _search(self, train_one: Callable[[PrivateTrainer], bool]) -> bool:
        """Take the runs that are left, then publish; False if interrupted."""
        self._declare()
        with SearchState(self._working) as state, _telling(self.show_progress), Interruptible() as interruption:
            if not state.begun:
                # Written before the first run begins: from here on the number is fixed, whatever happens to this process.
                state.write(remaining=self.plan.repetitions.draw(), place="a", choice=None, best=None, best_choice=None)
            while state["remaining"]:
                if interruption.requested or not self._one_run(state, train_one):
                    return False
            _remove(self._working / _PUBLISHED)  # a killed process may have left it incomplete
            write_published(
                self._working / _PLACES[state["place"]],
                self._working / _PUBLISHED,
                {**self._declared(), "chosen": self._settings(state["best_choice"])},
            )
            (self._working / _PUBLISHED).rename(self.run_dir)
            sync_folder(self.run_dir.parent)
        return True

    def _one_run(self, state: SearchState, train_one: Callable[[PrivateTrainer], bool]) -> bool:
        """Begin or continue a run; if it completes, keep the better of it and the best so far. False if interrupted."""
        folder = self._working / state["place"]
        if state["choice"] is None:
            _remove(folder)  # of a run that lost, if the process was killed before removing it
            state.write(choice=[secrets.randbelow(len(listed)) for listed in self.values.values()])
        elif self.plan.bands > 1:
            _remove(folder)  # ε counts the sessions of such a run, and what is published tells of none: it begins again
        with muted():  # a warning or a message per run would count them
            trainer = self._trainer(self._settings(state["choice"]), folder)
            if any(folder.glob("*")) and not never_trained(folder):
                trainer.resume()
            if not train_one(trainer):
                return False
        score = self._score_of(folder)
        place, choice = state["place"], state["choice"]
        # Runs with equal scores are ordered by age, which is as good as by chance.
        better = state["best"] is None or score > state["best"]
        found = {"place": _PLACES[place], "best": score, "best_choice": choice} if better else {}
        state.write(remaining=state["remaining"] - 1, choice=None, **found)
        _remove(self._working / state["place"])
        return True

    def _trainer(self, settings: Settings, folder: Path) -> PrivateTrainer:
        trainer = self._make_trainer(settings, folder)
        if trainer.plan != self.plan:
            raise PrivacyError("make_trainer returned a trainer with another plan than that of the search; pass it on as it is")
        if trainer.record.path != folder:
            raise InputError(
                f"make_trainer returned a trainer with run_dir {str(trainer.record.path)!r}; it must be the one it was given"
            )
        if trainer.stamp != "private":
            raise InputError("make_trainer returned a trainer that is not private; leave out the seed, and give a PrivacyPlan")
        if trainer.ranks.world_size > 1:
            raise InputError(f"the search was started in {trainer.ranks.world_size} processes; it must be one")
        if trainer.callbacks or trainer.step.settings.show_private_metrics:
            raise InputError(
                "make_trainer returned a trainer with callbacks or private metrics, which would tell of runs that lost; leave "
                "them out"
            )
        if self.score not in trainer.validation.names:
            raise InputError(f"score is {self.score!r}; it must be one of {', '.join(map(repr, trainer.validation.names))}")
        trainer.shown = False  # a bar per run would count them
        return trainer

    def _score_of(self, folder: Path) -> float:
        """The last recorded value of the score, larger is better; the least of all for a run that ended in NaN."""
        value = float([line[self.score] for line in read_metrics(folder) if self.score in line][-1])
        value = -value if self.score.endswith("loss") else value
        return -math.inf if math.isnan(value) else value

    def _settings(self, choice: Sequence[int]) -> Settings:
        return {name: listed[index] for (name, listed), index in zip(self.values.items(), choice, strict=True)}

    def _declared(self) -> dict[str, Any]:
        """What the search declares in public."""
        return {"plan": self.plan.to_dict(), "values": self.values, "score": self.score}

    def _declare(self) -> None:
        """Create the folder of a new search, or check that the one that is there was declared in the same way."""
        path = self._working / DECLARATION
        mine = json.dumps({**self._declared(), "config": self._config}, indent=2, ensure_ascii=False) + "\n"
        if not path.exists():
            refuse_existing(self.run_dir)
            self._working.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._working.chmod(0o700)
            write_text_durably(path, mine)
            sync_folder(self._working.parent)
        elif path.read_text(encoding="utf-8") != mine:
            raise InputError(
                f"the search in {str(self._working)!r} was declared with another plan, other values or another score; go on "
                "with the same ones, or remove that folder to give the search up"
            )


def default_search_folder(name: str) -> Path:
    """A new folder under ``runs/``; its name does not tell when the search began, because its duration is private."""
    return Path("runs") / f"{name}-{secrets.token_hex(4)}"


class SearchState:
    """Values in a folder that survive a killed process: the state of a search, which one process at a time may go on with.

    Formal guarantees: when :meth:`write` returns, the values are on disk; after a crash they are those of the last write or of
    the one before. The file's size, and how often it was written, do not show in it. A copy of the folder, from which a second
    process could go on, is refused. Assumes a file system whose fsync and flock work as specified.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _STATE
        self._lock: int | None = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._lock)
        self._folder = [found.st_dev, found.st_ino]
        itself = weakref.ref(self)
        # Data-loading workers would hold the lock after this process was killed.
        os.register_at_fork(after_in_child=lambda: state.close() if (state := itself()) is not None else None)
        try:
            self._values = self._read_locked(folder)
        except BaseException:
            self.close()
            raise

    def _read_locked(self, folder: Path) -> Settings:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrivacyError(
                f"{folder} is in use by another process; only one may go on with a search, wait for it or stop it"
            ) from None
        except OSError as error:
            raise PrivacyError(
                f"{folder} cannot be locked ({error.strerror}); put the folder on a file system with locks"
            ) from None
        values: Settings = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        if values.get("folder", self._folder) != self._folder:
            raise PrivacyError(
                f"{folder} is a copy: two searches that go on from one beginning are not covered by its epsilon; continue "
                "the original, or begin a new search in a new folder"
            )
        return values

    @property
    def begun(self) -> bool:
        """Whether values were ever written completely."""
        return bool(self._values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def write(self, **values: Any) -> None:
        """Change these values; the others stay as they are."""
        self._values = {**self._values, **values, "folder": self._folder}
        text = json.dumps(self._values).encode()
        if len(text) > _STATE_BYTES:
            raise InputError(f"the state takes {len(text)} bytes, more than {_STATE_BYTES}; choose among fewer settings")
        with write_durably(self._path) as file:
            file.write(text.ljust(_STATE_BYTES))

    def __enter__(self) -> SearchState:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close and unlock the folder. Closing twice is allowed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove(path: Path) -> None:
    """Remove a folder or file, if there is one. What a file system keeps of it, it keeps."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_OF_THE_PROCESS = ("peak_memory_bytes", "peak_memory_of")
"""Statistics that all runs of a process have a part in."""

_METRICS = ("step", "epsilon", "learning_rate")
"""What is published of a line of metrics beside those of validation data; the pace would tell the first run of a process."""

_COPIED = ("phase", "processes")


def write_published(run: Path, target: Path, selection: Mapping[str, Any]) -> None:
    """Write the files of the selected ``run`` into the new folder ``target``.

    Formal guarantees: what is written is a function of this run alone and of ``selection``, which is public. Left out are all
    times, traces of interruptions, earlier checkpoints, and figures that depend on the process it shared with other runs.
    All files are new, so that the times that a file system keeps are those of the publication.
    """
    target.mkdir(mode=0o755)
    head = _copy_ledger(run, target)
    position, content, _ = CheckpointFolder(run / CHECKPOINTS).newest()
    CheckpointFolder(target / CHECKPOINTS).write(position, {**content, "ledger_head": head})
    if (run / CONFIG).is_file():
        write_text_durably(target / CONFIG, (run / CONFIG).read_text(encoding="utf-8"))
    lines = [
        {name: value for name, value in line.items() if name in _METRICS or "validation_" in name} for line in read_metrics(run)
    ]
    write_text_durably(target / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    statistics = json.loads((run / STATISTICS).read_text(encoding="utf-8"))
    _write_json(target / STATISTICS, {name: value for name, value in statistics.items() if name not in _OF_THE_PROCESS})
    _write_json(target / SELECTION, selection)
    report = privacy_of(target)
    write_privacy_report(target, report, statement_in_words(report))
    stamp = "private" if report["private"] else "not private"
    write_text_durably(target / LOG, f"published as the best of a random number of runs; this run is {stamp}\n")
    sync_folder(target)


def _copy_ledger(run: Path, target: Path) -> str:
    """Copy the ledger with a new chain of hashes and without the marks of processes that opened it; returns its last hash."""
    record = read_ledger(run)
    first, *lines = (run / LEDGER_NAME).read_bytes().split(b"\n")
    events = {values["step"]: values for line in lines if line and (values := read_object(line)) is not None}
    header = read_object(first) or {}
    line, head = chained_line({name: value for name, value in header.items() if name != "chain"}, NO_HEAD)
    with write_durably(target / LEDGER_NAME, replace=False) as file:
        file.write(line)
        for step in range(record.steps):
            event = planned_event(record.plan, step)
            event |= {name: value for name, value in events.get(step, {}).items() if name in _COPIED}
            line, head = chained_line(event, head)
            file.write(line)
    return head


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text_durably(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _checked(values: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    if not isinstance(values, Mapping) or not values:
        raise InputError(f"values is {values!r}; it must hold at least one list to choose from, by name")
    for name, listed in values.items():
        if isinstance(listed, str) or not isinstance(listed, Sequence) or not listed:
            raise InputError(f"values[{name!r}] is {listed!r}; it must be a list with at least one value")
        for value in listed:
            if not isinstance(value, bool | int | float | str):
                raise InputError(f"values[{name!r}] holds {value!r}; it must hold numbers, strings, True or False")
    return {name: list(listed) for name, listed in values.items()}


@contextmanager
def _telling(shown: bool) -> Iterator[None]:
    """Tell how long the search has been running, by a clock of its own: the rhythm of the runs must not show."""
    if not shown:
        yield
        return
    begin, ended = time.monotonic(), threading.Event()

    def speak() -> None:
        while not ended.wait(_TELL_SECONDS):
            tell(f"searching · {clock(time.monotonic() - begin)} elapsed")

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
