"""The ledger of a run: a file that says how much privacy has been spent, whatever happens to the process.

One JSON object per line: first the plan and how the run is set up, then one line per step, appended and synced to
disk *before* the step's result is used. A step that was recorded and then lost in a crash stays spent. ε is computed
from these lines and from nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.privacy.accounting import SubsampledGaussian, epsilon
from dp_microadam.privacy.plan import PrivacyPlan
from dp_microadam.validation import require_integer, require_positive

if TYPE_CHECKING:  # it needs torch, which reading a ledger does not
    from dp_microadam.privacy.randomness import Randomness

LEDGER_NAME = "ledger.jsonl"
_FORMAT = 1


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
    """

    plan: PrivacyPlan
    settings: RunSettings
    versions: Mapping[str, str]
    spent: tuple[SubsampledGaussian, ...]
    torn_lines: int
    phases: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[int, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.spent)

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

    Formal guarantees: every step whose result was used is counted, if each was recorded before. A line that cannot be
    read counts as a step; so do steps that are missing between two numbered lines.
    """
    path = ledger_path(run)
    head, *lines = path.read_bytes().split(b"\n")
    try:
        header = json.loads(head)
        plan = PrivacyPlan.from_dict(header["plan"])
        settings = RunSettings.from_dict(header["settings"])
        versions = dict(header["versions"])
        known = header["format"] == _FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not begin like a privacy ledger: {error}") from None
    if not known:
        raise InputError(
            f"{path} has format {header['format']}; this version reads format {_FORMAT}, use the one that wrote it"
        )
    return LedgerRecord(plan, settings, versions, *_count_steps(path, plan, lines))


def _count_steps(
    path: Path, plan: PrivacyPlan, lines: list[bytes]
) -> tuple[tuple[SubsampledGaussian, ...], int, dict[str, int], dict[int, int]]:
    ordinary = (plan.sample_rate, plan.noise_multiplier)
    counts: Counter[tuple[float, float]] = Counter()
    phases: Counter[str] = Counter()
    processes: Counter[int] = Counter()
    total, torn = 0, 0
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            event = json.loads(line)
            step, mechanism = int(event["step"]), (float(event["sample_rate"]), float(event["noise_multiplier"]))
            together = int(event.get("processes", 1))
        except (ValueError, KeyError, TypeError):
            torn += 1
            counts[ordinary] += 1
            total += 1
            continue
        if step < total:
            raise PrivacyError(
                f"line {number} of {path} repeats step {step}: the ledger was edited and proves nothing, begin a new run"
            )
        counts[ordinary] += step - total
        counts[mechanism] += 1
        if "phase" in event:
            phases[str(event["phase"])] += 1
        if together > 1:
            processes[together] += 1
        total = step + 1
    spent = tuple(SubsampledGaussian(*mechanism, count) for mechanism, count in counts.items() if count)
    return spent, torn, dict(phases), dict(processes)


class PrivacyLedger:
    """The ledger of a run in progress: one process appends, everyone may read.

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

    Formal guarantees: when :meth:`record_step` returns, the step is on the disk; it never records more than the
    plan's steps; no second process can append to the same file meanwhile. A killed process leaves at worst a torn
    line, which counts as a step. Assumes a file system whose fsync and flock do what they say.
    """

    def __init__(self, path: Path, plan: PrivacyPlan) -> None:
        """Use :meth:`create` or :meth:`resume`; this opens and locks a ledger that exists."""
        self.path = path
        self.plan = plan
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise PrivacyError(
                f"{path} is in use by another process; a run has one process at a time, wait for it or stop it"
            ) from None
        self._closed = False
        _close_in_forked_children(self)
        self._record = read_ledger(path)
        self._steps = self._record.steps
        self._end_torn_line()

    @classmethod
    def create(cls, run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings) -> PrivacyLedger:
        """Begin the ledger of a new run in folder ``run``, which is made if need be.

        Raises:
            InputError: if the folder has a ledger already.
        """
        folder = Path(run)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LEDGER_NAME
        header = {
            "format": _FORMAT,
            "stamp": "private" if settings.private else "not private",
            "plan": plan.to_dict(),
            "settings": asdict(settings),
            "versions": library_versions(),
        }
        _write_whole(path, json.dumps(header).encode() + b"\n")
        return cls(path, plan)

    @classmethod
    def resume(cls, run: str | os.PathLike[str], plan: PrivacyPlan, settings: RunSettings, *, position: int) -> PrivacyLedger:
        """Go on with the run in folder ``run`` from a checkpoint that was made after ``position`` steps.

        Steps recorded after the checkpoint stay spent, so the run may end with fewer useful steps than planned.

        Raises:
            PrivacyError: if another process has it, if plan or settings differ from those it began with, or if the ledger
                has fewer steps than the checkpoint.
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
        event: dict[str, Any] = {
            "step": step,
            "sample_rate": self.plan.sample_rate,
            "noise_multiplier": self.plan.noise_multiplier,
        }
        if phase is not None:
            event["phase"] = phase
        if processes > 1:
            event["processes"] = processes
        self._steps += 1  # spent from here on, even if writing fails half-way
        try:
            self._append(json.dumps(event).encode() + b"\n")
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

    def _end_torn_line(self) -> None:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            whole = file.read(1) == b"\n"
        if not whole:
            self._append(b"\n")

    def _append(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)


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
    with PrivacyLedger.create(run, plan, settings) as ledger:
        rates = (part for part in spent for _ in range(part.steps))
        events = (
            {"step": step, "sample_rate": part.sample_rate, "noise_multiplier": part.noise_multiplier}
            for step, part in enumerate(rates)
        )
        ledger._append("".join(json.dumps(event) + "\n" for event in events).encode())


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


def _write_whole(path: Path, content: bytes) -> None:
    """Make ``path`` appear with all of ``content`` on the disk, or not at all; an existing file is refused."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.link(temporary, path)
    except FileExistsError:
        raise InputError(f"run is {str(path.parent)!r}; it has a ledger already: resume it, or name a new folder") from None
    finally:
        os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
