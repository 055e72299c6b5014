"""``dp-microadam resume``: continue a run that was stopped or killed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dp_microadam.workbench.command_line.commands.running import add_display, conclude, open_run, say, train
from dp_microadam.workbench.command_line.completers import complete_with, run_folders

if TYPE_CHECKING:
    from dp_microadam.training.distributed import Ranks


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "resume",
        help="continue a run that was stopped or killed",
        description="Continue a run that was stopped or killed. Steps after its last checkpoint are lost but stay spent.",
        epilog="example:\n  dp-microadam resume runs/mine",
    )
    complete_with(run_folders, parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder"))
    add_display(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.training.run_folder import declared_search

    if (recipe_of_search := declared_search(options.run_dir)) is not None:
        return _resume_search(recipe_of_search, options)

    from dp_microadam.training.distributed import torchrun_processes

    with torchrun_processes() as ranks:
        return _resume(options, ranks)


def _resume_search(recipe_toml: str, options: argparse.Namespace) -> int:
    from dp_microadam.workbench.command_line.commands.tune import search
    from dp_microadam.workbench.recipes.recipe import Recipe

    options.estimate = False
    return search(Recipe.from_toml(recipe_toml), options.run_dir, options)


def _resume(options: argparse.Namespace, ranks: Ranks) -> int:
    from dp_microadam.training.run_folder import never_trained

    experiment = open_run(
        options.run_dir, show_progress=not options.quiet, show_private_metrics=options.show_private_metrics, ranks=ranks
    )
    # Killed before its first checkpoint, the run has spent nothing: it starts from the beginning.
    if ranks.from_main(lambda: never_trained(options.run_dir)):
        return train(experiment, options)
    experiment.trainer.resume()
    if not experiment.trainer.finished:
        return train(experiment, options)
    result, planned = experiment.trainer.result(), experiment.trainer.plan.steps
    short = f": max_steps = {result.steps_done} ended it, of {planned} planned" if result.steps_done < planned else ""
    if ranks.main:
        say(options, f"run {options.run_dir} is finished{short}")
    conclude(experiment, options, result)
    return 0
