"""The privacy ledger of a run: a file that records how much privacy has been spent, even if the process crashes.

A ledger has one JSON object per line: first the plan and the settings of the run, then one line per step. A further plan on the
same data is a line, too, and the steps after it are its own. A step's line is appended *before* anything of the step is drawn,
and synced to disk before the step's result is used. ε is computed from these lines and from nothing else.

The last entry of a line, ``"chain"``, is a hash of the previous line's hash and of the rest of the line, and so covers the
whole ledger up to there: a line that was edited, removed, moved or repeated breaks the chain at the next one. The hash has no
key: someone who deliberately forges a ledger can recompute all hashes, which only a hash that was published earlier reveals.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from dp_microadam.accounting.costs import PrivacyCost, SubsampledGaussian, epsilon
from dp_microadam.accounting.one_step import Cap
from dp_microadam.accounting.selection import SelectedRun
from dp_microadam.durable_files import write_durably
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.validation import require_integer, require_positive

LEDGER_NAME = "ledger.jsonl"
RUN_INSIDE = "privacy"
"""The folder of a run inside an output folder of another library's."""

NO_HEAD = ""
"""The hash before the first line."""

FORMAT = 1
_OWN_MECHANISMS = "each line has its own"
_HEAD = re.compile(r"[0-9a-f]{32}")

_SAME_IN_ALL_PLANS = ("dataset_size", "delta", "accountant", "examples_per_user")
"""Fields in which a further plan is the one before it: the data, and what ε is computed for."""

Folder = str | os.PathLike[str]
Mechanism = tuple[float, float]
"""Sample rate and noise multiplier of a step."""


@dataclass(frozen=True)
class RunSettings:
    """What a run declares besides its plan, as recorded in the ledger and in the privacy statement.

    ``unit_name`` is what a unit is called in the statement, such as patient; empty: example or user. ``public`` lists what the
    run uses without protection, besides the fields of the plan.
    """

    private: bool
    randomness: str
    sensitivity: float
    clipping: str = "the gradient of each example, all trainable parameters together, in L2 norm"
    unit_name: str = ""
    public: tuple[str, ...] = ("normalization constants of the input", "clipping norm")

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", float(require_positive("sensitivity", self.sensitivity)))
        object.__setattr__(self, "public", tuple(self.public))


class RecordedStep(NamedTuple):
    """A step: the hash up to and including it, that of the first step of its session, its number and its mechanism."""

    link: str
    session: str
    number: int
    mechanism: Mechanism


@dataclass
class RecordedPlan:
    """A plan of a ledger, the hash of the line it begins with, and the steps that were recorded under it.

    ``phases`` counts the steps of each phase, for runs that have phases, ``processes`` those that more than one process took
    together, by world size.
    """

    plan: PrivacyPlan
    begins_with: str
    steps: list[RecordedStep] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    processes: Counter[int] = field(default_factory=Counter)

    def add_step(self, link: str, mechanism: Mechanism, *, opened: bool) -> None:
        """Add a step, which may have ``opened`` a session."""
        session = link if opened or not self.steps else self.steps[-1].session
        self.steps.append(RecordedStep(link, session, len(self.steps), mechanism))


@dataclass(frozen=True)
class LedgerRecord:
    """The contents of a ledger at the time it was read; reading takes no lock.

    Of all ``plans`` of the run :attr:`plan`, :attr:`steps`, :attr:`resumed_at`, :attr:`phases` and :attr:`processes` describe
    the last. ``run`` is a random 128-bit identifier, the same in all copies of the run's folder. ``head`` is the hash of all
    complete lines: if it is published, anyone can check later that none of them is missing. An incomplete line at the end is of
    a step whose result was never used.
    """

    settings: RunSettings
    versions: Mapping[str, str]
    run: str
    head: str
    plans: tuple[RecordedPlan, ...] = field(repr=False)

    @property
    def plan(self) -> PrivacyPlan:
        return self.plans[-1].plan

    @property
    def steps(self) -> int:
        """The steps of the last plan, those whose lines a crash left incomplete too."""
        return len(self.plans[-1].steps)

    @property
    def resumed_at(self) -> tuple[int, ...]:
        """The steps before which another session began; a line that cannot be read may have begun one, and counts as one."""
        return tuple(step.number for step in self.plans[-1].steps if step.number and step.link == step.session)

    @property
    def phases(self) -> Mapping[str, int]:
        return dict(self.plans[-1].phases)

    @property
    def processes(self) -> Mapping[int, int]:
        return dict(self.plans[-1].processes)

    @property
    def links(self) -> list[str]:
        """The hash up to and including each step of all plans."""
        return [step.link for part in self.plans for step in part.steps]

    @cached_property
    def spent(self) -> tuple[PrivacyCost, ...]:
        """What all steps cost, as :func:`spent_together` has it."""
        return spent_together([self])

    def steps_at(self, head: str) -> int | None:
        """The number of steps of all plans that the ledger had when its hash was ``head``; None if it never was."""
        steps = 0
        for part in self.plans:
            links = [part.begins_with, *(step.link for step in part.steps)]
            if head in links:
                return steps + links.index(head)
            steps += len(part.steps)
        return None

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of all recorded steps, by default at the plan's δ and with its accountant."""
        return epsilon(self.spent, self.plan.delta if delta is None else delta, accountant or self.plan.accountant)

    def epsilon_after(self, steps: int, resumed_at: Sequence[int] = ()) -> float:
        """ε of all plans before the last, and of so many steps of the last."""
        spent = [*_spent(self.plans[:-1]), self.plan.spent_after(steps, resumed_at)]
        return epsilon(spent, self.plan.delta, self.plan.accountant)


def spent_together(records: Iterable[LedgerRecord]) -> tuple[PrivacyCost, ...]:
    """What the steps of several ledgers cost together; a step that copies of one run have in common counts once.

    A run that was selected counts as the selection among runs like it, once for all copies. With bands the group with the most
    steps counts, for each session of each run by itself: an example may be in the largest group of each, because after a resume
    the data may have come in another order.

    Formal guarantees: no step of any of the ledgers is left out. Two ledgers have a step in common if it has the same hash in
    both; the hash covers the run's random identifier and everything recorded since the run began.
    """
    return _spent(part for record in records for part in record.plans)


def steps_together(records: Iterable[LedgerRecord]) -> int:
    """The number of steps of several ledgers together; a step that copies of one run have in common counts once."""
    return len({link for record in records for link in record.links})


def _spent(plans: Iterable[RecordedPlan]) -> tuple[PrivacyCost, ...]:
    distinct: dict[str, tuple[PrivacyPlan, dict[str, RecordedStep]]] = {}
    for part in plans:
        _, steps = distinct.setdefault(part.begins_with, (part.plan, {}))
        steps.update({step.link: step for step in part.steps})
    counted: Counter[tuple[float, float, int, Cap | None]] = Counter()
    selected: list[PrivacyCost] = []
    for plan, steps in distinct.values():
        spent = most_of_one_example(steps.values(), plan.bands, plan.cap)
        if isinstance(plan, SelectionPlan) and spent:
            selected.append(SelectedRun(spent, plan.repetitions))
            continue
        for one in spent:
            counted[one.sample_rate, one.noise_multiplier, one.bands, one.cap] += one.steps
    added = (SubsampledGaussian(rate, sigma, steps, bands, cap) for (rate, sigma, bands, cap), steps in counted.items())
    return (*added, *selected)


def most_of_one_example(steps: Iterable[RecordedStep], bands: int, cap: Cap | None = None) -> tuple[SubsampledGaussian, ...]:
    """The steps that an example can have been in at most; one band is one group.

    Formal guarantees: for every mechanism, the result has at least as many steps as an example that is in one group in each
    session, and in whichever of them, can have been in.
    """
    by_group = Counter((step.mechanism, step.session, step.number % bands) for step in steps)
    most: dict[Mechanism, Counter[str]] = {}
    for (mechanism, session, _), count in by_group.items():
        sessions = most.setdefault(mechanism, Counter())
        sessions[session] = max(sessions[session], count)
    return tuple(SubsampledGaussian(*mechanism, found.total(), bands, cap) for mechanism, found in most.items())


def run_folder(run: Folder) -> Path:
    """The folder itself, or ``privacy`` inside it if the ledger is there, as in an output folder of Hugging Face."""
    path = Path(run)
    inside = path / RUN_INSIDE
    return inside if (inside / LEDGER_NAME).is_file() and not (path / LEDGER_NAME).is_file() else path


def ledger_path(run: Folder) -> Path:
    """The path of the ledger of a run; a ledger file is returned as it is."""
    path = run_folder(run)
    path = path / LEDGER_NAME if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"run is {str(run)!r}; it must be a run folder with a {LEDGER_NAME}, or such a file")
    return path


def read_ledger(run: Folder) -> LedgerRecord:
    """Read the ledger of a run folder, or a ledger file.

    Formal guarantees: every step whose result was used is counted, provided that each was recorded before its result was used
    and that the file holds everything that was written. A line that a crash left incomplete counts as a step. A file whose
    lines were edited, removed from the middle, moved or repeated is refused, unless someone recomputed all hashes. A file
    that was cut off at the end cannot be distinguished from a run that took fewer steps; see :meth:`LedgerRecord.steps_at`.

    Raises:
        InputError: if the file is not a ledger.
        PrivacyError: if lines of the ledger contradict each other.
    """
    path = ledger_path(run)
    first, *lines = path.read_bytes().split(b"\n")
    try:
        header = read_object(first)
        if header is None:
            raise InputError("its first line must be a JSON object")
        if header["format"] != FORMAT:
            raise InputError(f"it has format {header['format']!r}; this version reads format {FORMAT}, begin a new run")
        plan = _plan_of(header["plan"])
        settings = RunSettings(**{one.name: header["settings"][one.name] for one in fields(RunSettings)})
        versions = dict(header["versions"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not start with the header of a privacy ledger: {error}") from None
    number = 1
    try:
        head = _followed(header, NO_HEAD, first)
        if not is_head(run_id := header["run"]):
            raise _UnusableLine(f"names the run {run_id!r}, which is not 32 hexadecimal digits")
        plans = [RecordedPlan(plan, head)]
        for number, line in enumerate(lines, start=2):
            if number <= len(lines) or line:
                before, head = head, _add_line(plans, head, line, header.get("mechanisms") == _OWN_MECHANISMS)
    except (_UnusableLine, InputError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, _UnusableLine) else f"is none that a run writes ({error})"
        raise PrivacyError(
            f"line {number} of {path} {reason}; the ledger was changed after it was written and cannot be trusted, restore the "
            "original or start a new run"
        ) from None
    return LedgerRecord(settings, versions, run_id, before if lines and lines[-1] else head, tuple(plans))


class _UnusableLine(Exception):
    """A complete line that this library would not have written. The message continues a sentence: "line 7 of FILE …"."""


def _add_line(plans: list[RecordedPlan], head: str, line: bytes, own_mechanisms: bool) -> str:
    """Add what a line after the header says; returns the chain's hash with it."""
    values, found = read_object(line), plans[-1]
    if values is None:
        head = _link(head, line, b"torn")
        # Two lines without the newline between them are one line that cannot be read: each counts.
        for part in range(max(1, line.count(b'"step"'))):
            ordinary = found.plan.sample_rate, found.plan.noise_multiplier
            found.add_step(f"{head} {part}" if part else head, ordinary, opened=True)
        return head
    head = _followed(values, head, line)
    if "plan" in values:
        plans.append(RecordedPlan(_plan_of(values["plan"]), head))
        _refuse_other_data(found.plan, plans[-1].plan)
    else:
        _add_step(found, values, head, own_mechanisms)
    return head


def _add_step(found: RecordedPlan, values: Mapping[str, Any], head: str, own_mechanisms: bool) -> None:
    step = len(found.steps)
    expected = planned_event(found.plan, step)
    if step >= found.plan.steps:
        raise _UnusableLine(f"is a step after the {step} of its plan")
    if own_mechanisms:
        expected |= {name: values.get(name) for name in ("sample_rate", "noise_multiplier")}
    mechanism = (expected["sample_rate"], expected["noise_multiplier"])
    SubsampledGaussian(*mechanism, 1)  # which refuses what is none
    for name in (*expected, "group", "max_batch_size"):
        if values.get(name) != expected.get(name):
            raise _UnusableLine(f"has {name} {values.get(name)!r}, but by its plan it is {expected.get(name)!r}")
    found.add_step(head, mechanism, opened="opened" in values)
    if "phase" in values:
        found.phases[str(values["phase"])] += 1
    if "processes" in values:
        found.processes[int(values["processes"])] += 1


def _plan_of(values: Mapping[str, Any]) -> PrivacyPlan:
    return (SelectionPlan if "expected_runs" in values else PrivacyPlan).from_dict(values)


def planned_event(plan: PrivacyPlan, step: int) -> dict[str, Any]:
    """The content of a step's line, as far as the plan says it."""
    event: dict[str, Any] = {"step": step, "sample_rate": plan.sample_rate, "noise_multiplier": plan.noise_multiplier}
    if plan.bands > 1:
        event["group"] = step % plan.bands
    if plan.max_batch_size is not None:
        event["max_batch_size"] = plan.max_batch_size
    return event


def is_head(text: Any) -> bool:
    """Whether ``text`` has the format of a chain hash."""
    return isinstance(text, str) and _HEAD.fullmatch(text) is not None


def chained_line(values: Mapping[str, Any], head: str) -> tuple[bytes, str]:
    """The line that appends ``values`` to a chain with this head, and the new head."""
    content = json.dumps(values).encode()[:-1]
    new = _link(head, content, b"line")
    return content + b', "chain": "' + new.encode() + b'"}\n', new


def read_object(line: bytes) -> dict[str, Any] | None:
    """Parse the JSON object on a line; None for an incomplete line, as a crash leaves it."""
    try:
        values = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _followed(values: Mapping[str, Any], head: str, line: bytes) -> str:
    """The chain's head after a line, which must be what :func:`chained_line` writes for its ``values``."""
    written, new = chained_line({name: value for name, value in values.items() if name != "chain"}, head)
    if written != line + b"\n":
        raise _UnusableLine("does not follow from the lines before it: a line was edited, removed, moved or repeated")
    return new


def _link(head: str, content: bytes, kind: bytes) -> str:
    return hashlib.blake2b(head.encode() + content, digest_size=16, person=b"dp ledger " + kind).hexdigest()


def _refuse_other_data(before: PrivacyPlan, further: PrivacyPlan) -> None:
    """Raise an InputError unless ε of both plans together can be stated for the data of the first."""
    if isinstance(before, SelectionPlan) or isinstance(further, SelectionPlan):
        raise InputError("plan is that of a search, whose runs end with it; start a new run, and add both up with budget")
    for name in _SAME_IN_ALL_PLANS:
        if getattr(further, name) != getattr(before, name):
            raise InputError(
                f"plan has {name} = {getattr(further, name)!r}, but the run began with {getattr(before, name)!r}; a further "
                "plan must be for the same data"
            )


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

    ``steps`` of the ``plan`` are spent so far, those lost in crashes among them; ``resumed_at`` are the steps before which the
    run was resumed; ``head`` is the hash of all lines.

    Formal guarantees: when :meth:`record_step` returns, the step is on disk; with ``wait=False`` it is in the file, where a
    killed process leaves it, and on disk when :meth:`sync` returns. It never records more than the plan's steps;
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
            self.head = record.head
            if not path.read_bytes().endswith(b"\n"):  # once an incomplete line is ended, it belongs to the chain
                self._append(b"\n")
                self.head = read_ledger(path).head
        except BaseException:
            self.close()
            raise
        self.plan, self.steps, self.resumed_at = record.plan, record.steps, record.resumed_at
        self._opened: str | None = None
        self.begin_session()

    @classmethod
    def create(cls, run: Folder, plan: PrivacyPlan, settings: RunSettings) -> PrivacyLedger:
        """Create the ledger of a new run in folder ``run``, in which there must be none."""
        return cls(_write_header(run, plan, settings))

    @classmethod
    def resume(
        cls, run: Folder, plan: PrivacyPlan, settings: RunSettings, *, position: int, head: str | None = None
    ) -> PrivacyLedger:
        """Continue the last plan of the ledger in folder ``run`` from a checkpoint after ``position`` of its steps.

        ``head`` is the ledger's :attr:`head` at that moment, if the checkpoint has it. Steps recorded after the checkpoint stay
        spent, so the run may end with fewer updates than planned. A PrivacyError says that another process has the ledger open,
        that plan or settings differ from those of the run, or that the ledger lacks steps that the checkpoint includes.
        """
        require_integer("position", position, 0)
        path = ledger_path(run)

        def check(record: LedgerRecord) -> None:
            recorded = asdict(record.plan)
            # Users and bands first: such runs differ in more, but that is the reason.
            first = {name: recorded[name] for name in ("examples_per_user", "bands")}
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
    def extend(cls, run: Folder, plan: PrivacyPlan, settings: RunSettings) -> PrivacyLedger:
        """Begin a further plan, whose steps are numbered from 0 and which gives up what the plan before it had left.

        It must be for the same data, unit of privacy, δ, accountant and settings, and not that of a search.
        """
        path = ledger_path(run)

        def check(record: LedgerRecord) -> None:
            _require_same(path, "settings", asdict(record.settings), asdict(settings))
            _refuse_other_data(record.plan, plan)

        ledger = cls(path, check)
        line, ledger.head = chained_line({"plan": plan.to_dict(), "opened": secrets.token_hex(8)}, ledger.head)
        ledger._append(line)
        ledger.plan, ledger.steps, ledger.resumed_at = plan, 0, ()
        return ledger

    @property
    def remaining(self) -> int:
        """Steps that the plan still allows: fewer if it has bands and the run was resumed, so that its ε is never exceeded."""
        return max(0, self.plan.last_step(self.resumed_at) - self.steps)

    def begin_session(self) -> None:
        """The data may come in another order from here on, so that with bands an example may be in another group."""
        if self._opened is None:
            self._opened = secrets.token_hex(8)
            self.resumed_at += (self.steps,) if self.steps else ()

    def record_step(self, phase: str | None = None, *, processes: int = 1, wait: bool = True) -> int:
        """Record one more step as spent, and return its number once the record is on disk.

        ``phase`` is the name of the step's phase, for runs with several under one plan, ``processes`` how many take the step
        together. With ``wait=False`` it returns once the record is written, while another thread syncs it, which takes
        milliseconds on many disks: call :meth:`sync` before anything of the step leaves the process. After a PrivacyError the
        step must not be taken.
        """
        if self._closed:
            raise PrivacyError(
                f"{self.path} is not open in this process, so no step can be recorded; resume it with PrivacyLedger.resume"
            )
        if self.remaining == 0:
            resumed = f"{self.steps} steps of a run that was resumed {len(self.resumed_at)} times"
            spent = f"all {self.plan.steps} steps of the plan" if self.steps >= self.plan.steps else resumed
            raise PrivacyError(f"{spent} are spent; one more would exceed its epsilon, so stop here or solve a new plan")
        self.sync()  # a step before, which failed
        step = self.steps
        event = self._marked(planned_event(self.plan, step))
        if phase is not None:
            event["phase"] = phase
        if processes > 1:
            event["processes"] = processes
        self.steps += 1  # spent from here on, even if writing fails half-way
        line, head = chained_line(event, self.head)
        try:
            self._refuse_foreign_changes(step)
            self._write(line)
            self.head = head
        except OSError as error:
            raise self._not_taken(step, error) from error
        self._syncing = self._syncer.submit(os.fsync, self._file)
        if wait:
            self.sync()
        return step

    def sync(self) -> None:
        """Return once the last recorded step is on disk; after a PrivacyError its result must not be used."""
        try:
            if self._syncing is not None:
                self._syncing.result()
        except OSError as error:
            self._syncing = None
            raise self._not_taken(self.steps - 1, error) from error
        self._syncing = None  # not before: who is interrupted here has to wait again

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


def discard_unspent(run: Folder) -> None:
    """Remove the ledger of a run that never took a step, so that a new run can use its folder."""
    with PrivacyLedger(ledger_path(run)) as ledger:
        steps = steps_together([read_ledger(ledger.path)])
        if steps:
            raise PrivacyError(f"{ledger.path} records {steps} steps, which stay spent; use a new folder for a new run")
        ledger.path.unlink()


def write_past_steps(run: Folder, plan: PrivacyPlan, settings: RunSettings, spent: Sequence[SubsampledGaussian]) -> None:
    """Write a ledger of steps that another library took and recorded; each line has its own rate and noise multiplier."""
    total = sum(part.steps for part in spent)
    if total > plan.steps:
        raise InputError(f"plan allows {plan.steps} steps, but {total} were taken; use a plan with at least as many steps")
    with PrivacyLedger(_write_header(run, plan, settings, mechanisms=_OWN_MECHANISMS)) as ledger:
        lines, head = [], ledger.head
        every_step = (part for part in spent for _ in range(part.steps))
        for step, part in enumerate(every_step):
            event = {"step": step, "sample_rate": part.sample_rate, "noise_multiplier": part.noise_multiplier}
            line, head = chained_line(ledger._marked(event), head)
            lines.append(line)
        ledger._append(b"".join(lines))


def _write_header(run: Folder, plan: PrivacyPlan, settings: RunSettings, **more: str) -> Path:
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
        refuse_second_run(folder)
        raise
    return folder / LEDGER_NAME


def refuse_second_run(folder: Path) -> None:
    """Raise InputError if the folder has a ledger."""
    if (folder / LEDGER_NAME).exists():
        raise InputError(f"run is {str(folder)!r}, which has a ledger already; resume it, or use a new folder")


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size


def _close_in_forked_children(ledger: PrivacyLedger) -> None:
    """Close the inherited file in forked data-loading workers, which would hold the lock after this process was killed."""
    reference = weakref.ref(ledger)

    def close_inherited() -> None:
        inherited = reference()
        if inherited is not None and not inherited._closed:
            inherited._closed, inherited._syncing = True, None
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
