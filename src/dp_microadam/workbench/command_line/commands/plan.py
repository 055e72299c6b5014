"""``dp-microadam plan``: solve for ε, noise multiplier or steps, or propose a plan; explain it on request."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.workbench.command_line.arguments import add_group_size, add_json, add_recipe
from dp_microadam.workbench.command_line.running import print_table

if TYPE_CHECKING:
    from dp_microadam.plan.advice import Proposal
    from dp_microadam.plan.plan import PrivacyPlan
    from dp_microadam.workbench.data.dataset import LabelledData
    from dp_microadam.workbench.recipes.recipe import Recipe

_NUMBERS: dict[str, dict[str, Any]] = {
    "dataset_size": {"type": int, "metavar": "N", "help": "number of training examples, or of users"},
    "batch_size": {"type": int, "metavar": "B", "help": "expected number of them per step"},
    "delta": {"type": float, "metavar": "D", "help": "δ; should be well below 1/N, e.g. 1e-5"},
    "epsilon": {"type": float, "metavar": "E", "help": "largest ε that may be spent"},
    "noise_multiplier": {"type": float, "metavar": "S", "help": "noise standard deviation divided by the sensitivity"},
    "steps": {"type": int, "metavar": "T", "help": "number of optimizer updates"},
    "epochs": {"type": float, "metavar": "F", "help": "in place of steps: N/B of them each"},
    "accountant": {"choices": ("rdp", "pld"), "help": "accountant that determines ε (default: pld, the tighter)"},
    "bands": {
        "metavar": "N",
        "help": "bands of correlated noise: a number, 1 for independent noise; or auto, a few where they leave much less "
        "noise, if P, ε and T are given (default: auto)",
    },
    "max_batch_size": {
        "type": int,
        "metavar": "M",
        "help": "most examples in a step; of a larger sample, M are kept at random",
    },
    "examples_per_user": {
        "type": int,
        "metavar": "K",
        "help": "ε is for a user with all they have; most of a user's examples in a step",
    },
    "parameters": {"type": int, "metavar": "P", "help": "number of trainable parameters, for the memory of bands"},
    "noise_memory_gib": {"type": float, "metavar": "G", "help": "memory that bands may take, if P is given (default: 2)"},
}
"""What a plan is computed from without a recipe."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="solve for epsilon, noise multiplier or number of steps, or propose a plan",
        description="Compute a privacy plan, of a recipe or from numbers. Give two of --epsilon, --noise-multiplier and "
        "--steps (or --epochs); the third is solved. --advise proposes batch size, steps and bands for a number of examples "
        "that can be processed, by predicted noise alone.",
        epilog="examples:\n"
        "  dp-microadam plan --dataset-size 45000 --batch-size 4096 --delta 1e-5 --epsilon 8 --noise-multiplier 3 --explain\n"
        "  dp-microadam plan --advise --dataset-size 45000 --delta 1e-5 --epsilon 3 --examples 500000 --parameters 26010\n"
        "  dp-microadam plan fashion-mnist --advise --minutes 10",
    )
    add_recipe(parser, nargs="?", help="name or TOML file of a recipe, for its plan")
    for name, described in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **described)
    add_group_size(parser)
    parser.add_argument("--advise", action="store_true", help="propose batch size, steps and bands")
    parser.add_argument(
        "--examples",
        type=int,
        metavar="X",
        help="with --advise: how many examples can be processed, all steps together (default: as many as the recipe)",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="with --advise and a recipe: how long it may train; a few steps are timed"
    )
    parser.add_argument(
        "--explain", action="store_true", help="also show both accountants, what attackers reach, bands, and all proposals"
    )
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw what attackers reach into this file")
    add_json(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Planned:
    """A plan, what it was solved for, and the proposals that it was chosen from."""

    plan: PrivacyPlan
    limit: float
    parameters: int | None
    memory_gib: float
    proposals: tuple[Proposal, ...] = ()
    chosen: Proposal | None = None
    unit_name: str = ""
    kept: dict[str, float] | None = None
    """Bytes per trained parameter that the run keeps beside weights and gradients, by what they are for."""
    partly: bool = False
    """Whether steps train a part of the parameters, so that noise on all of them would not say how much can be learned."""

    @property
    def unit(self) -> str:
        return self.unit_name or self.plan.unit


def run(options: argparse.Namespace) -> int:
    from dp_microadam.accounting.costs import group_epsilon
    from dp_microadam.accounting.meaning import meaning
    from dp_microadam.plan.learning_rate import relative_noise, too_much_noise

    planned = _from_numbers(options) if options.recipe is None else _from_recipe(options)
    plan, parameters = planned.plan, None if planned.partly else planned.parameters
    spent = [plan.spent_after(plan.steps)]
    if options.picture is not None:
        _draw(plan, options.picture)
    size = options.group_size
    report = plan.to_dict()
    if size > 1:
        report |= {"group_size": size, "group_epsilon": group_epsilon(spent, plan.delta, size)}
    report["kept_bytes_per_parameter"] = planned.kept
    report["relative_noise"] = None if parameters is None else relative_noise(plan, parameters)
    if planned.proposals:
        report["proposals"] = [asdict(one) for one in planned.proposals]
    if options.explain or options.json:
        report["accountants"] = {accountant: _view(plan, planned.limit, accountant) for accountant in ("rdp", "pld")}
        report |= {"meaning": meaning(spent, plan.delta), "bands_table": _band_rows(planned)}
    if options.json:
        print(json.dumps(report))
        return 0
    _print_plan(planned, report)
    if planned.chosen is not None:
        print("in a recipe:\n" + "\n".join(f"{name} = {getattr(plan, name)}" for name in ("batch_size", "steps", "bands")))
    if options.explain:
        _print_explanation(planned, report)
    if parameters is not None:
        length = f"{report['relative_noise']:.2g} times as long as the sum of all its gradients can be"
        hint = too_much_noise(plan, parameters, planned.unit)
        print(hint or f"the noise of this plan is {length}; above 1, hardly anything is learned from scratch")
    return 0


def _from_numbers(options: argparse.Namespace) -> _Planned:
    """The plan of the numbers on the command line."""
    from dp_microadam.errors import InputError
    from dp_microadam.plan.advice import best
    from dp_microadam.plan.bands import DEFAULT_NOISE_MEMORY_GIB
    from dp_microadam.plan.plan import PrivacyPlan

    for name, value in {"set": options.overrides, "minutes": options.minutes}.items():
        if value:
            raise InputError(f"--{name} is for the plan of a recipe; name the recipe as well")
    given = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name) is not None}
    needed = ("dataset_size", "delta", "epsilon", "parameters") if options.advise else ("dataset_size", "batch_size", "delta")
    for name in needed:
        if name not in given:
            what = "advice" if options.advise else "a plan"
            raise InputError(f"{name} is not given; {what} needs --{name.replace('_', '-')}, or the name of a recipe")
    if given.get("bands", "").lstrip("-").isdecimal():
        given["bands"] = int(given["bands"])
    proposals = _proposals(options, given) if options.advise else ()
    chosen = best(proposals) if proposals else None
    if chosen is not None:
        given |= {"batch_size": chosen.batch_size, "steps": chosen.steps, "bands": chosen.bands}
    plan = PrivacyPlan.solve(**given)
    limit = plan.epsilon if options.epsilon is None else options.epsilon
    memory = given.get("noise_memory_gib", DEFAULT_NOISE_MEMORY_GIB)
    return _Planned(plan, limit, options.parameters, memory, proposals, chosen)


def _proposals(options: argparse.Namespace, given: dict[str, Any]) -> tuple[Proposal, ...]:
    from dp_microadam.errors import InputError
    from dp_microadam.plan.advice import advise
    from dp_microadam.validation import require_integer

    for name in ("noise_multiplier", "batch_size", "max_batch_size", "steps", "epochs", "bands"):
        if given.get(name, "auto") not in ("auto", 1):
            raise InputError(f"{name} is {given[name]}, but --advise chooses it; leave it out")
    if options.examples is None:
        raise InputError("examples is not given; --advise needs to know how many examples can be processed: --examples X")
    examples = require_integer("examples", options.examples, 1)
    passed = ("dataset_size", "epsilon", "delta", "parameters", "noise_memory_gib", "accountant")
    return advise(
        steps_for=lambda batch_size: examples / batch_size,
        bands="bands" not in given or given["bands"] == "auto",
        **{name: given[name] for name in passed if name in given},
    )


def _from_recipe(options: argparse.Namespace) -> _Planned:
    """The plan of a recipe, for its data and model."""
    from dp_microadam.errors import InputError
    from dp_microadam.workbench.recipes.recipe_files import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    for name in _NUMBERS:
        if getattr(options, name) is not None:
            counts = (
                ", which counts steps: --set steps=…, N/B for each" if name == "epochs" else f"; set it there: --set {name}=…"
            )
            raise InputError(f"{name} is given beside the recipe {recipe.name!r}{counts}")
    if not recipe.protected or recipe.tune:
        what = "[tune] is given, whose plan tune --estimate shows" if recipe.tune else "method is 'non-private'"
        raise InputError(f"{what}; a plan is for a single private run")
    for name in ("examples", "minutes"):
        if getattr(options, name) is not None and not options.advise:
            raise InputError(f"{name} is {getattr(options, name)}, which is for --advise; add that, or leave it out")

    # Imported once the recipe is known to be usable: torch takes seconds to load.
    from dp_microadam.methods.table import kept_bytes
    from dp_microadam.workbench.command_line.timing import data_or_stand_in
    from dp_microadam.workbench.recipes import keys
    from dp_microadam.workbench.recipes.assemble import model_of, noise_memory_of, plan_of, trainable_parameters, with_advice

    data, size = data_or_stand_in(recipe)
    parameters = trainable_parameters(model_of(recipe, data))
    proposals: tuple[Proposal, ...] = ()
    chosen = None
    if options.advise or recipe.plan is not None:
        recipe, proposals, chosen = with_advice(recipe, size, parameters, _affordable(options, recipe, data))
    plan = plan_of(recipe, size, parameters)
    limit, partly = recipe.epsilon or plan.epsilon, recipe.algorithm in keys.PARTLY_TRAINED
    kept = kept_bytes(recipe.algorithm, plan.bands, recipe.resolved_ema_decay)
    return _Planned(plan, limit, parameters, noise_memory_of(recipe), proposals, chosen, recipe.unit_name or "", kept, partly)


def _affordable(options: argparse.Namespace, recipe: Recipe, data: LabelledData) -> Callable[[int], float] | None:
    """How many steps of a batch size can be afforded; None for as many examples as the recipe has anyway.

    Steps are timed on made-up examples.
    """
    from dp_microadam.validation import require_integer, require_positive
    from dp_microadam.workbench.command_line.timing import step_time

    if options.minutes is not None:
        seconds = 60 * require_positive("minutes", options.minutes)
        time = step_time(recipe, data)
        return lambda batch_size: seconds / time.seconds(recipe, batch_size)
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


def _band_rows(planned: _Planned) -> list[dict[str, Any]]:
    """What other numbers of bands would give for the same ε and steps; the plan's own number is among them."""
    from dp_microadam.errors import InputError
    from dp_microadam.plan.bands import automatic_bands, band_table, most_automatic_bands, noise_memory

    plan, parameters = planned.plan, planned.parameters
    names = ("dataset_size", "batch_size", "steps", "delta", "accountant", "max_batch_size")
    try:
        table = band_table(epsilon=planned.limit, also=plan.bands, **{name: getattr(plan, name) for name in names})
    except (InputError, LookupError):  # as above
        return []
    most = most_automatic_bands(plan.steps, 1 if parameters is None else parameters, planned.memory_gib)
    automatic = automatic_bands(tuple(choice for choice in table if choice.bands <= most))
    return [
        {
            "bands": choice.bands,
            "noise_multiplier": choice.noise_multiplier,
            "running_sum": choice.running_sum,
            "single_step": choice.single_step,
            "automatic": choice.bands == automatic,
            "memory_bytes": None if parameters is None else noise_memory(choice.bands, parameters),
        }
        for choice in table
    ]


def _print_plan(planned: _Planned, report: dict[str, Any]) -> None:
    from dp_microadam.accounting.one_step import more_than
    from dp_microadam.ledger.statement import round_up, unit_in_words

    plan, unit, named = planned.plan, planned.unit, planned.unit != "example"
    rows = [
        (f"{unit}s" if named else "dataset size", f"{plan.dataset_size}"),
        (f"expected {unit}s per step" if named else "expected batch size", f"{plan.batch_size}"),
        ("sample rate", f"{plan.sample_rate:.6g}" + (f" in each of {plan.bands} groups" if plan.bands > 1 else "")),
        ("noise multiplier", f"{plan.noise_multiplier:g}"),
        ("steps", f"{plan.steps}"),
        ("epochs", f"{plan.steps * plan.batch_size / plan.dataset_size:.1f}"),
    ]
    if named:
        rows.insert(0, ("unit", unit_in_words(plan.unit, planned.unit_name)))
    if plan.examples_per_user is not None:
        rows.append((f"examples of a {unit} in a step", f"at most {plan.examples_per_user}, as their mean"))
    if plan.cap is not None:
        share = more_than(plan.cap.units, plan.cap.population, plan.sample_rate)
        rows.append(("largest batch size", f"{plan.max_batch_size}, exceeded by a sample in {100 * share:.2g} % of the steps"))
    if size := report.get("group_size"):
        whom = f"{size} {unit}s together" if named else f"a person with up to {size} examples"
        rows.append((f"ε for {whom}", round_up(report["group_epsilon"], 4)))
    rows.append((f"ε for a {unit}" if named else "ε for one example" if size else "ε", round_up(plan.epsilon, 4)))
    rows += [("δ", f"{plan.delta:g}"), ("accountant", plan.accountant)]
    if plan.bands > 1:
        rows.append(("bands of correlated noise", f"{plan.bands}"))
    if planned.kept is not None:
        parts = ", ".join(f"{name} {size:g}" for name, size in planned.kept.items() if size)
        whole = f"{sum(planned.kept.values()):.3g} bytes" + (f": {parts}" if parts else "")
        rows.append(("kept per trained parameter", whole))
    print_table("Privacy plan", ("", ""), rows)


def _print_explanation(planned: _Planned, report: dict[str, Any]) -> None:
    """Both accountants; what an attacker on the finished run reaches; other numbers of bands; all proposals."""
    from dp_microadam.accounting.meaning import mu_in_words, one_in, percent
    from dp_microadam.ledger.statement import round_up

    views: list[Sequence[str]] = []
    for accountant, view in report["accountants"].items():
        spent, steps = view["epsilon"], view["steps_allowed"]
        out = "out of range"
        views.append((accountant, out if spent is None else round_up(spent, 4), out if steps is None else f"{steps}"))
    allowed = f"steps allowed at ε = {round_up(planned.limit, 4)}"
    print_table("Both accountants", ("accountant", "ε of this plan", allowed), views)
    told = report["meaning"]
    if "not_computed" in told:
        print(f"what attackers reach is not computed: {told['not_computed']}")
    else:
        replaced, added = (round_up(told[key], 4) for key in ("replace_one_epsilon", "add_or_remove_epsilon"))
        print_table(
            "What attackers reach",
            ("accused of those who did not take part", "found of those who did, at most"),
            [(one_in(row["false_positive_rate"]), percent(row["true_positive_rate"])) for row in told["attacks"]],
            f"Gaussian differential privacy: {mu_in_words(told)}",
            f"ε = {replaced} if one {planned.unit} is replaced by another, {added} if one is added or removed (pld)",
        )
    bands: list[Sequence[str]] = []
    for row in report["bands_table"]:
        size, count = row["memory_bytes"], row["bands"]
        memory = f"{count - 1} × parameters × 4 bytes" if size is None else f"{size / 2**20:,.1f} MiB"
        marks = ("*" if count == planned.plan.bands else "") + (" auto" if row["automatic"] else "")
        noise = f"{row['noise_multiplier']:g}", f"{row['running_sum']:.3f}", f"{row['single_step']:.3f}"
        bands.append((f"{count}{marks}", *noise, memory if count > 1 else "none"))
    if len(bands) > 1:
        print_table(
            "Bands of correlated noise, at the same ε and steps",
            ("bands", "noise multiplier", "noise of the running sum", "of a single step", "memory"),
            bands,
            "noise relative to 1 band; * is this plan; auto is what recipes take, and plans that are told --parameters P",
        )
    proposals: list[Sequence[str]] = []
    for one in planned.proposals:
        noise = f"{one.noise_multiplier:.3g}", f"{one.bands}", f"{one.noise:.3g}"
        mark = "*" if one is planned.chosen else ""
        proposals.append((f"{one.batch_size}{mark}", f"{one.steps}", *noise, f"{one.score:.2f}"))
    if proposals:
        print_table(
            "Proposals",
            ("batch size", "steps", "noise multiplier", "bands", "noise of the mean gradient", "score"),
            proposals,
            "noise for a clipping norm of 1; the smallest score is best; * is the proposal",
        )


def _draw(plan: PrivacyPlan, path: Path) -> None:
    """Draw the trade-off curve of the finished run as a PNG file."""
    from dp_microadam.errors import InputError
    from dp_microadam.workbench.reporting.figures import STYLES, save_png, trade_off_figure

    if not path.parent.is_dir() or path.is_dir():
        raise InputError(f"picture is {str(path)!r}; it must be a file in a folder that exists")
    figure = trade_off_figure([("this plan", STYLES[0], [plan.spent_after(plan.steps)], plan.epsilon, plan.delta)])
    if figure is None:
        raise InputError(f"picture is {str(path)!r}, but what attackers reach cannot be computed for this plan; leave it out")
    save_png(figure.drawn, path)
