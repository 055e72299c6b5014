"""Publishes the run that a search selected: its files, written anew, without traces of how long the search took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dp_microadam.durable_files import sync_folder, write_durably, write_text_durably
from dp_microadam.ledger.ledger import LEDGER_NAME, planned_event, read_ledger
from dp_microadam.ledger.record import NO_HEAD, chained_line, read_object
from dp_microadam.ledger.statement import statement_in_words, write_privacy_report
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.run_folder import CHECKPOINTS, CONFIG, LOG, METRICS, SELECTION, STATISTICS, privacy_of, read_metrics

_OF_THE_PROCESS = ("peak_memory_bytes", "peak_memory_of")
"""Statistics that all runs of a process have a part in."""

_METRICS = ("step", "epsilon", "learning_rate", "diagnostics")
"""What is published of a line of metrics beside those of validation data; the pace would tell the first run of a process."""

_COPIED = ("phase", "processes")


def write_published(run: Path, target: Path, selection: Mapping[str, Any]) -> None:
    """Write the files of the selected ``run`` into the new folder ``target``.

    Formal guarantees: what is written is a function of this run alone and of ``selection``, which is public. Left out are all
    times, traces of interruptions, earlier checkpoints, and figures that depend on the process it shared with other runs.
    All files are new, so that the times that a file system keeps are those of the publication.
    """
    target.mkdir(mode=0o755)
    head = _copy_ledger(run, target)
    position, content, _ = CheckpointFolder(run / CHECKPOINTS).newest()
    CheckpointFolder(target / CHECKPOINTS).write(position, {**content, "ledger_head": head})
    if (run / CONFIG).is_file():
        write_text_durably(target / CONFIG, (run / CONFIG).read_text(encoding="utf-8"))
    lines = [
        {name: value for name, value in line.items() if name in _METRICS or "validation_" in name} for line in read_metrics(run)
    ]
    write_text_durably(target / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    statistics = json.loads((run / STATISTICS).read_text(encoding="utf-8"))
    _write_json(target / STATISTICS, {name: value for name, value in statistics.items() if name not in _OF_THE_PROCESS})
    _write_json(target / SELECTION, selection)
    report = privacy_of(target)
    write_privacy_report(target, report, statement_in_words(report))
    stamp = "private" if report["private"] else "not private"
    write_text_durably(target / LOG, f"published as the best of a random number of runs; this run is {stamp}\n")
    sync_folder(target)


def _copy_ledger(run: Path, target: Path) -> str:
    """Copy the ledger with a new chain of hashes and without the marks of processes that opened it; returns its last hash."""
    record = read_ledger(run)
    first, *lines = (run / LEDGER_NAME).read_bytes().split(b"\n")
    events = {values["step"]: values for line in lines if line and (values := read_object(line)) is not None}
    header = read_object(first) or {}
    line, head = chained_line({name: value for name, value in header.items() if name != "chain"}, NO_HEAD)
    with write_durably(target / LEDGER_NAME, replace=False) as file:
        file.write(line)
        for step in range(record.steps):
            event = planned_event(record.plan, step)
            event |= {name: value for name, value in events.get(step, {}).items() if name in _COPIED}
            line, head = chained_line(event, head)
            file.write(line)
    return head


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text_durably(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
