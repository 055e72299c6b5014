"""The hash chain of a ledger: writing a line, reading it back, and detecting edits.

A line is a JSON object whose last entry, ``"chain"``, is a hash of the previous line's hash and of the rest of the line. It
thus covers the whole ledger up to there: a line that was edited, removed, moved or repeated breaks the chain at the next one.
The hash has no key. It detects damage and careless editing. Someone who deliberately forges a ledger can recompute all hashes;
only a hash that was published earlier reveals that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NoReturn

from dp_microadam.accounting.costs import SubsampledGaussian
from dp_microadam.accounting.truncated import Cap
from dp_microadam.errors import PrivacyError
from dp_microadam.plan.plan import PrivacyPlan

NO_HEAD = ""
_CHAINED = re.compile(rb'(\{.*), "chain": "([0-9a-f]{32})"\}', re.DOTALL)
_HEAD = re.compile(r"[0-9a-f]{32}")

Mechanism = tuple[float, float]
"""Sample rate and noise multiplier of a step."""


class UnusableLine(Exception):
    """A complete line that this library would not have written. The message continues a sentence: "line 7 of FILE …"."""


@dataclass
class RecordedSteps:
    """The steps recorded in the lines after the header.

    ``history`` has, for each step, the hash up to and including it, and its mechanism. ``resumed_at`` are the steps before
    which another session began; a line that cannot be read may have begun one, and counts as one. ``head`` is the hash of all
    complete lines. It leaves out a line that is still being written, or that a killed process left incomplete: the result of
    such a step was never used.
    """

    head: str
    history: list[tuple[str, Mechanism]] = field(default_factory=list)
    torn: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    processes: Counter[int] = field(default_factory=Counter)
    resumed_at: list[int] = field(default_factory=list)
    run: str | None = None
    bands: int = 1
    cap: Cap | None = None

    @property
    def spent(self) -> tuple[SubsampledGaussian, ...]:
        firsts = enumerate(first_steps(self.resumed_at, len(self.history)))
        return most_of_one_example(((first, step, self.history[step][1]) for step, first in firsts), self.bands, self.cap)


def first_steps(resumed_at: Sequence[int], steps: int) -> Iterator[int]:
    """For each step the first one of its session, in a run that was resumed before the given steps."""
    for start, stop in pairwise([0, *resumed_at, steps]):
        yield from repeat(start, stop - start)


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


def is_head(text: str) -> bool:
    """Whether ``text`` has the format of a chain hash."""
    return _HEAD.fullmatch(text) is not None


def chained_line(values: Mapping[str, Any], head: str) -> tuple[bytes, str]:
    """The line that appends ``values`` to a chain with this head, and the new head."""
    content = json.dumps(values).encode()[:-1]
    new = _link(head, content, b"line")
    return content + b', "chain": "' + new.encode() + b'"}\n', new


def follow(head: str, line: bytes) -> str:
    """Verify the hash of ``line`` and return it as the chain's new head.

    Raises:
        UnusableLine: if the line has no hash, or one that does not follow from ``head``.
    """
    match = _CHAINED.fullmatch(line)
    if match is None:
        raise UnusableLine("does not end in a hash")
    if match[2].decode() != _link(head, match[1], b"line"):
        raise UnusableLine("does not follow from the lines before it: a line was edited, removed, moved or repeated")
    return match[2].decode()


def link_unchained(head: str, line: bytes) -> str:
    """The chain's head after a line without a hash: one left incomplete by a crash, or written by version 0.1."""
    return _link(head, line, b"torn")


def read_object(line: bytes) -> dict[str, Any] | None:
    """Parse the JSON object on a line; None for an incomplete line, as a crash leaves it.

    Raises:
        UnusableLine: for JSON with duplicate keys, NaN or infinity.
    """
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def read_steps(
    path: Path, lines: Sequence[bytes], plan: PrivacyPlan, head: str, *, chained: bool, own_mechanisms: bool
) -> RecordedSteps:
    """Read the steps after the header, whose hash is ``head``; the last of ``lines`` is the text after the last newline.

    ``chained`` is False for a ledger of version 0.1, whose chain begins where a later version continued it.
    ``own_mechanisms`` is True if lines may have a sample rate and noise multiplier other than the plan's.

    Raises:
        PrivacyError: for a line that breaks the chain or contradicts the plan.
    """
    found = RecordedSteps(head, bands=plan.bands, cap=plan.cap)
    ordinary = (plan.sample_rate, plan.noise_multiplier)
    *finished, unfinished = lines or [b""]
    for number, line in enumerate([*finished, *([unfinished] if unfinished else [])], start=2):
        before = found.head
        try:
            values = read_object(line)
            if values is not None and (chained or "chain" in values):
                found.head, chained = follow(before, line), True
            else:
                found.head = link_unchained(before, line)
            if values is not None:
                _add_step(found, values, plan, chained=chained, own_mechanisms=own_mechanisms)
            elif line or chained:  # version 0.1 ignored empty lines
                found.torn += 1
                # Two lines without the newline between them are one line that cannot be read: each counts.
                count = max(1, line.count(b'"step"'))
                found.resumed_at += range(max(1, len(found.history)), len(found.history) + count)
                found.history += [(found.head if part == 0 else f"{found.head} {part}", ordinary) for part in range(count)]
        except UnusableLine as error:
            raise edited(path, number, error) from None
    if unfinished:
        found.head = before
    return found


def edited(path: Path, number: int, error: UnusableLine) -> PrivacyError:
    """The error for a ledger with an invalid line."""
    return PrivacyError(
        f"line {number} of {path} {error}; the ledger was changed after it was written and cannot be trusted, restore the "
        "original or start a new run"
    )


def _add_step(
    found: RecordedSteps, values: Mapping[str, Any], plan: PrivacyPlan, *, chained: bool, own_mechanisms: bool
) -> None:
    total = len(found.history)
    step = _whole_number(values, "step", 0)
    ordinary = (plan.sample_rate, plan.noise_multiplier)
    mechanism = (_number(values, "sample_rate"), _number(values, "noise_multiplier"))
    if mechanism[0] > 1:
        raise UnusableLine(f"is not a valid step: its sample_rate is {mechanism[0]:g}, above 1")
    if step < total:
        raise UnusableLine(f"repeats step {step}")
    if step >= plan.steps:
        raise UnusableLine(f"has step {step}, but the plan in line 1 ends after {plan.steps} steps")
    if step > total and chained:
        raise UnusableLine(f"has step {step} where step {total} comes next")
    if values.get("group", 0) != step % plan.bands:
        raise UnusableLine(f"has group {values.get('group')!r} in step {step}, whose group is {step % plan.bands}")
    if values.get("max_batch_size") != plan.max_batch_size:
        raise UnusableLine(
            f"has max_batch_size {values.get('max_batch_size')!r}, but the plan in line 1 has {plan.max_batch_size!r}"
        )
    if mechanism == ordinary:
        mechanism = ordinary  # one object for all steps
    elif not own_mechanisms:
        raise UnusableLine(
            f"has sample rate {mechanism[0]:g} and noise multiplier {mechanism[1]:g}, but the plan in line 1 has "
            f"{ordinary[0]:g} and {ordinary[1]:g}"
        )
    # A gap in an old ledger means that steps were recorded and lost, so they count as spent.
    found.history += [(f"{found.head} {missing}", ordinary) for missing in range(total, step)]
    if "opened" in values and step:
        found.resumed_at.append(step)
    found.history.append((found.head, mechanism))
    if "phase" in values:
        if not isinstance(values["phase"], str):
            raise UnusableLine("has a phase that is not a string")
        found.phases[values["phase"]] += 1
    together = _whole_number(values, "processes", 1) if "processes" in values else 1
    if together > 1:
        found.processes[together] += 1
    if "run" in values:
        if found.run is not None or not isinstance(values["run"], str) or not is_head(values["run"]):
            raise UnusableLine("names the run a second time")
        found.run = values["run"]


def _whole_number(values: Mapping[str, Any], name: str, low: int) -> int:
    value = values.get(name)
    if type(value) is not int or value < low:
        raise UnusableLine(f"is not a valid step: its {name} is not a whole number of at least {low}")
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if type(value) not in (int, float) or not 0 < value < 1e300:  # type: ignore[operator]
        raise UnusableLine(f"is not a valid step: its {name} is not a number above 0")
    return float(value)  # type: ignore[arg-type]


def _link(head: str, content: bytes, kind: bytes) -> str:
    return hashlib.blake2b(head.encode() + content, digest_size=16, person=b"dp ledger " + kind).hexdigest()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise UnusableLine("has a duplicate entry")
    return values


def _no_number(name: str) -> NoReturn:
    raise UnusableLine(f"has {name} instead of a number")
