"""``dp-microadam evaluate``: test accuracy of a run's latest checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dp_microadam.workbench.command_line.commands.running import (
    class_figures,
    language_metrics,
    lost_steps_note,
    open_run,
    print_language,
    privacy_line,
)
from dp_microadam.workbench.command_line.completers import complete_with, run_folders


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="test accuracy of a run's latest checkpoint",
        description="Test accuracy of a run's latest checkpoint. The run may still be training meanwhile.",
        epilog="example:\n  dp-microadam evaluate runs/mine --json",
    )
    complete_with(run_folders, parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder"))
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    experiment = open_run(options.run_dir)
    result = experiment.trainer.peek()
    counts, weights = experiment.test_results()
    accuracy = counts.accuracy
    language = language_metrics(experiment)
    if options.json:
        values = {
            "test_accuracy": accuracy,
            **class_figures(experiment, counts),
            **language,
            "weights": weights,
            "steps_done": result.steps_done,
            "updates": result.updates,
            "private": result.private,
            "epsilon": result.epsilon,
            "delta": result.delta,
        }
        print(json.dumps(values, ensure_ascii=False))
        return 0
    print(f"evaluated with the {weights}{lost_steps_note(result) or f' after {result.updates} steps'}")
    print_language(language)
    print(f"test accuracy {100 * accuracy:.2f} %")
    print(privacy_line(result))
    return 0
