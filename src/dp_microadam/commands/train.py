"""``dp-microadam train`` and ``resume``: run a recipe, or go on with a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import InputError

if TYPE_CHECKING:
    from dp_microadam.recipes.assemble import Experiment


def add_arguments(subparsers: Any) -> None:
    train = subparsers.add_parser(
        "train",
        help="train a recipe; without one, the demo",
        description="Train a recipe: the name of one in the box, or a TOML file. Without one, the demo.",
    )
    train.add_argument("recipe", nargs="?", default="demo", help="name or TOML file of a recipe (default: demo)")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one key")
    train.add_argument("--run-dir", type=Path, help="folder of the run (default: a new one under runs/)")
    _add_display(train)
    train.set_defaults(run=run_train)
    resume = subparsers.add_parser("resume", help="go on with a run that was stopped or killed")
    resume.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    _add_display(resume)
    resume.set_defaults(run=run_resume)


def _add_display(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument(
        "--show-private-metrics",
        action="store_true",
        help="also show loss and accuracy on training batches, which are outside the guarantee",
    )


def run_train(options: argparse.Namespace) -> int:
    from dp_microadam.recipes.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    if options.run_dir is not None:
        _refuse_existing(options.run_dir)

    from dp_microadam.recipes.assemble import assemble

    experiment = assemble(
        recipe,
        options.run_dir,
        show_progress=not options.quiet,
        show_private_metrics=options.show_private_metrics,
    )
    return _train(experiment, options)


def run_resume(options: argparse.Namespace) -> int:
    experiment = open_run(options.run_dir, not options.quiet, options.show_private_metrics)
    experiment.trainer.resume()
    if experiment.trainer.finished:
        _say(options, f"run {options.run_dir} is finished")
        _conclude(experiment, options, experiment.trainer.result())
        return 0
    return _train(experiment, options)


def open_run(run_dir: Path, show_progress: bool = False, show_private_metrics: bool = False) -> Experiment:
    """The experiment whose folder this is.

    Raises:
        InputError: if it is not the folder of a run.
    """
    from dp_microadam.recipes.recipe import Recipe
    from dp_microadam.training.run_folder import CONFIG

    config = run_dir / CONFIG
    if not config.is_file():
        raise InputError(f"run is {str(run_dir)!r}, which is not the folder of a run: it has no {CONFIG}")
    recipe = Recipe.from_toml(config.read_text(encoding="utf-8"))

    from dp_microadam.recipes.assemble import assemble

    return assemble(recipe, run_dir, show_progress=show_progress, show_private_metrics=show_private_metrics)


def _train(experiment: Experiment, options: argparse.Namespace) -> int:
    result = experiment.fit()
    _draw(experiment, options, result)
    _conclude(experiment, options, result)
    return 0


def _conclude(experiment: Experiment, options: argparse.Namespace, result: Any) -> None:
    """The last lines: where everything is, test accuracy and ε."""
    accuracy, weights = experiment.test_accuracy()
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
                    **result.metrics,
                }
            )
        )
        return
    print(f"run folder {result.run_dir}")
    print(f"evaluated with the {weights}")
    print(f"test accuracy {100 * accuracy:.2f} %")
    print(privacy_line(result))


def privacy_line(result: Any) -> str:
    """The line that ends a run."""
    if result.epsilon is None:
        return "not private: trained without clipping and noise"
    line = f"ε = {round_up(result.epsilon)} at δ = {result.delta:g}"
    return line if result.private else f"not private (fixed seed); the same run without a seed would spend {line}"


def round_up(epsilon: float) -> str:
    """Two decimals, never below the value: a guarantee must not be rounded down.

    >>> round_up(7.991), round_up(8.0), round_up(0.12)
    ('8.00', '8.00', '0.12')
    """
    import math

    return f"{math.ceil(epsilon * 100 - 1e-9) / 100:.2f}"


def _draw(experiment: Experiment, options: argparse.Namespace, result: Any) -> None:
    from dp_microadam.reporting.curves import draw_curves
    from dp_microadam.training.run_folder import CURVES

    metrics = experiment.trainer.folder.metrics()
    if not metrics:
        return
    try:
        draw_curves(metrics, result.run_dir / CURVES, title=experiment.recipe.name, private=result.private)
    except ImportError:
        _say(options, "curves.png was not drawn: matplotlib is not installed (pip install 'dp-microadam[plots]')")


def _refuse_existing(run_dir: Path) -> None:
    from dp_microadam.training.run_folder import refuse_existing

    refuse_existing(run_dir)


def _say(options: argparse.Namespace, text: str) -> None:
    print(text, file=sys.stderr if options.json else sys.stdout)
