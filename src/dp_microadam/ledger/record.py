"""Reading a ledger: the plans of a run, which steps it recorded, and the ε they add up to.

A ledger has one JSON object per line: first the plan and the settings of the run, then one line per step. A further plan on the
same data is a line, too, and the steps after it are its own. ε is computed from these lines and from nothing else.

The last entry of a line, ``"chain"``, is a hash of the previous line's hash and of the rest of the line. It thus covers the
whole ledger up to there: a line that was edited, removed, moved or repeated breaks the chain at the next one. The hash has no
key. It detects damage and careless editing. Someone who deliberately forges a ledger can recompute all hashes; only a hash that
was published earlier reveals that. ``ledger.py`` writes ledgers. Reading needs neither a lock nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.accounting.costs import PrivacyCost, SubsampledGaussian, epsilon
from dp_microadam.accounting.one_step import Cap
from dp_microadam.accounting.selection import SelectedRun
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.validation import require_positive

if TYPE_CHECKING:  # it needs torch, which reading a ledger does not
    from dp_microadam.noise.randomness import Randomness

LEDGER_NAME = "ledger.jsonl"
RUN_INSIDE = "privacy"
"""The folder of a run inside an output folder of another library's."""

NO_HEAD = ""
"""The hash before the first line."""

FORMAT = 1
OWN_MECHANISMS = "each line has its own"
_HEAD = re.compile(r"[0-9a-f]{32}")

_SAME_IN_ALL_PLANS = ("dataset_size", "delta", "accountant", "unit", "examples_per_user")
"""Fields in which a further plan is the one before it: the data, and what ε is computed for."""

Mechanism = tuple[float, float]
"""Sample rate and noise multiplier of a step."""


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


@dataclass
class RecordedPlan:
    """A plan of a ledger, and what was recorded under it.

    ``begins_with`` is the hash of the line it begins with. ``history`` has, for each step, the hash up to and including it, and
    its mechanism. ``phases`` counts the steps of each phase, for runs that have phases, ``processes`` those that more than one
    process took together, by world size. ``resumed_at`` are the steps before which another session began; a line that cannot
    be read may have begun one, and counts as one.
    """

    plan: PrivacyPlan
    begins_with: str
    history: list[tuple[str, Mechanism]] = field(default_factory=list)
    torn_lines: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    processes: Counter[int] = field(default_factory=Counter)
    resumed_at: list[int] = field(default_factory=list)

    def sessions(self) -> Iterator[tuple[str, str, int, Mechanism]]:
        """The hash of each step, that of the first step of its session, its number and its mechanism."""
        for start, stop in pairwise([0, *self.resumed_at, len(self.history)]):
            for number in range(start, stop):
                link, mechanism = self.history[number]
                yield link, self.history[start][0], number, mechanism


@dataclass(frozen=True)
class LedgerRecord:
    """The contents of a ledger at the time it was read; reading takes no lock.

    ``plans`` are all plans of the run, of which :attr:`plan`, :attr:`steps`, :attr:`resumed_at`, :attr:`phases` and
    :attr:`processes` describe the last. ``run`` is a random 128-bit identifier of the run, the same in all copies of its
    folder. ``head`` is the hash of all complete lines: if it is published, anyone can check later that none of them is missing.
    It leaves out a line that is still being written, or that a killed process left incomplete: the result of such a step was
    never used.
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
        return len(self.plans[-1].history)

    @property
    def resumed_at(self) -> tuple[int, ...]:
        return tuple(self.plans[-1].resumed_at)

    @property
    def phases(self) -> Mapping[str, int]:
        return dict(self.plans[-1].phases)

    @property
    def processes(self) -> Mapping[int, int]:
        return dict(self.plans[-1].processes)

    @property
    def torn_lines(self) -> int:
        return sum(part.torn_lines for part in self.plans)

    @property
    def history(self) -> list[tuple[str, Mechanism]]:
        """The hash up to and including each step of all plans, and its mechanism."""
        return [step for part in self.plans for step in part.history]

    @cached_property
    def spent(self) -> tuple[PrivacyCost, ...]:
        """What all steps cost, as :func:`spent_together` has it."""
        return spent_together([self])

    @cached_property
    def spent_before(self) -> tuple[PrivacyCost, ...]:
        """What the steps of all plans before the last cost."""
        return _spent(self.plans[:-1])

    def steps_at(self, head: str) -> int | None:
        """The number of steps of all plans that the ledger had when its hash was ``head``; None if it never was."""
        steps = 0
        for part in self.plans:
            for number, link in enumerate([part.begins_with, *(link for link, _ in part.history)]):
                if link == head:
                    return steps + number
            steps += len(part.history)
        return None

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of all recorded steps, by default at the plan's δ and with its accountant."""
        return epsilon(self.spent, self.plan.delta if delta is None else delta, accountant or self.plan.accountant)

    def epsilon_after(self, steps: int, resumed_at: Sequence[int] = ()) -> float:
        """ε of all plans before the last, and of so many steps of the last."""
        spent = [*self.spent_before, self.plan.spent_after(steps, resumed_at)]
        return epsilon(spent, self.plan.delta, self.plan.accountant)


def spent_together(records: Iterable[LedgerRecord]) -> tuple[PrivacyCost, ...]:
    """What the steps of several ledgers cost together; a step that copies of one run have in common counts once.

    A run that was selected counts as the selection among runs like it, once for all copies. With bands, an example is in the
    steps of its group only; the group with the most steps counts, for each session of each run by itself, because the same
    example may be in the largest group of each: after a resume the data may have come in another order.

    Formal guarantees: no step of any of the ledgers is left out. Two ledgers have a step in common if it has the same hash in
    both; the hash covers the run's random identifier and everything recorded since the run began.
    """
    return _spent(part for record in records for part in record.plans)


def steps_together(records: Iterable[LedgerRecord]) -> int:
    """The number of steps of several ledgers together; a step that copies of one run have in common counts once."""
    return len({link for record in records for link, _ in record.history})


def _spent(plans: Iterable[RecordedPlan]) -> tuple[PrivacyCost, ...]:
    distinct: dict[str, tuple[PrivacyPlan, dict[str, tuple[str, int, Mechanism]]]] = {}
    for part in plans:
        _, steps = distinct.setdefault(part.begins_with, (part.plan, {}))
        steps.update({link: step for link, *step in part.sessions()})  # type: ignore[misc]
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


def most_of_one_example(
    steps: Iterable[tuple[Hashable, int, Mechanism]], bands: int, cap: Cap | None = None
) -> tuple[SubsampledGaussian, ...]:
    """The steps that an example can have been in at most, from all steps by session and number; one band is one group.

    Formal guarantees: for every mechanism, the result has at least as many steps as an example that is in one group in each
    session, and in whichever of them, can have been in.
    """
    by_group = Counter((mechanism, session, number % bands) for session, number, mechanism in steps)
    most: dict[Mechanism, dict[Hashable, int]] = {}
    for (mechanism, session, _), count in by_group.items():
        sessions = most.setdefault(mechanism, {})
        sessions[session] = max(sessions.get(session, 0), count)
    return tuple(SubsampledGaussian(*mechanism, sum(found.values()), bands, cap) for mechanism, found in most.items())


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
        known = header["format"] == FORMAT
        plan = _plan_of(header["plan"]) if known else None
        settings = RunSettings(**{one.name: header["settings"][one.name] for one in fields(RunSettings)})
        versions = dict(header["versions"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not start with the header of a privacy ledger: {error}") from None
    if plan is None:
        raise InputError(f"{path} has format {header['format']!r}; this version reads format {FORMAT}, begin a new run")
    own_mechanisms = header.get("mechanisms") == OWN_MECHANISMS
    number = 1
    try:
        head = _followed(header, NO_HEAD, first)
        if not is_head(run_id := header["run"]):
            raise _UnusableLine(f"names the run {run_id!r}, which is not 32 hexadecimal digits")
        plans = [RecordedPlan(plan, head)]
        for number, line in enumerate(lines, start=2):
            if number <= len(lines) or line:
                before, head = head, _add_line(plans, head, line, own_mechanisms)
    except (_UnusableLine, InputError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, _UnusableLine) else f"is none that a run writes ({error})"
        raise PrivacyError(
            f"line {number} of {path} {reason}; the ledger was changed after it was written and cannot be trusted, restore the "
            "original or start a new run"
        ) from None
    return LedgerRecord(settings, versions, run_id, before if lines and lines[-1] else head, tuple(plans))


def _add_line(plans: list[RecordedPlan], head: str, line: bytes, own_mechanisms: bool) -> str:
    """Add what a line after the header says; returns the chain's hash with it."""
    values, found = read_object(line), plans[-1]
    if values is None:
        head = _link(head, line, b"torn")
        found.torn_lines += 1
        # Two lines without the newline between them are one line that cannot be read: each counts.
        count = max(1, line.count(b'"step"'))
        found.resumed_at += range(max(1, len(found.history)), len(found.history) + count)
        ordinary = (found.plan.sample_rate, found.plan.noise_multiplier)
        found.history += [(head if part == 0 else f"{head} {part}", ordinary) for part in range(count)]
        return head
    head = _followed(values, head, line)
    if "plan" in values:
        plans.append(RecordedPlan(_plan_of(values["plan"]), head))
        refuse_other_data(found.plan, plans[-1].plan)
    else:
        _add_step(found, values, head, own_mechanisms)
    return head


def _add_step(found: RecordedPlan, values: Mapping[str, Any], head: str, own_mechanisms: bool) -> None:
    step = len(found.history)
    expected = planned_event(found.plan, step)
    if step >= found.plan.steps:
        raise _UnusableLine(f"is a step after the {step} of its plan")
    mechanism = (expected["sample_rate"], expected["noise_multiplier"])
    if own_mechanisms:
        mechanism = (values.get("sample_rate"), values.get("noise_multiplier"))
        expected |= {name: values.get(name) for name in ("sample_rate", "noise_multiplier")}
        SubsampledGaussian(*mechanism, 1)  # which refuses what is none
    for name in (*expected, "group", "max_batch_size"):
        if values.get(name) != expected.get(name):
            raise _UnusableLine(f"has {name} {values.get(name)!r}, but by its plan it is {expected.get(name)!r}")
    if "opened" in values and step:
        found.resumed_at.append(step)
    found.history.append((head, mechanism))
    if "phase" in values:
        found.phases[str(values["phase"])] += 1
    if "processes" in values:
        found.processes[int(values["processes"])] += 1


def _plan_of(values: Mapping[str, Any]) -> PrivacyPlan:
    return (SelectionPlan if "expected_runs" in values else PrivacyPlan).from_dict(values)


def refuse_other_data(before: PrivacyPlan, further: PrivacyPlan) -> None:
    """Raise an InputError unless ε of both plans together can be stated for the data of the first."""
    if isinstance(before, SelectionPlan) or isinstance(further, SelectionPlan):
        raise InputError("plan is that of a search, whose runs end with it; start a new run, and add both up with budget")
    for name in _SAME_IN_ALL_PLANS:
        if getattr(further, name) != getattr(before, name):
            raise InputError(
                f"plan has {name} = {getattr(further, name)!r}, but the run began with {getattr(before, name)!r}; a further "
                "plan must be for the same data"
            )


class _UnusableLine(Exception):
    """A complete line that this library would not have written. The message continues a sentence: "line 7 of FILE …"."""


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


def planned_event(plan: PrivacyPlan, step: int) -> dict[str, Any]:
    """The content of a step's line, as far as the plan says it."""
    event: dict[str, Any] = {"step": step, "sample_rate": plan.sample_rate, "noise_multiplier": plan.noise_multiplier}
    if plan.bands > 1:
        event["group"] = step % plan.bands
    if plan.max_batch_size is not None:
        event["max_batch_size"] = plan.max_batch_size
    return event
