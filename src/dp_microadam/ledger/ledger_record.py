"""Reading a ledger: what a run declared, which steps it recorded, and the ε they add up to.

``ledger.py`` writes ledgers. Reading needs neither a lock nor torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.accounting.costs import Spent, SubsampledGaussian, epsilon
from dp_microadam.accounting.selection import SelectedRun
from dp_microadam.accounting.truncated import Cap
from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger_lines import (
    NO_HEAD,
    Mechanism,
    UnusableLine,
    edited,
    first_steps,
    follow,
    is_head,
    link_unchained,
    most_of_one_example,
    read_object,
    read_steps,
)
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.validation import require_positive

if TYPE_CHECKING:  # it needs torch, which reading a ledger does not
    from dp_microadam.noise.randomness import Randomness

LEDGER_NAME = "ledger.jsonl"
RUN_INSIDE = "privacy"
"""The folder of a run inside an output folder of another library's."""
FORMAT, _WITHOUT_CHAIN = 2, 1
# The best of several runs: of another format, because a version that knew no selection would read it as a single run.
FORMAT_OF_SELECTIONS = 3
OWN_MECHANISMS = "each line has its own"
_BY_OPACUS = "by Opacus"


# A secure run could only draw on the CPU until version 0.2, and is described as one that may go on elsewhere.
_SECURE_ON_THE_CPU, _SECURE_ELSEWHERE = "operating system's entropy, AES-256 in counter mode", ", or ChaCha20 on a GPU"


@dataclass(frozen=True)
class RunSettings:
    """What a run declares besides its plan, as recorded in the ledger and in the privacy statement.

    ``private`` and ``randomness`` come from :class:`~dp_microadam.noise.randomness.Randomness`, ``sensitivity``
    from the object that clips. ``unit_name`` is what a unit is called in the statement, such as patient; empty: example or
    user. ``public`` lists what the run uses without protection, besides the fields of the plan.
    """

    private: bool
    randomness: str
    sensitivity: float
    clipping: str = "the gradient of each example, all trainable parameters together, in L2 norm"
    unit: str = "one training example"
    unit_name: str = ""
    public: tuple[str, ...] = ("normalization constants of the input", "clipping norm")

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", float(require_positive("sensitivity", self.sensitivity)))
        object.__setattr__(self, "public", tuple(self.public))

    @classmethod
    def of_run(
        cls, randomness: Randomness, sensitivity: float, clipped: str, clipping: str, public: Iterable[str]
    ) -> RunSettings:
        """The settings of a run that clips ``clipped`` (in words), flat or per layer."""
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
        if known.get("randomness") == _SECURE_ON_THE_CPU:
            known["randomness"] += _SECURE_ELSEWHERE
        return cls(**known)


@dataclass(frozen=True)
class LedgerRecord:
    """The contents of a ledger at the time it was read. Immutable; reading takes no lock.

    ``spent`` has every step, including those whose lines a crash left incomplete or lost; they count as steps of the plan. If
    the plan has bands, it has the steps that one example can have been in, which is what privacy accounts for: after a resume
    the data may have come in another order, and the example may be in another group. If the plan is a
    :class:`~dp_microadam.plan.selection_plan.SelectionPlan`, it covers the selection among such runs.
    ``phases`` counts the steps of each phase, for runs that have phases. ``processes`` counts the steps by world size, for
    steps that more than one process took together. ``resumed_at`` are the steps before which a process began that went on with
    the run.

    ``run`` is a random 128-bit identifier of the run, the same in all copies of its folder; a ledger of version 0.1 has none
    until a later version continues it. ``head`` is the hash of all complete lines: if it is published, anyone can check later
    that none of them is missing. ``history`` has, for each step, the hash up to and including it, and its mechanism.
    """

    plan: PrivacyPlan
    settings: RunSettings
    versions: Mapping[str, str]
    spent: tuple[Spent, ...]
    torn_lines: int
    phases: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[int, int] = field(default_factory=dict)
    resumed_at: tuple[int, ...] = ()
    run: str | None = None
    head: str = NO_HEAD
    history: tuple[tuple[str, Mechanism], ...] = field(default=(), repr=False)
    begins_with: str = field(default=NO_HEAD, repr=False)

    @property
    def steps(self) -> int:
        return len(self.history)

    def steps_at(self, head: str) -> int | None:
        """The number of steps the ledger had when its hash was ``head``; None if it never was."""
        if head == self.begins_with:
            return 0
        return next((number for number, (link, _) in enumerate(self.history, start=1) if link == head), None)

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of all recorded steps, by default at the plan's δ and with its accountant."""
        return epsilon(self.spent, self.plan.delta if delta is None else delta, accountant or self.plan.accountant)


def run_folder(run: str | os.PathLike[str]) -> Path:
    """The folder itself, or ``privacy`` inside it if the ledger is there, as in an output folder of Hugging Face."""
    path = Path(run)
    inside = path / RUN_INSIDE
    return inside if (inside / LEDGER_NAME).is_file() and not (path / LEDGER_NAME).is_file() else path


def ledger_path(run: str | os.PathLike[str]) -> Path:
    """The path of the ledger in a run folder, or in an output folder of Hugging Face; a ledger file is returned as it is."""
    path = run_folder(run)
    path = path / LEDGER_NAME if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"run is {str(run)!r}; it must be a run folder with a {LEDGER_NAME}, or such a file")
    return path


def read_ledger(run: str | os.PathLike[str]) -> LedgerRecord:
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
        known = header["format"] in (FORMAT, FORMAT_OF_SELECTIONS, _WITHOUT_CHAIN)
        kind = SelectionPlan if header["format"] == FORMAT_OF_SELECTIONS else PrivacyPlan
        plan = kind.from_dict(header["plan"])
        settings = RunSettings.from_dict(header["settings"])
        versions = dict(header["versions"])
    except (ValueError, KeyError, TypeError, UnusableLine) as error:
        raise InputError(f"{path} does not start with the header of a privacy ledger: {error}") from None
    if not known:
        raise InputError(
            f"{path} has format {header['format']}; this version reads format {FORMAT}, use the version that wrote it"
        )
    chained = header["format"] != _WITHOUT_CHAIN
    try:
        head = follow(NO_HEAD, first) if chained else link_unchained(NO_HEAD, first)
        _refuse_contradictions(header, plan, settings, chained=chained)
    except UnusableLine as error:
        raise edited(path, 1, error) from None
    of_others = header.get("mechanisms") == OWN_MECHANISMS if chained else _BY_OPACUS in settings.clipping
    steps = read_steps(path, lines, plan, head, chained=chained, own_mechanisms=of_others)
    least = min((mechanism[1] for _, mechanism in steps.history), default=plan.noise_multiplier)
    if of_others and not chained and least != plan.noise_multiplier:
        # Version 0.1 wrote neither mark nor hash, but its plan has the smallest noise multiplier of all steps.
        raise edited(
            path, 1, UnusableLine(f"has noise multiplier {plan.noise_multiplier:g}, but the least in a line is {least:g}")
        )
    return LedgerRecord(
        plan,
        settings,
        versions,
        _covering_selection(plan, steps.spent),
        steps.torn,
        dict(steps.phases),
        dict(steps.processes),
        tuple(steps.resumed_at),
        header["run"] if chained else steps.run,
        steps.head,
        tuple(steps.history),
        head,
    )


def _covering_selection(plan: PrivacyPlan, steps: tuple[SubsampledGaussian, ...]) -> tuple[Spent, ...]:
    """What a run spent: its steps, or the selection among runs with as many steps if it was the best of several."""
    return (SelectedRun(steps, plan.repetitions),) if isinstance(plan, SelectionPlan) and steps else steps


def _refuse_contradictions(header: Mapping[str, Any], plan: PrivacyPlan, settings: RunSettings, *, chained: bool) -> None:
    if not isinstance(settings.private, bool) or header.get("stamp") != stamp_of(settings):
        raise UnusableLine(f"is stamped {header.get('stamp')!r}, but has private = {settings.private!r}")
    if header["plan"].get("sample_rate") != plan.sample_rate:
        raise UnusableLine(f"has a plan with sample rate {header['plan'].get('sample_rate')} instead of {plan.sample_rate:g}")
    if chained and not (isinstance(header.get("run"), str) and is_head(header["run"])):
        raise UnusableLine(f"names the run {header.get('run')!r}, which is not 32 hexadecimal digits")


def spent_together(records: Iterable[LedgerRecord]) -> tuple[Spent, ...]:
    """The steps of several ledgers together; a step that copies of one run have in common counts once.

    A run that was selected counts as the selection among runs like it, once for all copies.

    With bands, an example is in the steps of its group only; the group with the most steps counts, for each session of each run
    by itself, because the same example may be in the largest group of each.

    Formal guarantees: no step of any of the ledgers is left out. Two ledgers have a step in common if it has the same hash in
    both; the hash covers the run's random identifier and everything recorded since the run began.
    """
    together: Counter[tuple[float, float, int, Cap | None]] = Counter()
    selected: list[Spent] = []
    for plan, steps in _distinct_steps(records).values():
        spent = most_of_one_example(steps.values(), plan.bands, plan.cap)
        if isinstance(plan, SelectionPlan):
            selected += _covering_selection(plan, spent)
            continue
        for part in spent:
            together[part.sample_rate, part.noise_multiplier, plan.bands, plan.cap] += part.steps
    counted = (SubsampledGaussian(rate, sigma, steps, bands, cap) for (rate, sigma, bands, cap), steps in together.items())
    return (*counted, *selected)


def steps_together(records: Iterable[LedgerRecord]) -> int:
    """The number of steps of several ledgers together; a step that copies of one run have in common counts once."""
    return sum(len(steps) for _, steps in _distinct_steps(records).values())


def _distinct_steps(records: Iterable[LedgerRecord]) -> dict[object, tuple[PrivacyPlan, dict[str, tuple[str, int, Mechanism]]]]:
    """For each run its plan and its steps: by hash, that of the first step of its session, the step's number and mechanism."""
    runs: dict[object, tuple[PrivacyPlan, dict[str, tuple[str, int, Mechanism]]]] = {}
    for position, record in enumerate(records):
        # Two runs of version 0.1 with the same plan have identical lines, so runs without an identifier count separately.
        name = position if record.run is None else record.run
        _, steps = runs.setdefault((name, record.plan.bands, record.plan.cap, type(record.plan)), (record.plan, {}))
        for number, first in enumerate(first_steps(record.resumed_at, record.steps)):
            link, mechanism = record.history[number]
            steps[link] = record.history[first][0], number, mechanism
    return runs


def stamp_of(settings: RunSettings) -> str:
    """``"private"`` or ``"not private"``, as the ledger's header says it."""
    return "private" if settings.private else "not private"
