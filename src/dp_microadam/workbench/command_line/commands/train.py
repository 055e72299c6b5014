"""``dp-microadam train``: train a model from a recipe."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dp_microadam.workbench.command_line.commands.running import add_display, say, train
from dp_microadam.workbench.command_line.completers import complete_with, recipe_names, recipe_settings

if TYPE_CHECKING:
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
    recipe = parser.add_argument("recipe", nargs="?", default="demo", help="name or TOML file of a recipe (default: demo)")
    complete_with(recipe_names, recipe)
    override = parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one key of the recipe"
    )
    complete_with(recipe_settings, override)
    parser.add_argument("--bands", metavar="N", help="bands of correlated noise, auto or least; short for --set bands=N")
    parser.add_argument("--max-batch-size", metavar="M", help="most examples in a step; short for --set max_batch_size=M")
    parser.add_argument(
        "--unit", choices=("example", "user"), help="whom ε is for: an example, or a user; short for --set unit=…"
    )
    parser.add_argument(
        "--examples-per-user",
        metavar="K",
        help="with users: most examples of one in a step; short for --set examples_per_user=K",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder to create (default: a new one under runs/)")
    add_display(parser)
    parser.set_defaults(run=run)


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


def run(options: argparse.Namespace) -> int:
    from dp_microadam.training.run_folder import refuse_existing
    from dp_microadam.workbench.recipes.recipe_files import load_recipe

    short = {key: getattr(options, key) for key in ("bands", "max_batch_size", "unit", "examples_per_user")}
    given = [f"{key}={value}" for key, value in short.items() if value is not None]
    recipe = load_recipe(options.recipe, [*options.overrides, *given])
    if options.run_dir is not None:
        refuse_existing(options.run_dir)
    recipe = _as_single_run(recipe, options)
    if recipe.data == "table" and not recipe.columns and not {"mean", "std"} <= recipe.data_options.keys():
        # Decided by the recipe alone: whether the numbers are large is private.
        say(
            options,
            "numbers of the table are taken as they are; if they are not about as large as 1, declare the ranges of its "
            "columns in [columns] (dp-microadam data check RECIPE looks at them)",
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
        return train(experiment, options)
