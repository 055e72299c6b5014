"""``dp-microadam train``: train a model from a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from dp_microadam.apps.command_line.commands.running import add_display, train
from dp_microadam.apps.command_line.completers import complete_with, recipe_names, recipe_settings


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
    parser.add_argument("--bands", metavar="N", help="bands of correlated noise, or auto; short for --set bands=N")
    parser.add_argument("--max-batch-size", metavar="M", help="most examples in a step; short for --set max_batch_size=M")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder to create (default: a new one under runs/)")
    add_display(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.apps.recipes.recipe import load_recipe
    from dp_microadam.training.run_folder import refuse_existing

    short = {"bands": options.bands, "max_batch_size": options.max_batch_size}
    given = [f"{key}={value}" for key, value in short.items() if value is not None]
    recipe = load_recipe(options.recipe, [*options.overrides, *given])
    if options.run_dir is not None:
        refuse_existing(options.run_dir)

    # Imported once recipe and folder are known to be usable: torch takes seconds to load.
    from dp_microadam.apps.recipes.assemble import assemble
    from dp_microadam.training.distributed import torchrun_processes

    with torchrun_processes() as ranks:
        experiment = assemble(
            recipe,
            options.run_dir,
            show_progress=not options.quiet,
            show_private_metrics=options.show_private_metrics,
            ranks=ranks,
        )
        return train(experiment, options)
