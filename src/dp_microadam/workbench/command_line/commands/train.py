"""``dp-microadam train``, ``resume`` and ``evaluate``: train a model from a recipe, go on with a run, look at it."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dp_microadam.workbench.command_line.arguments import add_json, add_recipe, add_run
from dp_microadam.workbench.command_line.running import add_display, figures_of, finish, open_run, say, say_figures

if TYPE_CHECKING:
    from dp_microadam.training.distributed import Ranks
    from dp_microadam.workbench.recipes.recipe import Recipe


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a recipe (default: the demo)",
        description="Train a model from a recipe: the name of a built-in recipe, or a TOML file. Without an argument the demo "
        "is trained. Started by torchrun, several processes train together.",
        epilog="examples:\n  dp-microadam train\n  dp-microadam train fashion-mnist --set epsilon=4 --run-dir runs/mine\n"
        "  torchrun --nproc-per-node 8 -m dp_microadam train imagenet",
    )
    add_recipe(parser, nargs="?", default="demo", help="name or TOML file of a recipe (default: demo)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder to create (default: a new one under runs/)")
    add_display(parser)
    parser.set_defaults(run=train)

    parser = subparsers.add_parser(
        "resume",
        help="continue a run that was stopped or killed",
        description="Continue a run that was stopped or killed. Steps after its last checkpoint are lost but stay spent.",
        epilog="example:\n  dp-microadam resume runs/mine",
    )
    add_run(parser)
    add_display(parser)
    parser.set_defaults(run=resume)

    parser = subparsers.add_parser(
        "evaluate",
        help="test accuracy of a run's latest checkpoint",
        description="Test accuracy of a run's latest checkpoint. The run may still be training meanwhile.",
        epilog="example:\n  dp-microadam evaluate runs/mine --json",
    )
    add_run(parser)
    add_json(parser)
    parser.set_defaults(run=evaluate)


def train(options: argparse.Namespace) -> int:
    from dp_microadam.training.run_folder import refuse_existing
    from dp_microadam.workbench.recipes.recipe_files import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    if options.run_dir is not None:
        refuse_existing(options.run_dir)
    recipe = _as_single_run(recipe, options)
    if recipe.data == "table" and not recipe.columns and not {"mean", "std"} <= recipe.data_options.keys():
        # Decided by the recipe alone: whether the numbers are large is private.
        say(
            options,
            "numbers of the table are taken as they are; if they are not about as large as 1, declare the ranges of its "
            "columns in [columns]",
        )

    # Imported once recipe and folder are known to be usable: torch takes seconds to load.
    from dp_microadam.training.distributed import torchrun_processes
    from dp_microadam.workbench.recipes.assemble import assemble

    with torchrun_processes() as ranks:
        experiment = assemble(
            recipe,
            options.run_dir,
            show_progress=not options.quiet,
            show_private_metrics=options.show_private_metrics,
            ranks=ranks,
        )
        if ranks.main:
            for note in experiment.notes():
                say(options, note)
        return finish(experiment, options, experiment.fit())


def _as_single_run(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The recipe without its search; warns of searches that were spent on the same data."""
    from dp_microadam.errors import PrivacyWarning
    from dp_microadam.workbench.recipes.tuning import searches_on_same_data

    if recipe.tune:
        say(options, "[tune] is left out: this is a single run with the recipe's own values; dp-microadam tune makes a search")
    folder = Path("runs") if options.run_dir is None else options.run_dir.parent
    for spent in searches_on_same_data(recipe, folder) if recipe.private else []:
        warnings.warn(
            f"the search in {spent} has spent privacy of the same data; both add up: dp-microadam budget {spent} RUN, with the "
            "folder of this run",
            PrivacyWarning,
            stacklevel=1,
        )
    return replace(recipe, tune={})


def resume(options: argparse.Namespace) -> int:
    from dp_microadam.training.run_folder import declared_search

    if (recipe_of_search := declared_search(options.run_dir)) is not None:
        from dp_microadam.workbench.command_line.commands.tune import search
        from dp_microadam.workbench.recipes.recipe import Recipe

        return search(Recipe.from_toml(recipe_of_search), options.run_dir, options)

    from dp_microadam.training.distributed import torchrun_processes

    with torchrun_processes() as ranks:
        return _resume(options, ranks)


def _resume(options: argparse.Namespace, ranks: Ranks) -> int:
    from dp_microadam.training.run_folder import never_trained

    experiment = open_run(
        options.run_dir, show_progress=not options.quiet, show_private_metrics=options.show_private_metrics, ranks=ranks
    )
    trainer = experiment.trainer
    # Killed before its first checkpoint, the run has spent nothing: it starts from the beginning.
    if not ranks.from_main(lambda: never_trained(options.run_dir)):
        trainer.resume()
    if not trainer.finished:
        return finish(experiment, options, experiment.fit())
    result, test = trainer.result(), figures_of(experiment)
    if ranks.main:
        say(options, f"run {options.run_dir} is finished, after {result.steps_done} of {trainer.plan.steps} steps")
        say_figures(options, result, test, {"run_dir": str(result.run_dir), "finished": True, **result.metrics})
    return 0


def evaluate(options: argparse.Namespace) -> int:
    experiment = open_run(options.run_dir)
    result = experiment.trainer.peek()
    say_figures(options, result, figures_of(experiment))
    return 0
