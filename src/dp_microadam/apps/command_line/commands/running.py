"""What the commands that work on runs share."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dp_microadam.errors import DPMicroAdamError, InputError

if TYPE_CHECKING:
    from dp_microadam.apps.recipes.assemble import Experiment
    from dp_microadam.training.distributed import Ranks
    from dp_microadam.training.trainer import RunResult


INTERRUPTED = 130
"""Exit code of a run that was asked to stop, as shells have it."""


def add_display(parser: argparse.ArgumentParser) -> None:
    """How much a run shows."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument(
        "--show-private-metrics",
        action="store_true",
        help="also show loss and accuracy on training batches, which are outside the guarantee",
    )


def open_run(
    run_dir: Path, show_progress: bool = False, show_private_metrics: bool = False, ranks: Ranks | None = None
) -> Experiment:
    """The experiment whose folder this is.

    Raises:
        InputError: if it is not the folder of a run.
    """
    from dp_microadam.apps.recipes.recipe import Recipe

    # Of several processes only the first needs to see the folder.
    recipe = Recipe.from_toml(_config_of(run_dir) if ranks is None else ranks.from_main(lambda: _config_of(run_dir)))

    from dp_microadam.apps.recipes.assemble import assemble

    return assemble(recipe, run_dir, show_progress=show_progress, show_private_metrics=show_private_metrics, ranks=ranks)


def _config_of(run_dir: Path) -> str:
    from dp_microadam.training.run_folder import CONFIG, never_trained

    config = run_dir / CONFIG
    if not config.is_file() and never_trained(run_dir):
        raise InputError(
            f"run {str(run_dir)!r} was killed before its configuration was written; nothing was trained and no step is spent: "
            f"begin it again with dp-microadam train RECIPE --run-dir {run_dir}"
        )
    if not config.is_file():
        raise InputError(
            f"run is {str(run_dir)!r}, which has no {CONFIG}: it is not the folder of a run, or of one begun from Python, "
            "where it goes on with trainer.resume(run).fit(data)"
        )
    return config.read_text(encoding="utf-8")


def train(experiment: Experiment, options: argparse.Namespace) -> int:
    """Train, draw the curves and say how it ended."""
    result = experiment.fit()
    if experiment.trainer.ranks.main:
        _draw(experiment, options, result)
    accuracy, weights = conclude(experiment, options, result)
    if experiment.trainer.ranks.main:
        _keep(experiment, accuracy, weights, result)
    return 0 if result.finished else INTERRUPTED


def conclude(experiment: Experiment, options: argparse.Namespace, result: RunResult) -> tuple[float, str]:
    """The last lines: where everything is, test accuracy and ε. Returns that accuracy, and of which weights it is."""
    accuracy, weights = experiment.test_accuracy()
    if not experiment.trainer.ranks.main:
        return accuracy, weights
    head = ledger_head(result)
    if options.json:
        print(
            json.dumps(
                {
                    "run_dir": str(result.run_dir),
                    "finished": result.finished,
                    "private": result.private,
                    "test_accuracy": accuracy,
                    "epsilon": result.epsilon,
                    "delta": result.delta,
                    "steps_done": result.steps_done,
                    "updates": result.updates,
                    "ledger_head": head,
                    **result.metrics,
                }
            )
        )
        return accuracy, weights
    print(f"run folder {result.run_dir}")
    if head is not None:
        print(f"ledger's last hash {head}")
    if not result.finished:
        print(f"stopped after {result.steps_done} steps; go on with: dp-microadam resume {result.run_dir}")
    print(f"evaluated with the {weights}{lost_in_words(result)}")
    print(f"test accuracy {100 * accuracy:.2f} %")
    print(privacy_line(result))
    return accuracy, weights


def _keep(experiment: Experiment, accuracy: float, weights: str, result: RunResult) -> None:
    """The test accuracy, for the report of the run."""
    from dp_microadam.training.run_folder import TEST

    experiment.trainer.record.write_json(
        TEST, {"test_accuracy": accuracy, "weights": weights, "updates": result.updates, "steps_done": result.steps_done}
    )


def lost_in_words(result: RunResult) -> str:
    """What a kill, or a process that still trains, leaves between the weights and what was spent."""
    lost = result.steps_done - result.updates
    return f" after {result.updates} steps; {lost} more were spent and are not in them" if lost else ""


def ledger_head(result: RunResult) -> str | None:
    """The hash of the run's ledger as it is now, to be kept elsewhere; None without clipping and noise."""
    if result.epsilon is None:
        return None
    from dp_microadam.privacy.ledger import read_ledger

    return read_ledger(result.run_dir).head


def privacy_line(result: RunResult) -> str:
    """The line that ends a run."""
    if result.epsilon is None:
        return "not private: trained without clipping and noise"
    from dp_microadam.privacy.statement import round_up

    line = f"ε = {round_up(result.epsilon)} at δ = {result.delta:g}"
    return line if result.private else f"not private (fixed seed); the same run without a seed would spend {line}"


def _draw(experiment: Experiment, options: argparse.Namespace, result: RunResult) -> None:
    from dp_microadam.apps.reporting.curves import draw_curves
    from dp_microadam.training.run_folder import CURVES

    metrics = experiment.trainer.record.metrics()
    if not metrics:
        return
    try:
        draw_curves(metrics, result.run_dir / CURVES, title=experiment.recipe.name, private=result.private)
    except DPMicroAdamError as error:
        say(options, f"{CURVES} was not drawn: {error}")


def say(options: argparse.Namespace, text: str) -> None:
    """One line for a person; with ``--json`` standard output is for JSON alone."""
    print(text, file=sys.stderr if options.json else sys.stdout)
