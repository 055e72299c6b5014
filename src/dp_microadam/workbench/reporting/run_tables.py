"""The tables of a report about one or several runs, with all data of its figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dp_microadam.ledger.statement import round_up
from dp_microadam.training.model_card import DIAGNOSTICS_NOTE, diagnostics_rows
from dp_microadam.workbench.reporting.formats import confidence_in_words, duration, fixed, in_bytes, significant
from dp_microadam.workbench.reporting.run import Run
from dp_microadam.workbench.reporting.run_figures import labels_of
from dp_microadam.workbench.reporting.tables import Cell, Table, cell

_UNKNOWN = cell("not recorded", faint=True)

HELD_OUT = (
    "Measured on examples that were not used for training; these examples are not covered by the privacy guarantee. "
    "Throughput is the expected batch size times steps per second."
)


def summary(runs: Sequence[Run]) -> Table:
    """Summary with a column per run: method, data, accuracy, privacy, steps, time and memory."""
    perplexities: list[object] = ["" if run.perplexity is None else f"{run.perplexity:.2f}" for run in runs]
    facts: dict[str, list[object]] = {
        "folder": [run.name for run in runs],
        "method": [run.method for run in runs],
        "data": [run.settings.get("data", _UNKNOWN) for run in runs],
        "model": [run.settings.get("model", _UNKNOWN) for run in runs],
        "accuracy": [accuracy_in_words(run) for run in runs],
        **({"test perplexity": perplexities} if any(perplexities) else {}),
        "private": [_stamp(run) for run in runs],
        "ε spent": [epsilon_in_words(run) for run in runs],
        "δ": [f"{run.privacy['delta']:g}" if run.privacy.get("delta") else "none" for run in runs],
        "trained on": [trained_on(run) or _UNKNOWN for run in runs],
        "steps": [steps_in_words(run) for run in runs],
        "state": [run.state for run in runs],
        "training time": [about(run.training_seconds) for run in runs],
        "throughput": [_mean_throughput(run) for run in runs],
        "optimizer state": [_state_per_parameter(run) for run in runs],
    }
    header = ["", *labels_of(runs)] if len(runs) > 1 else ["", runs[0].name]
    return Table.of("summary", "Summary", header, [[name, *values] for name, values in facts.items()], words=True)


def accuracy_in_words(run: Run) -> Cell:
    if run.accuracy is None:
        return cell("not measured", faint=True)
    value, what = run.accuracy
    return cell(f"{100 * value:.2f} %", what)


def epsilon_in_words(run: Run) -> Cell:
    if run.epsilon is None:
        return cell("none", "no clipping, no noise")
    if run.private:
        return cell(round_up(run.epsilon), run.whom) if run.whom else cell(round_up(run.epsilon))
    return cell("no guarantee", f"{round_up(run.epsilon)} with unpredictable randomness")


def steps_in_words(run: Run) -> str:
    lost = f", {run.lost:,} of them spent and lost" if run.lost else ""
    return f"{run.steps:,} of {run.steps_planned:,}{lost}"


def trained_on(run: Run) -> str:
    """How many examples or users the run was trained on, which is public; empty if it is not recorded."""
    count = run.ledger.plan.dataset_size if run.ledger is not None else run.statistics.get("dataset_size")
    return f"{count:,} {run.unit}s" if count else ""


def _stamp(run: Run) -> Cell:
    return cell("yes") if run.private else cell("no", run.stamp.removeprefix("not private: "))


def about(seconds: float | None) -> object:
    """An approximate duration, as a sum of rounded ones."""
    return _UNKNOWN if seconds is None else f"about {duration(seconds)}"


def _mean_throughput(run: Run) -> object:
    seconds, batch = run.training_seconds, run.expected_batch
    if seconds is None or not batch or not run.evaluations:
        return _UNKNOWN
    return f"{significant(float(f'{batch * run.evaluations[-1].step / seconds:.1e}'))} expected {run.unit}s/s"


def _state_per_parameter(run: Run) -> object:
    if run.optimizer_state is None:
        return _UNKNOWN
    own, adam = run.optimizer_state
    return cell(f"{8 * own / adam:.2f} bytes per parameter", "Adam: 8")


def evaluations(run: Run, *, number: int, label: str) -> Table | None:
    """Table with a row per evaluation: the data of the learning curves."""
    columns = {
        "ε": ("epsilon", round_up),
        "validation accuracy (%)": ("validation_accuracy", lambda value: f"{100 * value:.2f}"),
        "validation loss (nats)": ("validation_loss", lambda value: f"{value:.4f}"),
        "averaged: accuracy (%)": ("ema_validation_accuracy", lambda value: f"{100 * value:.2f}"),
        "averaged: loss (nats)": ("ema_validation_loss", lambda value: f"{value:.4f}"),
        "learning rate": ("learning_rate", lambda value: f"{value:.4g}"),
    }
    kept = {head: what for head, what in columns.items() if any(one.get(what[0]) is not None for one in run.evaluations)}
    if not kept:
        return None
    rates = dict(run.throughput)
    lines = []
    for one in run.evaluations:
        figures = [write(value) if (value := one.get(name)) is not None else "" for name, write in kept.values()]
        lines.append([f"{one.step:,}", *figures, *([fixed(rates[one.step], 0) if one.step in rates else ""] if rates else [])])
    header = ["step", *kept, *([f"{run.unit}s/s (expected)"] if rates else [])]
    return Table.of(f"evaluations-{number}", f"Evaluations of {label}", header, lines)


def memory(runs: Sequence[Run]) -> Table | None:
    """Table of optimizer state compared with Adam's, and peak memory."""
    lines: list[list[object]] = []
    for run, label in zip(runs, labels_of(runs), strict=True):
        statistics = run.statistics
        if run.optimizer_state is not None:
            own, adam = run.optimizer_state
            peak = (
                f"{in_bytes(statistics['peak_memory_bytes'])} of {statistics['peak_memory_of']}"
                if statistics.get("peak_memory_bytes")
                else ""
            )
            counts = [f"{statistics['parameters']:,}", f"{statistics['trained_parameters']:,}"]
            lines.append([label, *counts, in_bytes(own), in_bytes(adam), f"{100 * own / adam:.1f} %", peak])
    if not lines:
        return None
    header = ["run", "parameters", "of these trained", "optimizer state", "Adam's would be", "share of Adam's", "peak memory"]
    if not any(line[-1] for line in lines):  # as of a search, whose runs it would tell about
        header, lines = header[:-1], [line[:-1] for line in lines]
    note = (
        "Adam keeps two float32 moments, 8 bytes per trained parameter. Peak memory of a process includes data and libraries."
    )
    return Table.of("memory", "Memory", header, lines, note=note)


def settings(runs: Sequence[Run]) -> Table | None:
    """Table of all settings of the recipes; those in which runs differ are bold."""
    flat = [_flat(run.settings) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    if not keys:
        return None
    lines: list[list[object]] = []
    for key in keys:
        values = [str(one.get(key, "")) for one in flat]
        lines.append([key, *(cell(value, best=len(set(values)) > 1) for value in values)])
    header = ["setting", *(labels_of(runs) if len(runs) > 1 else ["value"])]
    note = "Settings in which the runs differ are bold." if len(runs) > 1 else ""
    return Table.of("settings", "Settings", header, lines, note=note, words=True)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def chosen_in_words(run: Run) -> str:
    """The hyperparameters that a search chose, of a run that is the result of one; else empty."""
    flat = _flat(run.settings)
    searched = dict.fromkeys(key.removeprefix("tune.") for key in flat if key.startswith("tune."))
    names = dict.fromkeys(re.sub(r"\.(low|high|count|spacing)$", "", key) for key in searched)
    return ", ".join(f"{name} = {flat[name]}" for name in names if name in flat)


def diagnostics(run: Run, *, number: int, label: str) -> Table | None:
    """Table of the last diagnostics of MicroAdam."""
    if run.diagnostics is None:
        return None
    header, rows = diagnostics_rows(run.diagnostics)
    return Table.of(f"diagnostics-{number}", f"Diagnostics of {label}", header, rows, note=DIAGNOSTICS_NOTE)


def audit(content: Mapping[str, Any], *, name: str) -> Table:
    """Table of audit findings: claimed ε, lower bound, and the bound of a perfect attack."""
    lines: list[list[object]] = []
    for one in content["findings"]:
        reach = one["claim"] < one["largest"]
        verdict = "claim refuted" if one["violated"] else "within the claim" if reach else "claim out of reach"
        lines.append(
            [
                cell(one["name"], one["question"]),
                verdict,
                f"ε ≥ {one['bound']:.2f}",
                f"{one['claim']:.2f}",
                f"{one['delta']:g}",
                f"ε ≥ {one['largest']:.2f}",
                confidence_in_words(one["confidence"]),
            ]
        )
    header = ["audit", "verdict", "shown", "claimed ε", "at δ", "a perfect attack shows", "confidence"]
    note = (
        "An audit is an attack: it shows that ε is at least a number. A number below the claim is no proof of privacy. A claim "
        "is out of reach if even a perfect attack of this size shows less."
    )
    return Table.of(name, "Audits", header, lines, note=note)
