"""The privacy statement of a run: as ``privacy.json``, and in words that a privacy officer can read.

Both are computed from the ledger alone, so they say what was spent and not what was planned.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dp_microadam.accounting.costs import group_epsilon
from dp_microadam.accounting.meaning import meaning, meaning_in_words, round_up
from dp_microadam.durable_files import write_text_durably
from dp_microadam.ledger.ledger import LedgerRecord
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.validation import require_integer

PRIVACY_NAME = "privacy.json"
STATEMENT_NAME = "privacy.txt"

NEIGHBOURS = "two training sets are neighbours if one is the other with one unit added or removed"

OUTSIDE_THE_GUARANTEE = (
    "figures measured on validation or test data, if that data is private too",
    "running time and other traces of the computation",
    "the choice of hyperparameters by looking at earlier runs; every run on the same data adds to the budget",
    "the number of training examples, which is taken as public",
    "how the data was split and prepared before training",
    "whether training data could be processed at all: a run that stops with an error says so",
    "attacks on floating-point arithmetic; noise from a cryptographic stream (secure) mitigates them without proof",
)

OUTSIDE_A_SELECTION = (
    "other runs of the search and how many there were, which must stay unknown; how long it took suggests their number"
)

_ACCOUNTANT_NAMES = {
    "rdp": "Rényi differential privacy, exact for the subsampled Gaussian, converted to (ε, δ)",
    "pld": "privacy loss distribution, discretised and rounded from above; RDP where the noise is below 0.05",
}


def privacy_report(record: LedgerRecord, *, group_size: int = 1) -> dict[str, Any]:
    """The privacy statement as a dict for JSON: ε, δ and everything a reader needs to judge them.

    ``group_size`` is the largest number of examples of one person, or of users, that are to be protected together.

    Formal guarantees: if ``private`` is true, what the run publishes of its training (parameters, optimizer state,
    and everything computed from them) is (``epsilon``, ``delta``)-differentially private for one unit, and
    (``group_epsilon``, ``delta``)-differentially private for ``group_size`` units. If it is false nothing is guaranteed,
    and ``epsilon`` only says what unpredictable randomness would have given.
    """
    require_integer("group_size", group_size, 1)
    plan, settings = record.plan, record.settings
    report: dict[str, Any] = {
        "private": settings.private,
        "epsilon": record.epsilon(),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "steps_planned": plan.steps,
        "steps_done": record.steps,
        "epsilon_planned": record.epsilon_after(plan.steps),
        "unit": unit_in_words(plan.unit, settings.unit_name),
        "neighbouring_relation": NEIGHBOURS,
        "group_size": group_size,
        "sampling": {
            "kind": "Poisson",
            "sample_rate": plan.sample_rate,
            "dataset_size": plan.dataset_size,
            "expected_batch_size": plan.batch_size,
        },
        "clipping": {"kind": settings.clipping, "sensitivity": settings.sensitivity},
        "noise": {
            "kind": "Gaussian",
            "noise_multiplier": plan.noise_multiplier,
            "deviation_of_the_sum": plan.noise_multiplier * settings.sensitivity * plan.noise_ratios.single_step,
            "deviation_of_the_mean": plan.noise_deviation(settings.sensitivity),
        },
        "randomness": settings.randomness,
        "run": record.run,
        "ledger_head": record.head,
        "versions": dict(record.versions),
        "public_by_declaration": ["all fields of the plan", *settings.public],
        "outside_the_guarantee": list(OUTSIDE_THE_GUARANTEE),
    }
    if settings.unit_name:
        report["unit_name"] = settings.unit_name
    if plan.unit == "user":
        report["sampling"]["examples_per_user"] = plan.examples_per_user
        report["neighbouring_relation"] = NEIGHBOURS.replace("unit", called(report)) + ", with all their examples, however many"
        report["outside_the_guarantee"] = [
            item.replace("number of training examples", f"number of {called(report)}s") for item in OUTSIDE_THE_GUARANTEE
        ]
    if any(part.plan.bands > 1 for part in record.plans):
        report["neighbouring_relation"] += ", while all others keep their numbers and so their groups"
    if plan.bands > 1:
        report["sampling"] |= {"kind": "Poisson in cyclic groups", "groups": plan.bands}
        report["noise"] |= {
            "kind": "Gaussian, correlated over steps",
            "bands": plan.bands,
            "coefficients": "banded square root",
        }
        steps, sessions = plan.participations(record.steps, record.resumed_at), 1 + len(record.resumed_at)
        report["composition"] = {"steps": steps, "sessions": sessions}
    report["meaning"] = meaning(record.spent, plan.delta)
    if any(part.plan.max_batch_size is not None for part in record.plans):
        report["neighbouring_relation"] += f"; the larger of the two has the {plan.dataset_size} units of the plan"
    if plan.max_batch_size is not None:
        report["sampling"]["kind"] += ", truncated"
        report["sampling"]["max_batch_size"] = plan.max_batch_size
    if isinstance(plan, SelectionPlan):
        report["selection"] = {
            "distribution_of_runs": plan.repetitions.name,
            "expected_runs": plan.expected_runs,
            "shape": plan.runs_shape,
            "epsilon_of_one_run": plan.single_run.epsilon_after(record.steps, record.resumed_at),
        }
        report["outside_the_guarantee"].append(OUTSIDE_A_SELECTION)
    if len(record.plans) > 1:
        report["plans_before"] = [
            {
                "steps_done": len(part.steps),
                "sample_rate": part.plan.sample_rate,
                "noise_multiplier": part.plan.noise_multiplier,
            }
            for part in record.plans[:-1]
        ]
    if record.phases:
        report["phases"] = dict(record.phases)
    if record.processes:
        report["processes"] = {str(count): steps for count, steps in record.processes.items()}
    if group_size > 1:
        report["group_epsilon"] = group_epsilon(record.spent, plan.delta, group_size)
    return report


def statement_in_words(report: dict[str, Any]) -> str:
    """The privacy report as plain text. ε is rounded up, never down."""
    opening, lines, outside = statement_parts(report)
    facts = "\n".join(f"{name + ':':<23}{text}" for name, text in lines)
    return f"{opening}\n{facts}\n\nOutside the guarantee:\n" + "".join(f"  - {item}\n" for item in outside)


def statement_parts(report: dict[str, Any]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """The statement in its parts: the claim, the facts behind it by name, and what is outside the guarantee."""
    sampling, noise, clipping, unit = report["sampling"], report["noise"], report["clipping"], called(report)
    claim = f"({round_up(report['epsilon'])}, {report['delta']:g})"
    if report["private"]:
        what = "Training, with the choice among runs, was" if "selection" in report else "Training was"
        opening = (
            f"PRIVATE. {what} {claim}-differentially private for {report['unit']}:\n"
            f"had that {unit} not been in the training data, the probability of any conclusion from the trained model would\n"
            f"have been smaller or larger by a factor of at most e^ε = {_factor(report['epsilon'])}, "
            "apart from a chance of δ.\n"
        )
    else:
        opening = (
            f"NOT PRIVATE. Sampling and noise were predictable ({report['randomness']}), so nothing is guaranteed.\n"
            f"With unpredictable randomness the same steps would have been {claim}-differentially private.\n"
        )
    whom = f", for a {unit}" if unit != "example" else ""
    # A run that continued, or was killed, may have spent more than its last statement says.
    later = " when this was written; what was spent since is in ledger.jsonl (dp-microadam budget)"
    unfinished = later if report["steps_done"] < report["steps_planned"] else ""
    facts = [
        ("ε, δ", f"{round_up(report['epsilon'])} at δ = {report['delta']:g}{whom}, for the steps done"),
        *meaning_in_words(report["meaning"], report["delta"]),
        ("Unit of privacy", report["unit"]),
        ("Neighbouring relation", report["neighbouring_relation"]),
        ("Groups", _groups_in_words(report)),
        ("Accountant", _ACCOUNTANT_NAMES[report["accountant"]]),
        ("Sampling", _sampling_in_words(sampling, unit)),
        ("Clipping", f"{clipping['kind']}; one {unit} changes the sum by at most {clipping['sensitivity']:g}"),
        (
            "Noise",
            f"Gaussian, {noise['noise_multiplier']:g} times that bound, added once per step to the sum, which is then "
            "divided by the expected batch size",
        ),
        ("Steps", f"{report['steps_done']} done of {report['steps_planned']} planned{unfinished}"),
        *_facts_of_some_runs(report, unit),
        ("ε of the whole plan", round_up(report["epsilon_planned"])),
        ("Randomness", report["randomness"]),
        ("Run", report["run"]),
        ("Ledger's last hash", f"{report['ledger_head']}; budget --anchor finds it in a complete ledger"),
        ("Public by declaration", "; ".join(report["public_by_declaration"])),
        ("Versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
    ]
    return opening, facts, list(report["outside_the_guarantee"])


def _facts_of_some_runs(report: Mapping[str, Any], unit: str) -> Iterator[tuple[str, str]]:
    """Several processes, correlated noise, phases, plans before this one, a search: what each did, and that ε covers it."""
    if "processes" in report:
        alone = report["steps_done"] - sum(report["processes"].values())
        taken = {"1": alone, **report["processes"]} if alone else report["processes"]
        numbers = "; ".join(f"{steps} steps by {count}" for count, steps in taken.items())
        yield "Processes", f"{numbers}, each with its share of the {unit}s and of the noise; they trust each other"
    if "composition" in report:
        noise, steps, sessions = report["noise"], report["composition"]["steps"], report["composition"]["sessions"]
        resumed = f" within one of its {sessions} sessions, which count each by itself" if sessions > 1 else ""
        yield (
            "Correlation",
            f"{noise['bands']} bands, {noise['coefficients']}: the noise of a step partly takes back that of the last "
            f"{noise['bands'] - 1}; no {unit} is in two steps closer than {noise['bands']}{resumed}, so ε is that of "
            f"{steps} steps with probability {report['sampling']['sample_rate']:.6g} and independent noise of "
            f"{noise['noise_multiplier']:g} times the bound",
        )
    if "phases" in report:
        each = ", ".join(f"{name} {steps}" for name, steps in report["phases"].items())
        yield "Phases", f"steps of each, all under the one plan: {each}"
    if "plans_before" in report:
        done = "; ".join(
            f"{one['steps_done']} steps with probability {one['sample_rate']:.6g} and noise of {one['noise_multiplier']:g} "
            "times the bound"
            for one in report["plans_before"]
        )
        yield "Plans before", f"{done}; every ε here is that of these steps and of the steps of this plan together"
    if "selection" in report:
        selection = report["selection"]
        yield (
            "Selection",
            f"the best of a random number of such runs ({selection['distribution_of_runs']}, {selection['expected_runs']:g} "
            "expected), each with hyperparameters drawn from a public list; ε covers the choice, as nothing of the other runs "
            f"is published; one run without a choice would have spent ε = {round_up(selection['epsilon_of_one_run'])}",
        )


def called(report: Mapping[str, Any]) -> str:
    """What a unit of a privacy report is called: its name, or else ``"example"`` or ``"user"``."""
    return str(report.get("unit_name") or ("user" if "examples_per_user" in report.get("sampling", {}) else "example"))


def unit_in_words(unit: str, name: str) -> str:
    """The unit of privacy of a run: an example or a user, that has a ``name`` or none.

    >>> unit_in_words("example", "patient"), unit_in_words("user", "patient")
    ('one patient (one training example each)', 'one patient with all their training examples')
    """
    if unit == "user":
        return f"one {name or 'user'} with all their training examples"
    return f"one {name} (one training example each)" if name else "one training example"


def _sampling_in_words(sampling: Mapping[str, Any], unit: str) -> str:
    rest = f"with probability {sampling['sample_rate']:.6g}, independently; {sampling['expected_batch_size']} expected per step"
    size, groups = sampling["dataset_size"], sampling.get("groups", 1)
    if "max_batch_size" in sampling:
        rest += f" and {sampling['max_batch_size']} at most: of more, so many are kept at random, and ε accounts for it"
    if groups == 1:
        words = f"each of {size} {unit}s in each step {rest}"
    else:
        groups_of = f"{size} {unit}s in {groups} groups by their number alone"
        words = f"{groups_of}; step t takes each {unit} of group t modulo {groups} {rest}"
    if "examples_per_user" in sampling:
        most = sampling["examples_per_user"]
        words += f"; of each, at most {most} examples, drawn anew in every step, enter as their mean"
    return words


def _factor(epsilon: float) -> str:
    """e^ε with three digits, rounded up; in powers of ten where that is shorter."""
    if epsilon > 700:
        return "more than 10^300"
    factor = math.exp(epsilon)
    digits = max(0, 2 - math.floor(math.log10(factor)))
    return f"{math.ceil(factor * 10**digits) / 10**digits:,.{digits}f}" if factor < 1e6 else f"{factor * 1.01:.1e}"


def _groups_in_words(report: dict[str, Any]) -> str:
    size, name = report["group_size"], called(report)
    if size == 1 and name != "example":
        return f"not computed; several {name}s together, such as a family, are protected less, set a group size to see how much"
    if size == 1:
        return "not computed; a person with several examples is protected less, set a group size to see how much"
    epsilon = round_up(report["group_epsilon"])
    how = "general group privacy" if {"composition", "selection"} & report.keys() else "privacy loss distribution"
    group = f"up to {size} {name}s together" if name != "example" else f"a person with up to {size} examples"
    return f"{group}: ε = {epsilon} at δ = {report['delta']:g}, by {how}"


def write_privacy_files(folder: str | os.PathLike[str], record: LedgerRecord, *, group_size: int = 1) -> dict[str, Any]:
    """Write ``privacy.json`` and ``privacy.txt`` atomically, and return the report."""
    report = privacy_report(record, group_size=group_size)
    write_privacy_report(folder, report, statement_in_words(report))
    return report


def write_privacy_report(folder: str | os.PathLike[str], report: Mapping[str, Any], words: str) -> None:
    """Write a report and its text as ``privacy.json`` and ``privacy.txt``, each atomically."""
    write_text_durably(Path(folder) / PRIVACY_NAME, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    write_text_durably(Path(folder) / STATEMENT_NAME, words)
