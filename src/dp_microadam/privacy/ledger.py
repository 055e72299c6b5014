"""The ledger of a run: a file that says how much privacy has been spent, whatever happens to the process.

One JSON object per line: first the plan and how the run is set up, then one line per step, appended and synced to
disk *before* the step's result is used. A step that was recorded and then lost in a crash stays spent. ε is computed
from these lines and from nothing else. Each line carries a hash of all lines up to it (``ledger_lines.py``), so that a
ledger that was edited is refused and copies of one run are recognised.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dp_microadam.durable_files import write_durably
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.privacy.accounting import SubsampledGaussian, epsilon
from dp_microadam.privacy.ledger_lines import (
    NO_HEAD,
    Mechanism,
    UnusableLine,
    chained_line,
    edited,
    follow,
    is_head,
    link_unchained,
    read_object,
    read_steps,
)
from dp_microadam.privacy.plan import PrivacyPlan
from dp_microadam.validation import require_integer, require_positive

if TYPE_CHECKING:  # it needs torch, which reading a ledger does not
    from dp_microadam.privacy.randomness import Randomness

LEDGER_NAME = "ledger.jsonl"
_FORMAT, _WITHOUT_CHAIN = 2, 1
_OWN_MECHANISMS = "each line has its own"
_BY_OPACUS = "by Opacus"


@dataclass(frozen=True)
class RunSettings:
    """What a run declares about itself beside its plan; it stands in the ledger and in the privacy statement.

    ``private`` and ``randomness`` come from :class:`~dp_microadam.privacy.randomness.Randomness`, ``sensitivity``
    from whatever clips. ``public`` lists what the run uses without protection, beside the plan's own fields.
    """

    private: bool
    randomness: str
    sensitivity: float
    clipping: str = "the gradient of each example, all trainable parameters together, in L2 norm"
    unit: str = "one training example"
    public: tuple[str, ...] = ("normalization constants of the input", "clipping norm")

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", float(require_positive("sensitivity", self.sensitivity)))
        object.__setattr__(self, "public", tuple(self.public))

    @classmethod
    def of_run(
        cls, randomness: Randomness, sensitivity: float, clipped: str, clipping: str, public: Iterable[str]
    ) -> RunSettings:
        """What a run says that clips ``clipped``, in words, flat or per layer."""
        scope = "all trainable parameters together" if clipping == "flat" else "each layer to its share of the bound"
        return cls(
            private=randomness.private,
            randomness=randomness.description,
            sensitivity=sensitivity,
            clipping=f"{clipped}, {scope}, in L2 norm",
            public=tuple(public),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunSettings:
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**known)


@dataclass(frozen=True)
class LedgerRecord:
    """What a ledger says: read once, without a lock, and never changed.

    ``spent`` has every step, including lines that a crash tore or lost, which count as steps of the plan. ``phases`` has how
    many steps each phase took, of those recorded with one; ``processes`` how many were taken by each number of processes, of
    those that more than one took.

    ``run`` is 128 random bits that name the run, in all copies of its folder; a ledger of version 0.1 has none until a later
    version goes on with it. ``head`` is the hash of all finished lines: published, it shows later that none of them is missing.
    ``history`` has, for each step, the hash up to and including it, and its mechanism.
    """

    plan: PrivacyPlan
    settings: RunSettings
    versions: Mapping[str, str]
    spent: tuple[SubsampledGaussian, ...]
    torn_lines: int
    phases: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[int, int] = field(default_factory=dict)
    run: str | None = None
    head: str = NO_HEAD
    history: tuple[tuple[str, Mechanism], ...] = field(default=(), repr=False)
    begins_with: str = field(default=NO_HEAD, repr=False)

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.spent)

    def steps_at(self, head: str) -> int | None:
        """How many steps the ledger had when ``head`` was its hash; None if it never was."""
        if head == self.begins_with:
            return 0
        return next((number for number, (link, _) in enumerate(self.history, start=1) if link == head), None)

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of all recorded steps, at the plan's δ and by its accountant unless others are named."""
        return epsilon(self.spent, self.plan.delta if delta is None else delta, accountant or self.plan.accountant)


def ledger_path(run: str | os.PathLike[str]) -> Path:
    """The ledger of a run folder; a ledger file stands for itself."""
    path = Path(run)
    path = path / LEDGER_NAME if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"run is {str(run)!r}; it must be a run folder with a {LEDGER_NAME}, or such a file")
    return path


def read_ledger(run: str | os.PathLike[str]) -> LedgerRecord:
    """Read the ledger of a run folder, or a ledger file.

    Formal guarantees: every step whose result was used is counted, if each was recorded before and the file holds all that was
    written. A line that a crash tore counts as a step. A file whose lines were edited, removed from the middle, moved or
    repeated is refused, unless someone computed all hashes anew; one that ends early cannot be told from one that was not
    continued, see :meth:`LedgerRecord.steps_at`.

    Raises:
        InputError: for what is not a ledger.
        PrivacyError: for a ledger whose lines contradict each other.
    """
    path = ledger_path(run)
    first, *lines = path.read_bytes().split(b"\n")
    try:
        header = read_object(first)
        if header is None:
            raise InputError("its first line is not a JSON object")
        known = header["format"] in (_FORMAT, _WITHOUT_CHAIN)
        plan = PrivacyPlan.from_dict(header["plan"])
        settings = RunSettings.from_dict(header["settings"])
        versions = dict(header["versions"])
    except (ValueError, KeyError, TypeError, UnusableLine) as error:
        raise InputError(f"{path} does not begin like a privacy ledger: {error}") from None
    if not known:
        raise InputError(
            f"{path} has format {header['format']}; this version reads format {_FORMAT}, use the one that wrote it"
        )
    chained = header["format"] == _FORMAT
    try:
        head = follow(NO_HEAD, first) if chained else link_unchained(NO_HEAD, first)
        _refuse_contradictions(header, plan, settings, chained=chained)
    except UnusableLine as error:
        raise edited(path, 1, error) from None
    of_others = header.get("mechanisms") == _OWN_MECHANISMS if chained else _BY_OPACUS in settings.clipping
    steps = read_steps(path, lines, plan, head, chained=chained, own_mechanisms=of_others)
    least = min((mechanism[1] for _, mechanism in steps.history), default=plan.noise_multiplier)
    if of_others and not chained and least != plan.noise_multiplier:
        # Version 0.1 wrote no mark and no hash, but the least noise of all steps into the plan.
        raise edited(
            path, 1, UnusableLine(f"has noise multiplier {plan.noise_multiplier:g}, and the least in a line is {least:g}")
        )
    return LedgerRecord(
        plan,
        settings,
        versions,
        steps.spent,
        steps.torn,
        dict(steps.phases),
        dict(steps.processes),
        header["run"] if chained else steps.run,
        steps.head,
        tuple(steps.history),
        head,
    )


def _refuse_contradictions(header: Mapping[str, Any], plan: PrivacyPlan, settings: RunSettings, *, chained: bool) -> None:
    if not isinstance(settings.private, bool) or header.get("stamp") != _stamp(settings):
        raise UnusableLine(f"is stamped {header.get('stamp')!r} and has private = {settings.private!r}")
    if header["plan"].get("sample_rate") != plan.sample_rate:
        raise UnusableLine(f"has a plan with sample rate {header['plan'].get('sample_rate')} instead of {plan.sample_rate:g}")
    if chained and not (isinstance(header.get("run"), str) and is_head(header["run"])):
        raise UnusableLine(f"names the run {header.get('run')!r}, which is not 32 hexadecimal digits")


def spent_together(records: Iterable[LedgerRecord]) -> tuple[SubsampledGaussian, ...]:
    """What several ledgers have spent, where steps that copies of one run share count once.

    Formal guarantees: no step of any of the ledgers is left out. A step is one of two copies' common steps if it has the same
    hash in both, and a hash stands for the run's random name and all that was recorded since it began.
    """
    steps: dict[tuple[object, str], Mechanism] = {}
    for number, record in enumerate(records):
        # Two runs of version 0.1 with one plan have the same lines, so without a name each counts for itself.
        name = number if record.run is None else record.run
        steps.update({(name, link): mechanism for link, mechanism in record.history})
    counts = Counter(steps.values())
    return tuple(SubsampledGaussian(*mechanism, count) for mechanism, count in counts.items())


def discard_unspent(run: str | os.PathLike[str]) -> None:
    """Remove the ledger of a run that never took a step, so that one can begin in its folder.

    Raises:
        PrivacyError: if a process has it open, or a step was recorded.
    """
    path = ledger_path(run)
    with PrivacyLedger(path, read_ledger(path).plan) as ledger:
        if ledger.steps:
            raise PrivacyError(f"{path} records {ledger.steps} steps, which stay spent; name a new folder for a new run")
        path.unlink()


class PrivacyLedger:
    """The ledger of a run in progress: one process appends, everyone may read.

    >>>     >>> plan = PrivacyPlan.solve(dataset_size=1000, batch_size=10, delta=1e-5, noise_multiplier=1.0, steps=100)
    >>> settings = RunSettings(private=True, randomness="operating system's entropy", sensitivity=1.0)
    >>> folder = tempfile.mkdtemp()
    >>> with PrivacyLedger.create(folder, plan, settings) as ledger:
    ...     ledger.record_step()   # before the step's result is used
    0
    >>> with PrivacyLedger.resume(folder, plan, settings, position=1) as ledger:
    ...     ledger.steps, ledger.remaining
    (1, 99)

    Formal guarantees: when :meth:`record_step` returns, the step is on the disk; it never records more than the
    plan's steps; no second process can append to the same file meanwhile. A killed process leaves at worst a torn
    line, which counts as a step. A file that something else wrote to, replaced or removed meanwhile is not written any more.
    Assumes a file system whose fsync and flock do what they say.
    """

    def __init__(self, path: Path, plan: PrivacyPlan) -> None:
        """Use :meth:`create` or :meth:`resume`; this opens and locks a ledger that exists."""
        self.path = path
        self.plan = plan
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                reason = "is in use by another process; a run has one process at a time, wait for it or stop it"
            else:
                reason = f"cannot be locked ({error.strerror}); put the run's folder on a file system that has locks"
            raise PrivacyError(f"{path} {reason}") from None
        self._closed = False
        _close_in_forked_children(self)
        try:
            self._identity = _identity(path)
            self._record = read_ledger(path)
            # Once its line has ended, what a crash left belongs to the chain.
            self._head = read_ledger(path).head if self._end_torn_line() else self._record.head
        except BaseException:
            self.close()
            raise
        self._steps = self._record.steps
        self._run = self._record.run
        self._opened: str | None = secrets.token_hex(8)

    @classmethod
    def create(cls, run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings) -> PrivacyLedger:
        """Begin the ledger of a new run in folder ``run``, which is made if need be.

        Raises:
            InputError: if the folder has a ledger already.
        """
        return cls(_write_header(run, plan, settings), plan)

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
        """Go on with the run in folder ``run`` from a checkpoint that was made after ``position`` steps.

        ``head`` is the ledger's :attr:`head` at that moment, if the checkpoint has it. Steps recorded after the checkpoint stay
        spent, so the run may end with fewer useful steps than planned.

        Raises:
            PrivacyError: if another process has it, if plan or settings differ from those it began with, or if the ledger
                lacks steps that the checkpoint has taken.
        """
        require_integer("position", position, 0)
        ledger = cls(ledger_path(run), plan)
        try:
            _require_same(ledger.path, "plan", asdict(ledger._record.plan), asdict(plan))
            _require_same(ledger.path, "settings", asdict(ledger._record.settings), asdict(settings))
            if ledger.steps < position:
                raise PrivacyError(
                    f"{ledger.path} records {ledger.steps} steps and the checkpoint has taken {position}: steps are "
                    "missing from the ledger, so what was spent is unknown; put the whole ledger back, or begin a new run"
                )
            if head is not None and ledger._record.steps_at(head) is None:
                raise PrivacyError(
                    f"{ledger.path} never had the hash {head} that the checkpoint was made at: it was rolled back, or belongs "
                    "to another copy of the run; put the ledger back that goes with the checkpoint, or begin a new run"
                )
        except BaseException:
            ledger.close()
            raise
        return ledger

    @property
    def steps(self) -> int:
        """Steps spent so far, those lost in crashes included."""
        return self._steps

    @property
    def remaining(self) -> int:
        """Steps the plan still allows."""
        return max(0, self.plan.steps - self._steps)

    @property
    def head(self) -> str:
        """The hash of all lines so far; a ledger that contains it has all of them."""
        return self._head

    def record_step(self, phase: str | None = None, *, processes: int = 1) -> int:
        """Record that one more step is spent, and return its number once that is on the disk.

        ``phase`` names the part of the run the step belongs to, for runs that have several under their one plan. ``processes``
        is how many take the step together.

        Raises:
            PrivacyError: if the plan's steps are spent, or the file cannot be written; the step must not be used then.
        """
        if self._closed:
            raise PrivacyError(
                f"{self.path} is not open in this process, so no step can be recorded; resume it with PrivacyLedger.resume"
            )
        if self.remaining == 0:
            raise PrivacyError(
                f"all {self.plan.steps} steps of the plan are spent; one more would exceed its epsilon, so stop here or "
                "solve a new plan"
            )
        step = self._steps
        event = self._event(step, self.plan.spent_after(1))
        if phase is not None:
            event["phase"] = phase
        if processes > 1:
            event["processes"] = processes
        self._steps += 1  # spent from here on, even if writing fails half-way
        line, head = chained_line(event, self._head)
        try:
            self._refuse_foreign_changes(step)
            self._append(line)
            self._head = head
        except OSError as error:
            self.close()
            raise PrivacyError(
                f"{self.path} cannot be written, so step {step} is not taken: {error}; make room, then resume the run"
            ) from error
        return step

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of all steps recorded so far, computed from the file."""
        return self.read().epsilon(delta, accountant)

    def read(self) -> LedgerRecord:
        """What the file says now."""
        return read_ledger(self.path)

    def close(self) -> None:
        """Release the file. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def __enter__(self) -> PrivacyLedger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _event(self, step: int, part: SubsampledGaussian) -> dict[str, Any]:
        """What a step's line says. The first of a process has random bits, so that steps of two copies of a run differ."""
        event: dict[str, Any] = {
            "step": step,
            "sample_rate": part.sample_rate,
            "noise_multiplier": part.noise_multiplier,
        }
        if self._opened is not None:
            event["opened"], self._opened = self._opened, None
        if self._run is None:
            event["run"] = self._run = secrets.token_hex(16)
        return event

    def _refuse_foreign_changes(self, step: int) -> None:
        """Nothing but this process writes to the file: a second one would, without locks or in place of the file."""
        try:
            unchanged = _identity(self.path) == self._identity
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            self.close()
            raise PrivacyError(
                f"{self.path} was changed, replaced or removed by something else than this run, so step {step} is not taken; "
                "put it back as it was, then resume the run"
            )

    def _end_torn_line(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            whole = file.read(1) == b"\n"
        if not whole:
            self._append(b"\n")
        return not whole

    def _append(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self._identity = _identity(self.path)


def write_past_steps(
    run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings, spent: Sequence[SubsampledGaussian]
) -> None:
    """Write the ledger of steps that another library took and recorded; each line carries its own rate and noise.

    Raises:
        InputError: if the folder has a ledger already, or the plan allows fewer steps.
    """
    total = sum(part.steps for part in spent)
    if total > plan.steps:
        raise InputError(f"plan allows {plan.steps} steps and {total} were taken; give a plan for at least as many")
    path = _write_header(run, plan, settings, mechanisms=_OWN_MECHANISMS)
    with PrivacyLedger(path, plan) as ledger:
        lines, head = [], ledger.head
        every_step = (part for part in spent for _ in range(part.steps))
        for step, part in enumerate(every_step):
            line, head = chained_line(ledger._event(step, part), head)
            lines.append(line)
        ledger._append(b"".join(lines))


def _write_header(run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings, **more: str) -> Path:
    folder = Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "format": _FORMAT,
        "run": secrets.token_hex(16),
        "stamp": _stamp(settings),
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
        raise InputError(f"run is {str(folder)!r}; it has a ledger already: resume it, or name a new folder") from None
    return folder / LEDGER_NAME


def _stamp(settings: RunSettings) -> str:
    return "private" if settings.private else "not private"


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size


def _close_in_forked_children(ledger: PrivacyLedger) -> None:
    """Keep data-loading workers, which inherit open files, from holding the lock after this process was killed."""
    reference = weakref.ref(ledger)

    def close_inherited() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close_inherited)


def _require_same(path: Path, what: str, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in recorded.items():
        if given[name] != value:
            raise PrivacyError(
                f"{path} began with {what} {name} = {value!r} and cannot go on with {given[name]!r}; start a new run instead"
            )


def library_versions() -> dict[str, str]:
    """Versions of what the guarantee depends on, of those installed here."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("dp-microadam", "torch", "numpy", "scipy", "dp-accounting", "cryptography"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
