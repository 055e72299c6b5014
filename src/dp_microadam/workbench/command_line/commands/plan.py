"""``dp-microadam plan``: solve for ε, noise multiplier or steps, compare the two accountants, or propose a plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.workbench.command_line.completers import complete_with, recipe_names, recipe_settings

if TYPE_CHECKING:
    from dp_microadam.plan.advice import Proposal
    from dp_microadam.plan.plan import PrivacyPlan
    from dp_microadam.workbench.data.dataset import LabelledData
    from dp_microadam.workbench.recipes.recipe import Recipe


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="solve for epsilon, noise multiplier or number of steps, or propose a plan",
        description="Compute a privacy plan, of a recipe or from numbers. Give two of --epsilon, --noise-multiplier and "
        "--steps (or --epochs); the third is solved. --advise proposes batch size, steps and bands for a number of examples "
        "that can be processed, by predicted noise alone.",
        epilog="examples:\n"
        "  dp-microadam plan --dataset-size 45000 --batch-size 4096 --delta 1e-5 --epsilon 8 --noise-multiplier 3\n"
        "  dp-microadam plan --advise --dataset-size 45000 --delta 1e-5 --epsilon 3 --examples 500000 --parameters 26010\n"
        "  dp-microadam plan fashion-mnist --advise --minutes 10",
    )
    complete_with(recipe_names, parser.add_argument("recipe", nargs="?", help="name or TOML file of a recipe, for its plan"))
    override = parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one key of the recipe"
    )
    complete_with(recipe_settings, override)
    parser.add_argument("--dataset-size", type=int, metavar="N", help="number of training examples, or of users")
    parser.add_argument("--batch-size", type=int, metavar="B", help="expected number of them per step")
    parser.add_argument("--delta", type=float, metavar="D", help="δ; should be well below 1/N, e.g. 1e-5")
    parser.add_argument("--epsilon", type=float, metavar="E", help="largest ε that may be spent")
    parser.add_argument(
        "--noise-multiplier", type=float, metavar="S", help="noise standard deviation divided by the sensitivity"
    )
    parser.add_argument("--steps", type=int, metavar="T", help="number of optimizer updates")
    parser.add_argument("--epochs", type=float, metavar="F", help="in place of steps: N/B of them each")
    parser.add_argument("--accountant", choices=("rdp", "pld"), help="accountant that determines ε (default: pld, the tighter)")
    parser.add_argument(
        "--bands",
        metavar="N",
        help="bands of correlated noise: a number, 1 for independent noise; or auto, a few where they leave much less noise, "
        "if P, ε and T are given (default: auto)",
    )
    parser.add_argument(
        "--max-batch-size", type=int, metavar="M", help="most examples in a step; of a larger sample, M are kept at random"
    )
    parser.add_argument(
        "--unit", choices=("example", "user"), help="whom ε is for: an example (default), or a user with all they have"
    )
    parser.add_argument(
        "--examples-per-user", type=int, metavar="K", help="with users: the largest number of a user's examples in a step"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="K",
        help="show ε for somebody with up to K examples, or for K users together, too",
    )
    parser.add_argument("--parameters", type=int, metavar="P", help="number of trainable parameters, for the memory of bands")
    parser.add_argument(
        "--noise-memory-gib", type=float, metavar="G", help="memory that bands may take, if P is given (default: 2)"
    )
    parser.add_argument("--advise", action="store_true", help="propose batch size, steps and bands")
    parser.add_argument(
        "--examples",
        type=int,
        metavar="X",
        help="with --advise: how many examples can be processed, all steps together (default: steps times batch size)",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="with --advise and a recipe: how long it may train; a few steps are timed"
    )
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw what attackers reach into this file")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Planned:
    """A plan, what it was solved for, and the proposals that it was chosen from."""

    plan: PrivacyPlan
    unit_name: str
    limit: float
    parameters: int | None
    memory_gib: float
    proposals: tuple[Proposal, ...] = ()
    chosen: Proposal | None = None
    partly: bool = False
    """Whether steps train a part of the parameters, so that noise on all of them would not say how much can be learned."""

    @property
    def trained(self) -> int | None:
        return None if self.partly else self.parameters


def run(options: argparse.Namespace) -> int:
    from dp_microadam.accounting.costs import group_epsilon
    from dp_microadam.accounting.meaning import meaning
    from dp_microadam.plan.learning_rate import relative_noise, too_much_noise
    from dp_microadam.workbench.command_line.commands import plan_tables

    planned = _from_numbers(options) if options.recipe is None else _from_recipe(options)
    plan, limit = planned.plan, planned.limit
    views = {accountant: _view(plan, limit, accountant) for accountant in ("rdp", "pld")}
    bands = _band_rows(plan, limit, planned.parameters, planned.memory_gib)
    if options.picture is not None:
        plan_tables.draw(plan, options.picture)
    spent = [plan.spent_after(plan.steps)]
    told = meaning(spent, plan.delta)
    group: dict[str, Any] = {}
    if options.group_size is not None:
        group = {"group_size": options.group_size, "group_epsilon": group_epsilon(spent, plan.delta, options.group_size)}
    if options.json:
        proposals = {"proposals": [asdict(one) for one in planned.proposals]} if planned.proposals else {}
        noise = None if planned.trained is None else relative_noise(plan, planned.trained)
        report = {**group, "accountants": views, "meaning": told, "bands_table": bands, "relative_noise": noise}
        report |= proposals
        print(json.dumps({**plan.to_dict(), **report}))
        return 0
    if planned.chosen is not None:
        plan_tables.print_proposals(planned.proposals, planned.chosen)
    plan_tables.print_tables(plan, planned.unit_name, limit, views, group)
    plan_tables.print_meaning(told, planned.unit_name or plan.unit)
    plan_tables.print_bands(plan, bands, sized=planned.parameters is not None)
    if planned.trained is not None:
        hint = too_much_noise(plan, planned.trained, planned.unit_name or plan.unit)
        length = f"{relative_noise(plan, planned.trained):.2g} times as long as the sum of all its gradients can be"
        print(hint or f"the noise of this plan is {length}; above 1, hardly anything is learned from scratch")
    return 0


def _from_numbers(options: argparse.Namespace) -> _Planned:
    """The plan of the numbers on the command line."""
    from dp_microadam.errors import InputError
    from dp_microadam.plan.advice import best
    from dp_microadam.plan.band_choice import DEFAULT_NOISE_MEMORY_GIB
    from dp_microadam.plan.plan import PrivacyPlan

    for name in ("overrides", "minutes"):
        if getattr(options, name):
            raise InputError(f"--{'set' if name == 'overrides' else name} is for the plan of a recipe; name the recipe as well")
    needed = ("dataset_size", "delta", "epsilon", "parameters") if options.advise else ("dataset_size", "batch_size", "delta")
    for name in needed:
        if getattr(options, name) is None:
            what = "advice" if options.advise else "a plan"
            raise InputError(f"{name} is not given; {what} needs --{name.replace('_', '-')}, or the name of a recipe")
    bands = options.bands or "auto"
    memory = DEFAULT_NOISE_MEMORY_GIB if options.noise_memory_gib is None else options.noise_memory_gib
    proposals = _proposals(options, bands, memory) if options.advise else ()
    chosen = best(proposals) if proposals else None
    plan = PrivacyPlan.solve(
        dataset_size=options.dataset_size,
        batch_size=options.batch_size if chosen is None else chosen.batch_size,
        delta=options.delta,
        epsilon=options.epsilon,
        noise_multiplier=options.noise_multiplier,
        steps=options.steps if chosen is None else chosen.steps,
        epochs=options.epochs if chosen is None else None,
        accountant=options.accountant or "pld",
        bands=chosen.bands if chosen is not None else int(bands) if bands.lstrip("-").isdecimal() else bands,
        parameters=options.parameters,
        noise_memory_gib=memory,
        max_batch_size=options.max_batch_size,
        unit=options.unit or "example",
        examples_per_user=options.examples_per_user,
    )
    limit = plan.epsilon if options.epsilon is None else options.epsilon
    return _Planned(plan, "", limit, options.parameters, memory, proposals, chosen)


def _proposals(options: argparse.Namespace, bands: str, memory_gib: float) -> tuple[Proposal, ...]:
    from dp_microadam.errors import InputError
    from dp_microadam.plan.advice import advise

    for name in ("noise_multiplier", "max_batch_size", "group_size"):
        if getattr(options, name) is not None:
            raise InputError(f"{name} is {getattr(options, name)}, but --advise chooses batch size and noise; leave one out")
    if bands not in ("auto", "1"):
        raise InputError(f"bands is {bands}, but --advise chooses the bands; leave it out, or take 1")
    affordable = options.examples
    said = [name for name in ("examples", "epochs", "steps") if getattr(options, name) is not None]
    if len(said) > 1:
        raise InputError(f"{' and '.join(said)} are given, which all say how much can be processed; leave one out")
    if affordable is None:
        if options.epochs is not None:
            affordable = options.epochs * options.dataset_size
        elif options.steps is not None and options.batch_size is not None:
            affordable = options.steps * options.batch_size
        else:
            raise InputError("examples is not given; --advise needs to know how many examples can be processed: --examples X")
    return advise(
        dataset_size=options.dataset_size,
        epsilon=options.epsilon,
        delta=options.delta,
        steps_for=lambda batch_size: affordable / batch_size,
        parameters=options.parameters,
        bands=bands == "auto",
        noise_memory_gib=memory_gib,
        accountant=options.accountant or "pld",
    )


_OF_NUMBERS = (
    *("dataset_size", "batch_size", "delta", "epsilon", "noise_multiplier", "steps", "accountant", "bands", "max_batch_size"),
    *("unit", "examples_per_user", "parameters", "noise_memory_gib"),
)


def _from_recipe(options: argparse.Namespace) -> _Planned:
    """The plan of a recipe, for its data and model."""
    from dp_microadam.errors import InputError
    from dp_microadam.workbench.recipes.recipe_files import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    for name in _OF_NUMBERS:
        if getattr(options, name) is not None:
            raise InputError(f"{name} is given beside the recipe {recipe.name!r}; set it there: --set {name}=…")
    if options.epochs is not None:
        raise InputError(f"epochs is given beside the recipe {recipe.name!r}, which counts steps: --set steps=…, N/B for each")
    if not recipe.protected or recipe.tune:
        what = "[tune] is given, whose plan tune --estimate shows" if recipe.tune else "method is 'non-private'"
        raise InputError(f"{what}; a plan is for a single private run")
    for name in ("examples", "minutes"):
        if getattr(options, name) is not None and not options.advise:
            raise InputError(f"{name} is {getattr(options, name)}, which is for --advise; add that, or leave it out")

    # Imported once the recipe is known to be usable: torch takes seconds to load.
    from dp_microadam.plan.plan import PrivacyPlan
    from dp_microadam.workbench.command_line.estimate import data_or_stand_in
    from dp_microadam.workbench.recipes import vocabulary
    from dp_microadam.workbench.recipes.advice import noise_memory_of, with_advice
    from dp_microadam.workbench.recipes.assemble import model_of, plan_of, trainable_parameters

    data, size = data_or_stand_in(recipe)
    parameters = trainable_parameters(model_of(recipe, data))
    proposals: tuple[Proposal, ...] = ()
    chosen = None
    if options.advise or recipe.plan is not None:
        recipe, proposals, chosen = with_advice(recipe, size, parameters, _affordable(options, recipe, data))
    plan = plan_of(recipe, size, parameters)
    assert isinstance(plan, PrivacyPlan)
    limit = plan.epsilon if recipe.epsilon is None else recipe.epsilon
    partly = recipe.algorithm in vocabulary.PARTLY_TRAINED
    return _Planned(plan, recipe.unit_name or "", limit, parameters, noise_memory_of(recipe), proposals, chosen, partly)


def _affordable(options: argparse.Namespace, recipe: Recipe, data: LabelledData) -> Callable[[int], float] | None:
    """How many steps of a batch size can be afforded; None for as many examples as the recipe has anyway.

    Steps are timed on made-up examples.
    """
    from dp_microadam.validation import require_integer, require_positive
    from dp_microadam.workbench.command_line.estimate import CostEstimator

    if options.minutes is not None:
        seconds = 60 * require_positive("minutes", options.minutes)
        time = CostEstimator().step_time(recipe, data)
        return lambda batch_size: seconds / time.seconds(batch_size * (recipe.examples_per_user or 1))
    if options.examples is not None:
        examples = require_integer("examples", options.examples, 1)
        return lambda batch_size: examples / batch_size
    return None


def _view(plan: PrivacyPlan, limit: float, accountant: str) -> dict[str, Any]:
    """What an accountant reports for the plan, and how many steps it would allow within the same ε.

    Both are None where the accountant has no answer: PLD handles up to ten million steps.
    """
    from dp_microadam.accounting.costs import most_steps
    from dp_microadam.errors import InputError

    view: dict[str, Any] = {"epsilon": None, "steps_allowed": None}
    try:
        view["epsilon"] = plan.epsilon_after(plan.steps, accountant=accountant)
        participations = most_steps(plan.sample_rate, plan.noise_multiplier, limit, plan.delta, accountant, plan.cap)
        view["steps_allowed"] = plan.bands * participations
    except (InputError, LookupError):
        pass
    return view


def _band_rows(plan: PrivacyPlan, limit: float, parameters: int | None, memory_gib: float) -> list[dict[str, Any]]:
    """What other numbers of bands would give for the same ε and steps; the plan's own number is among them."""
    from dp_microadam.errors import InputError
    from dp_microadam.plan.band_choice import automatic_bands, band_table, most_automatic_bands, noise_memory

    try:
        table = band_table(
            dataset_size=plan.dataset_size,
            batch_size=plan.batch_size,
            steps=plan.steps,
            epsilon=limit,
            delta=plan.delta,
            accountant=plan.accountant,
            also=plan.bands,
            max_batch_size=plan.max_batch_size,
        )
    except (InputError, LookupError):  # as above
        return []
    most = most_automatic_bands(plan.steps, 1 if parameters is None else parameters, memory_gib)
    automatic = automatic_bands(tuple(choice for choice in table if choice.bands <= most))
    return [
        {
            "bands": choice.bands,
            "noise_multiplier": choice.noise_multiplier,
            "running_sum": choice.running_sum,
            "single_step": choice.single_step,
            "automatic": choice.bands == automatic,
            "memory_vectors": choice.bands - 1,
            "memory_bytes": None if parameters is None else noise_memory(choice.bands, parameters),
        }
        for choice in table
    ]
