"""The privacy ledger of a run: a file that records how much privacy has been spent, even if the process crashes.

A step's line is appended *before* anything of the step is drawn, and synced to disk before the step's result is used, so a step
that was recorded and then lost in a crash stays spent. ``record.py`` has the format and reads it; this module writes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dp_microadam.accounting.costs import SubsampledGaussian, least_noise_within
from dp_microadam.accounting.costs import epsilon as epsilon_of
from dp_microadam.durable_files import write_durably
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.ledger.record import (
    FORMAT,
    LEDGER_NAME,
    NO_HEAD,
    OWN_MECHANISMS,
    LedgerRecord,
    RunSettings,
    chained_line,
    ledger_path,
    planned_event,
    read_ledger,
    refuse_other_data,
    spent_together,
    steps_together,
)
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_integer, require_positive

__all__ = [
    "LEDGER_NAME",
    "LedgerRecord",
    "PrivacyLedger",
    "RunSettings",
    "discard_unspent",
    "further_plan",
    "ledger_path",
    "library_versions",
    "read_ledger",
    "spent_together",
    "steps_together",
    "write_past_steps",
]


class PrivacyLedger:
    """The ledger of a run in progress: one process appends to it, any process may read it.

    >>> import tempfile
    >>> plan = PrivacyPlan.solve(dataset_size=1000, batch_size=10, delta=1e-5, noise_multiplier=1.0, steps=100)
    >>> settings = RunSettings(private=True, randomness="operating system's entropy", sensitivity=1.0)
    >>> folder = tempfile.mkdtemp()
    >>> with PrivacyLedger.create(folder, plan, settings) as ledger:
    ...     ledger.record_step()   # before the step's result is used
    0
    >>> with PrivacyLedger.resume(folder, plan, settings, position=1) as ledger:
    ...     ledger.steps, ledger.remaining
    (1, 99)
    >>> with PrivacyLedger.extend(folder, plan, settings) as ledger:   # as many steps again
    ...     ledger.steps, ledger.remaining
    (0, 100)

    Formal guarantees: when :meth:`record_step` returns, the step is on disk; with ``wait=False`` it is in the file, where a
    killed process leaves it, and on disk when :meth:`wait_until_synced` returns. It never records more than the plan's steps;
    of a plan with bands that was resumed, never so many that an example could be in more of them than the plan's ε covers.
    No second process can append to the same file meanwhile. A killed process leaves at worst an incomplete line, which counts
    as a step. If anything else writes to, replaces or removes the file, no further step is recorded. Assumes a file system
    whose fsync and flock work as specified.
    """

    def __init__(self, path: Path, check: Callable[[LedgerRecord], None] = lambda record: None) -> None:
        """Open and lock an existing ledger. Use :meth:`create`, :meth:`resume` or :meth:`extend` instead."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                reason = "is in use by another process; only one process may write it at a time, wait for it or stop it"
            else:
                reason = f"cannot be locked ({error.strerror}); put the run's folder on a file system with locks"
            raise PrivacyError(f"{path} {reason}") from None
        self._closed = False
        self._syncing: Future[None] | None = None
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        _close_in_forked_children(self)
        try:
            self._identity = _identity(path)
            record = read_ledger(path)
            check(record)
            self._head = record.head
            if not path.read_bytes().endswith(b"\n"):  # once an incomplete line is ended, it belongs to the chain
                self._append(b"\n")
                self._head = read_ledger(path).head
        except BaseException:
            self.close()
            raise
        self.plan = record.plan
        self._steps = record.steps
        self._resumed_at = record.resumed_at
        self._opened: str | None = None
        self.begin_session()

    @classmethod
    def create(cls, run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings) -> PrivacyLedger:
        """Create the ledger of a new run in folder ``run``, which is created if it does not exist.

        Raises:
            InputError: if the folder already has a ledger.
        """
        return cls(_write_header(run, plan, settings))

    @classmethod
    def resume(
        cls,
        run: str | os.PathLike[str],
        plan: PrivacyPlan,
        settings: RunSettings,
        *,
        position: int,
        head: str | None = None,
    ) -> PrivacyLedger:
        """Continue the last plan of the ledger in folder ``run`` from a checkpoint after ``position`` of its steps.

        ``head`` is the ledger's :attr:`head` at that moment, if the checkpoint has it. Steps recorded after the checkpoint stay
        spent, so the run may end with fewer updates than planned.

        Raises:
            PrivacyError: if another process has the ledger open, if plan or settings differ from those of the run, or if the
                ledger lacks steps that the checkpoint includes.
        """
        require_integer("position", position, 0)
        path = ledger_path(run)

        def check(record: LedgerRecord) -> None:
            recorded = asdict(record.plan)
            # Unit and bands first: runs of users, or with correlated noise, differ in more, but that is the reason.
            first = {name: recorded[name] for name in ("unit", "bands")}
            _require_same(path, "plan", {**first, **recorded}, asdict(plan))
            _require_same(path, "settings", asdict(record.settings), asdict(settings))
            if record.steps < position:
                raise PrivacyError(
                    f"{path} records {record.steps} steps, but the checkpoint includes {position}: steps are missing from the "
                    "ledger, so what was spent is unknown; restore the complete ledger, or start a new run"
                )
            if head is not None and record.steps_at(head) is None:
                raise PrivacyError(
                    f"{path} never had the hash {head} stored in the checkpoint: it was rolled back, or belongs to another "
                    "copy of the run; restore the ledger that belongs to the checkpoint, or start a new run"
                )

        return cls(path, check)

    @classmethod
    def extend(cls, run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings) -> PrivacyLedger:
        """Begin a further plan in the ledger in folder ``run``, whose steps are numbered from 0; ε is that of all plans.

        Steps that the plan before it had left are given up.

        Raises:
            InputError: if the plan is for other data, another unit of privacy, δ or accountant, or that of a search.
            PrivacyError: if another process has the ledger open, or if the settings differ from those of the run.
        """
        path = ledger_path(run)

        def check(record: LedgerRecord) -> None:
            _require_same(path, "settings", asdict(record.settings), asdict(settings))
            refuse_other_data(record.plan, plan)

        ledger = cls(path, check)
        line, ledger._head = chained_line({"plan": plan.to_dict(), "opened": secrets.token_hex(8)}, ledger._head)
        ledger._append(line)
        ledger.plan, ledger._steps, ledger._resumed_at = plan, 0, ()
        return ledger

    @property
    def steps(self) -> int:
        """Steps of the plan spent so far, including those lost in crashes."""
        return self._steps

    @property
    def resumed_at(self) -> tuple[int, ...]:
        """The steps before which the run was resumed, the next one too if that was now."""
        return self._resumed_at

    @property
    def remaining(self) -> int:
        """Steps that the plan still allows: fewer if it has bands and the run was resumed, so that its ε is never exceeded."""
        return max(0, self.plan.last_step(self._resumed_at) - self._steps)

    def begin_session(self) -> None:
        """The data may come in another order from here on, so that with bands an example may be in another group."""
        if self._opened is None:
            self._opened = secrets.token_hex(8)
            self._resumed_at += (self._steps,) if self._steps else ()

    @property
    def head(self) -> str:
        """The hash of all lines so far; a ledger that contains this hash has all of them."""
        return self._head

    def record_step(self, phase: str | None = None, *, processes: int = 1, wait: bool = True) -> int:
        """Record one more step as spent, and return its number once the record is on disk.

        ``phase`` is the name of the phase the step belongs to, for runs with several phases under one plan. ``processes`` is
        the world size: how many processes take the step together. With ``wait=False`` it returns once the record is written,
        and another thread syncs it, which takes milliseconds on many disks; call :meth:`wait_until_synced` before anything of
        the step leaves the process.

        Raises:
            PrivacyError: if all steps of the plan are spent, or the file cannot be written. The step must not be taken then.
        """
        if self._closed:
            raise PrivacyError(
                f"{self.path} is not open in this process, so no step can be recorded; resume it with PrivacyLedger.resume"
            )
        if self.remaining == 0:
            resumed = f"{self._steps} steps of a run that was resumed {len(self._resumed_at)} times"
            spent = f"all {self.plan.steps} steps of the plan" if self._steps >= self.plan.steps else resumed
            raise PrivacyError(f"{spent} are spent; one more would exceed its epsilon, so stop here or solve a new plan")
        self.wait_until_synced()  # of a step before, which failed
        step = self._steps
        event = self._marked(planned_event(self.plan, step))
        if phase is not None:
            event["phase"] = phase
        if processes > 1:
            event["processes"] = processes
        self._steps += 1  # spent from here on, even if writing fails half-way
        line, head = chained_line(event, self._head)
        try:
            self._refuse_foreign_changes(step)
            self._write(line)
            self._head = head
        except OSError as error:
            raise self._not_taken(step, error) from error
        self._syncing = self._syncer.submit(os.fsync, self._file)
        if wait:
            self.wait_until_synced()
        return step

    def wait_until_synced(self) -> None:
        """Return once the last recorded step is on disk.

        Raises:
            PrivacyError: if it cannot be written there. Its result must not be used then.
        """
        if self._syncing is None:
            return
        try:
            self._syncing.result()
        except OSError as error:
            self._syncing = None
            raise self._not_taken(self._steps - 1, error) from error
        self._syncing = None

    def close(self) -> None:
        """Close and unlock the file. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._syncer.shutdown()  # which waits for a sync that is under way
            os.close(self._file)

    def __enter__(self) -> PrivacyLedger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _not_taken(self, step: int, error: OSError) -> PrivacyError:
        self.close()
        return PrivacyError(
            f"{self.path} cannot be written, so step {step} is not taken: {error}; free disk space, then resume the run"
        )

    def _marked(self, event: dict[str, Any]) -> dict[str, Any]:
        """The content of a step's line. The first line of a session has random bits, so that two copies of a run differ."""
        if self._opened is not None:
            event["opened"], self._opened = self._opened, None
        return event

    def _refuse_foreign_changes(self, step: int) -> None:
        """Refuse to continue if the file was changed by anyone else, for example where locks do not work."""
        try:
            unchanged = _identity(self.path) == self._identity
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            self.close()
            raise PrivacyError(
                f"{self.path} was changed, replaced or removed by something other than this run, so step {step} is not taken; "
                "restore it as it was, then resume the run"
            )

    def _append(self, line: bytes) -> None:
        self._write(line)
        os.fsync(self._file)

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._file, line) :]
        self._identity = _identity(self.path)


def further_plan(record: LedgerRecord, *, steps: int, epsilon: float | None = None) -> PrivacyPlan:
    """A plan of so many steps that continues the last plan of a run on the same data, for :meth:`PrivacyLedger.extend`.

    Its noise multiplier is that of the last plan; with ``epsilon`` the least, as a multiple of ``NOISE_RESOLUTION``, with which
    everything that was spent and this plan together stay within that.

    Raises:
        InputError: for the plan of a search, or if no noise is enough.
    """
    plan = replace(record.plan, steps=steps)
    refuse_other_data(record.plan, plan)
    if epsilon is None:
        return plan
    limit = require_positive("epsilon", epsilon)

    def cost(noise: float) -> float:
        further = replace(plan, noise_multiplier=noise).spent_after(steps)
        return epsilon_of([*record.spent, further], plan.delta, plan.accountant)

    try:
        return replace(plan, noise_multiplier=least_noise_within(limit, cost, plan.noise_multiplier))
    except LookupError:
        raise InputError(
            f"epsilon is {limit:g}, of which the run has spent {record.epsilon():.3g}; it must be larger for {steps} "
            "further steps, however much noise they have"
        ) from None


def discard_unspent(run: str | os.PathLike[str]) -> None:
    """Remove the ledger of a run that never took a step, so that a new run can use its folder.

    Raises:
        PrivacyError: if a process has the ledger open, or a step was recorded.
    """
    with PrivacyLedger(ledger_path(run)) as ledger:
        steps = steps_together([read_ledger(ledger.path)])
        if steps:
            raise PrivacyError(f"{ledger.path} records {steps} steps, which stay spent; use a new folder for a new run")
        ledger.path.unlink()


def write_past_steps(
    run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings, spent: Sequence[SubsampledGaussian]
) -> None:
    """Write a ledger of steps that another library took and recorded; each line has its own sample rate and noise multiplier.

    Raises:
        InputError: if the folder already has a ledger, or the plan allows fewer steps.
    """
    total = sum(part.steps for part in spent)
    if total > plan.steps:
        raise InputError(f"plan allows {plan.steps} steps, but {total} were taken; use a plan with at least as many steps")
    with PrivacyLedger(_write_header(run, plan, settings, mechanisms=OWN_MECHANISMS)) as ledger:
        lines, head = [], ledger.head
        every_step = (part for part in spent for _ in range(part.steps))
        for step, part in enumerate(every_step):
            event = {"step": step, "sample_rate": part.sample_rate, "noise_multiplier": part.noise_multiplier}
            line, head = chained_line(ledger._marked(event), head)
            lines.append(line)
        ledger._append(b"".join(lines))


def _write_header(run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings, **more: str) -> Path:
    folder = Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "format": FORMAT,
        "run": secrets.token_hex(16),
        **more,
        "plan": plan.to_dict(),
        "settings": asdict(settings),
        "versions": library_versions(),
    }
    line, _ = chained_line(header, NO_HEAD)
    try:
        with write_durably(folder / LEDGER_NAME, replace=False) as file:
            file.write(line)
    except FileExistsError:
        raise _second_run(folder) from None
    return folder / LEDGER_NAME


def refuse_second_run(folder: Path) -> None:
    """Raise InputError if the folder has a ledger."""
    if (folder / LEDGER_NAME).exists():
        raise _second_run(folder)


def _second_run(folder: Path) -> InputError:
    return InputError(f"run is {str(folder)!r}, which has a ledger already; resume it, or use a new folder")


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size


def _close_in_forked_children(ledger: PrivacyLedger) -> None:
    """Close the inherited file in forked data-loading workers, which would hold the lock after this process was killed."""
    reference = weakref.ref(ledger)

    def close_inherited() -> None:
        inherited = reference()
        if inherited is not None and not inherited._closed:
            inherited._closed = True
            os.close(inherited._file)  # the thread that syncs is not there

    os.register_at_fork(after_in_child=close_inherited)


def _require_same(path: Path, what: str, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in recorded.items():
        if given[name] != value:
            raise PrivacyError(
                f"{path} began with {what} {name} = {value!r} and cannot continue with {given[name]!r}; give it {value!r} "
                "again, or start a new run"
            )


def library_versions() -> dict[str, str]:
    """The installed versions of the libraries that the guarantee depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("dp-microadam", "torch", "numpy", "scipy", "cryptography"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
