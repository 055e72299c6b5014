"""``dp-microadam tune``: choose hyperparameters by a private search, whose ε covers the choice."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.workbench.command_line.arguments import add_json, add_recipe
from dp_microadam.workbench.command_line.running import INTERRUPTED, finish, open_run, say

if TYPE_CHECKING:
    from dp_microadam.plan.selection_plan import SelectionPlan
    from dp_microadam.workbench.data.dataset import LabelledData
    from dp_microadam.workbench.recipes.recipe import Recipe


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="choose hyperparameters by a private search; ε covers the choice",
        description="Train a random number of private runs with hyperparameters drawn from the recipe's [tune] table, publish "
        "the best by its score on validation data, and destroy all others. ε covers the choice.",
        epilog="examples:\n  dp-microadam tune mine.toml --estimate\n"
        "  dp-microadam tune demo --set tune.expected_runs=5 --set tune.distance=[0.75,1.5]",
    )
    add_recipe(parser)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder to publish to (default: a new one under runs/)")
    parser.add_argument("--estimate", action="store_true", help="show the expected cost and stop")
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="show neither the expected cost nor how long it has taken")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.workbench.recipes.recipe_files import load_recipe

    return search(load_recipe(options.recipe, options.overrides), options.run_dir, options)


def search(recipe: Recipe, run_dir: Path | None, options: argparse.Namespace) -> int:
    """Begin or continue the search that a recipe declares, and evaluate the run that it publishes."""
    from dp_microadam.errors import InputError
    from dp_microadam.training.run_folder import DECLARATION, SELECTION, refuse_existing, search_folder
    from dp_microadam.workbench.recipes.tuning import refuse_unsearchable

    refuse_unsearchable(recipe)
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise InputError(f"the search was started in {processes} processes; it must be one")
    if run_dir is not None and not (search_folder(run_dir) / DECLARATION).exists():
        if (run_dir / SELECTION).is_file():
            raise InputError(f"run_dir is {str(run_dir)!r}, where a search has published its best run; use a new folder")
        refuse_existing(run_dir)

    # Imported once the recipe is known to be usable: torch takes seconds to load.
    from dp_microadam.plan.selection_plan import SelectionPlan
    from dp_microadam.workbench.recipes.assemble import load_data, number_of_units, plan_of

    data = load_data(recipe)
    plan = plan_of(recipe, number_of_units(recipe, data))
    assert isinstance(plan, SelectionPlan)
    estimate = getattr(options, "estimate", False)
    if estimate or not options.quiet:
        cost = _expected_cost(recipe, plan, data)
        if estimate and options.json:
            print(json.dumps(cost))
        else:
            _print_cost(cost, options)
    return 0 if estimate else _search(recipe, run_dir, data, plan, options)


def _search(recipe: Recipe, run_dir: Path | None, data: LabelledData, plan: SelectionPlan, options: argparse.Namespace) -> int:
    from dp_microadam.training.search import PrivateSearch, default_search_folder
    from dp_microadam.workbench.recipes.assemble import assemble
    from dp_microadam.workbench.recipes.experiment import training_part, users_of
    from dp_microadam.workbench.recipes.tuning import score_of, values_of, with_values

    found = PrivateSearch(
        plan,
        values_of(recipe),
        lambda chosen, folder: assemble(with_values(recipe, chosen), folder, data=data, show_progress=False).trainer,
        score=score_of(recipe),
        run_dir=default_search_folder(f"{recipe.name}-tuned") if run_dir is None else run_dir,
        config=replace(recipe, accountant=recipe.resolved_accountant, bands=plan.bands).to_toml(),
        show_progress=not options.quiet,
    )
    try:
        result = found.fit(training_part(recipe, data), data.validation, **users_of(recipe, data))
        stopped = not result.finished
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        say(options, f"stopped, nothing is published yet; go on with: dp-microadam resume {found.run_dir}")
        return INTERRUPTED
    experiment = open_run(result.run_dir)
    return finish(experiment, options, experiment.trainer.peek(), chosen=result.settings)


def _expected_cost(recipe: Recipe, plan: SelectionPlan, data: LabelledData) -> dict[str, Any]:
    """What a search costs on average: nothing of it depends on the number of runs that will be drawn.

    Steps are timed with the recipe's own values.
    """
    from dp_microadam.workbench.command_line.timing import step_time

    steps = min(plan.steps, recipe.max_steps or plan.steps)
    return {
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "distribution": plan.repetitions.name,
        "expected_runs": plan.expected_runs,
        "runs_in_nine_of_ten_searches_at_most": plan.repetitions.most_runs(0.9),
        "expected_hours": plan.expected_runs * steps * step_time(recipe, data).seconds(recipe) / 3600,
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
        "epsilon_of_one_run": plan.single_run.epsilon,
        "noise_multiplier_without_a_search": plan.single_run_of_same_epsilon.noise_multiplier,
    }


def _print_cost(cost: dict[str, Any], options: argparse.Namespace) -> None:
    from dp_microadam.ledger.statement import round_up

    hours, at_most = cost["expected_hours"], cost["runs_in_nine_of_ten_searches_at_most"]
    time = f"{hours:.1f} hours" if hours >= 1 else f"{math.ceil(60 * hours)} min"
    for line in (
        f"search at ε = {round_up(cost['epsilon'])}, δ = {cost['delta']:g}: {cost['expected_runs']:g} runs expected "
        f"({cost['distribution']}; nine of ten searches take at most {at_most}), about {time} on this machine",
        f"each run: {cost['steps']} steps with noise multiplier {cost['noise_multiplier']:g}; alone it would spend "
        f"ε = {round_up(cost['epsilon_of_one_run'])}",
        f"a single run without a search: noise multiplier {cost['noise_multiplier_without_a_search']:g} at the same ε",
        "how many runs are drawn is secret, so neither their number nor the time left is shown",
    ):
        say(options, line)
