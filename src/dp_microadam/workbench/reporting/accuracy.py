"""The accuracy of runs on test data: by class, and beside what one gets by always naming the most frequent class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dp_microadam.workbench.reporting.formats import is_number
from dp_microadam.workbench.reporting.run import Run
from dp_microadam.workbench.reporting.run_figures import labels_of
from dp_microadam.workbench.reporting.tables import Cell, Table, cell

_NOT_PROTECTED = "Test examples were not used for training, and are not covered by the privacy guarantee."


def recall_table(runs: Sequence[Run]) -> Table | None:
    """Recall with a row per class and a column per run; None if no run recorded it."""
    recalls = [_recall(run) for run in runs]
    classes = list(dict.fromkeys(name for one in recalls for name in one))
    if not classes:
        return None
    lines = [[name, *(_percent(one.get(name)) for one in recalls)] for name in classes]
    header = ["class", *(labels_of(runs) if len(runs) > 1 else ["recall (%)"])]
    note = "Recall: of the test examples of a class, the share that the model gives this class." + (
        " In %." if len(runs) > 1 else ""
    )
    return Table.of("recall", "Recall by class", header, lines, note=note)


def accuracy_html(runs: Sequence[Run], table: Table | None) -> str:
    """The section about accuracy."""
    shown = "\n".join(_numbers(run, label if len(runs) > 1 else "") for run, label in zip(runs, labels_of(runs), strict=True))
    measured = any(is_number(run.test.get("test_accuracy")) for run in runs)
    note = f'<p class="note">{escape(_NOT_PROTECTED)}</p>' if measured else ""
    by_class = table.html() if table is not None else ""
    inside, below = (by_class, "") if len(runs) == 1 else ("", by_class)
    return f'<div class="cards">\n{shown}\n{inside}\n</div>\n{note}{below}'


def _numbers(run: Run, label: str) -> str:
    heading = f"<h3>{escape(label)}</h3>" if label else ""
    if run.accuracy is None:
        return f'<article class="card">{heading}<p class="note">Accuracy was not measured.</p></article>'
    value, what = run.accuracy
    numbers = [(f"{100 * value:.2f} %", what)]
    majority = run.test.get("majority_accuracy")
    if is_number(majority):
        numbers.append((f"{100 * majority:.2f} %", "for always naming the most frequent class"))
    worst = _worst(run)
    if worst is not None:
        numbers.append((f"{100 * worst[1]:.2f} %", f"recall of {worst[0]}, the worst class"))
    facts = {"Measured on": _measured_on(run), "Weights": str(run.test.get("weights", ""))}
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    figures = "".join(f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in numbers)
    return f'<article class="card">{heading}<div class="numbers">{figures}</div><dl>{rows}</dl></article>'


def _measured_on(run: Run) -> str:
    count, classes = run.test.get("test_examples"), len(_recall(run))
    parts = [f"{count:,} test examples" if is_number(count) else "", f"{classes} classes" if classes else ""]
    return ", ".join(part for part in parts if part)


def _recall(run: Run) -> Mapping[str, Any]:
    found = run.test.get("recall")
    return found if isinstance(found, dict) else {}


def _worst(run: Run) -> tuple[str, float] | None:
    known = [(name, float(value)) for name, value in _recall(run).items() if is_number(value)]
    return min(known, key=lambda one: one[1]) if known else None


def _percent(value: Any) -> Cell:
    return cell(f"{100 * value:.1f}") if is_number(value) else cell("none", faint=True)
