"""``dp-microadam plan``: solve for ε, noise multiplier or steps, and compare the two accountants."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_microadam.privacy.plan import PrivacyPlan


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="solve for epsilon, noise multiplier or number of steps",
        description="Compute a privacy plan. Give two of --epsilon, --noise-multiplier and --steps; the third is solved.",
        epilog="example:\n"
        "  dp-microadam plan --dataset-size 45000 --batch-size 4096 --delta 1e-5 --epsilon 8 --noise-multiplier 3",
    )
    parser.add_argument("--dataset-size", type=int, required=True, metavar="N", help="number of training examples, or of users")
    parser.add_argument("--batch-size", type=int, required=True, metavar="B", help="expected number of them per step")
    parser.add_argument("--delta", type=float, required=True, metavar="D", help="δ; should be well below 1/N, e.g. 1e-5")
    parser.add_argument("--epsilon", type=float, metavar="E", help="largest ε that may be spent")
    parser.add_argument(
        "--noise-multiplier", type=float, metavar="S", help="noise standard deviation divided by the sensitivity"
    )
    parser.add_argument("--steps", type=int, metavar="T", help="number of optimizer updates")
    parser.add_argument(
        "--accountant", choices=("rdp", "pld"), default="rdp", help="accountant that determines ε (default: rdp)"
    )
    parser.add_argument(
        "--bands",
        default="1",
        metavar="N",
        help="bands of correlated noise, or auto for the least predicted noise (default: 1, independent noise)",
    )
    parser.add_argument(
        "--max-batch-size", type=int, metavar="M", help="most examples in a step; of a larger sample, M are kept at random"
    )
    parser.add_argument(
        "--unit", choices=("example", "user"), default="example", help="whom ε is for: an example, or a user with all they have"
    )
    parser.add_argument(
        "--examples-per-user", type=int, metavar="K", help="with users: the largest number of a user's examples in a step"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=1,
        metavar="K",
        help="ε is for somebody with up to K examples, or for K users together (default: 1)",
    )
    parser.add_argument("--parameters", type=int, metavar="P", help="number of trainable parameters, for the memory of bands")
    parser.add_argument(
        "--noise-memory-gib",
        type=float,
        default=2.0,
        metavar="G",
        help="memory that bands may take, if P is given (default: 2)",
    )
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw what attackers reach into this file")
    parser.add_argument(
        "--band-coefficients",
        choices=("square-root", "optimised"),
        help="coefficients of correlated noise: the banded square root (default), or those with the least noise in the weights "
        "of SGD with --momentum, --schedule and --warmup",
    )
    parser.add_argument("--momentum", type=float, metavar="M", help="momentum that optimised coefficients are for (default: 0)")
    parser.add_argument("--schedule", choices=("constant", "cosine", "linear"), help="their learning rates (default: constant)")
    parser.add_argument(
        "--warmup", type=float, metavar="F", help="fraction of the steps over which the rate rises (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.privacy.accounting import group_epsilon
    from dp_microadam.privacy.group_plan import solve_for_group
    from dp_microadam.privacy.meaning import meaning

    plan = solve_for_group(
        options.group_size,
        dataset_size=options.dataset_size,
        batch_size=options.batch_size,
        delta=options.delta,
        epsilon=options.epsilon,
        noise_multiplier=options.noise_multiplier,
        steps=options.steps,
        accountant=options.accountant,
        bands=int(options.bands) if options.bands.lstrip("-").isdecimal() else options.bands,
        parameters=options.parameters,
        noise_memory_gib=options.noise_memory_gib,
        max_batch_size=options.max_batch_size,
        unit=options.unit,
        examples_per_user=options.examples_per_user,
    )
    workload = _workload(options, plan)
    plan = plan if workload is None else plan.optimised_for(**workload)
    limit = plan.epsilon if options.epsilon is None or options.group_size > 1 else options.epsilon
    views = {accountant: _view(plan, limit, accountant) for accountant in ("rdp", "pld")}
    bands = _band_rows(plan, limit, options.parameters)
    if options.picture is not None:
        _draw(plan, options.picture)
    spent = [plan.spent_after(plan.steps)]
    told = meaning(spent, plan.delta)
    group: dict[str, Any] = {}
    if options.group_size > 1:
        size = options.group_size
        group = {"group_size": size, "group_epsilon": group_epsilon(spent, plan.delta, size)}
    if options.json:
        weights = {} if workload is None else {"weight_noise": plan.weight_noise(**workload)}
        print(json.dumps({**plan.to_dict(), **group, "accountants": views, "meaning": told, "bands_table": bands, **weights}))
    else:
        _print_tables(plan, limit, views, group)
        _print_meaning(told)
        _print_bands(plan, bands)
        if workload is not None:
            print(
                f"optimised coefficients leave {plan.weight_noise(**workload):.3f} of the noise that the banded square root "
                f"leaves in the weights; noise of the running sum {_running_sum(plan):.3f}, of a single step "
                f"{plan.single_step_growth:.3f}"
            )
    return 0


def _workload(options: argparse.Namespace, plan: PrivacyPlan) -> dict[str, Any] | None:
    """The momentum and learning rates that coefficients are optimised for; None for the banded square root."""
    from dp_microadam.errors import InputError

    given = {name: getattr(options, name) for name in ("momentum", "schedule", "warmup")}
    if options.band_coefficients != "optimised":
        for name, value in given.items():
            if value is not None:
                raise InputError(f"{name} is {value}, which is for --band-coefficients optimised; add that, or leave it out")
        return None
    if plan.bands == 1:
        raise InputError("band-coefficients is 'optimised', but the plan has one band; give --bands as well")
    from dp_microadam.training.schedules import Schedule

    schedule = Schedule(given["schedule"] or "constant", plan.steps, given["warmup"] or 0.0)
    return {"momentum": given["momentum"] or 0.0, "rates": schedule.all_factors()}


def _running_sum(plan: PrivacyPlan) -> float:
    """The noise of the plan's running sum relative to one band with the same ε and steps."""
    return plan.single_step_growth * plan.noise_ratios.running_sum / plan.noise_ratios.single_step


def _view(plan: PrivacyPlan, limit: float, accountant: str) -> dict[str, Any]:
    """What an accountant reports for the plan, and how many steps it would allow within the same ε.

    Both are None where the accountant has no answer: PLD handles up to ten million steps.
    """
    from dp_microadam.errors import InputError
    from dp_microadam.privacy.accounting import most_steps

    view: dict[str, Any] = {"epsilon": None, "steps_allowed": None}
    try:
        view["epsilon"] = plan.epsilon_after(plan.steps, accountant=accountant)
        participations = most_steps(plan.sample_rate, plan.noise_multiplier, limit, plan.delta, accountant, plan.cap)
        view["steps_allowed"] = plan.bands * participations
    except (InputError, LookupError):
        pass
    return view


def _band_rows(plan: PrivacyPlan, limit: float, parameters: int | None) -> list[dict[str, Any]]:
    """What other numbers of bands would give for the same ε and steps; the plan's own number is among them."""
    from dp_microadam.errors import InputError
    from dp_microadam.privacy.band_choice import band_table, noise_memory

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
    return [
        {
            "bands": choice.bands,
            "noise_multiplier": choice.noise_multiplier,
            "running_sum": choice.running_sum,
            "single_step": choice.single_step,
            "memory_vectors": choice.bands - 1,
            "memory_bytes": None if parameters is None else noise_memory(choice.bands, parameters),
        }
        for choice in table
    ]


def _print_bands(plan: PrivacyPlan, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if len(rows) < 2:
        return
    table = Table(title="Bands of correlated noise, at the same ε and steps", title_justify="left")
    for name in ("bands", "noise multiplier", "noise of the running sum", "of a single step", "memory"):
        table.add_column(name, justify="right")
    least = min(row["running_sum"] for row in rows)
    for row in rows:
        size = row["memory_bytes"]
        memory = f"{row['memory_vectors']} × parameters × 4 bytes" if size is None else f"{size / 2**20:,.1f} MiB"
        marks = ("*" if row["bands"] == plan.bands else "") + (" least" if row["running_sum"] == least else "")
        table.add_row(
            f"{row['bands']}{marks}",
            f"{row['noise_multiplier']:g}",
            f"{row['running_sum']:.3f}",
            f"{row['single_step']:.3f}",
            memory if row["memory_vectors"] else "none",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("noise relative to 1 band; * is this plan", soft_wrap=True)


def _draw(plan: PrivacyPlan, path: Path) -> None:
    """Draw the trade-off curve of the finished run as a PNG file."""
    from dp_microadam.apps.reporting.figures import save_png
    from dp_microadam.apps.reporting.palette import STYLES
    from dp_microadam.apps.reporting.trade_off_figure import trade_off_figure
    from dp_microadam.errors import InputError

    if not path.parent.is_dir() or path.is_dir():
        raise InputError(f"picture is {str(path)!r}; it must be a file in a folder that exists")
    spent = [plan.spent_after(plan.steps)]
    figure = trade_off_figure([("this plan", STYLES[0], spent, plan.epsilon, plan.delta)])
    if figure is None:
        raise InputError(f"picture is {str(path)!r}, but what attackers reach cannot be computed for this plan; leave it out")
    save_png(figure.whole, path)


def _print_meaning(told: dict[str, Any]) -> None:
    """What an attacker on the finished run reaches, μ, and ε for replacing an example."""
    from rich.console import Console
    from rich.table import Table

    from dp_microadam.privacy.meaning import mu_in_words, one_in, percent
    from dp_microadam.privacy.statement import round_up

    console = Console(highlight=False)
    if "not_computed" in told:
        console.print(f"what attackers reach is not computed: {told['not_computed']}", soft_wrap=True)
        return
    table = Table(title="What attackers reach", title_justify="left")
    table.add_column("accused of those who did not take part")
    table.add_column("found of those who did, at most", justify="right")
    for row in told["attacks"]:
        table.add_row(one_in(row["false_positive_rate"]), percent(row["true_positive_rate"]))
    console.print(table)
    console.print(f"Gaussian differential privacy: {mu_in_words(told)}", soft_wrap=True)
    replaced, added = (round_up(told[key], 4) for key in ("replace_one_epsilon", "add_or_remove_epsilon"))
    console.print(
        f"ε = {replaced} if one example is replaced by another, {added} if one is added or removed (pld)", soft_wrap=True
    )


def _cap_in_words(plan: PrivacyPlan) -> str:
    """The cap and how often it drops someone."""
    from dp_microadam.privacy.truncated import more_than

    assert plan.cap is not None
    share = more_than(plan.cap.units, plan.cap.population, plan.sample_rate)
    return f"{plan.max_batch_size}, exceeded by a sample in {100 * share:.2g} % of the steps"


def _group_row(group: dict[str, Any], users: bool) -> tuple[str, str]:
    from dp_microadam.privacy.statement import round_up

    whom = f"{group['group_size']} users together" if users else f"somebody with up to {group['group_size']} examples"
    return f"ε for {whom}", round_up(group["group_epsilon"], 4)


def _print_tables(plan: PrivacyPlan, limit: float, views: dict[str, dict[str, Any]], group: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dp_microadam.privacy.statement import round_up

    facts = Table(title="Privacy plan", title_justify="left", show_header=False)
    users = plan.unit == "user"
    for name, text in (
        *((("unit", "one user with all their examples"),) if users else ()),
        ("users" if users else "dataset size", f"{plan.dataset_size}"),
        ("expected users per step" if users else "expected batch size", f"{plan.batch_size}"),
        *((("examples of a user in a step", f"at most {plan.examples_per_user}, as their mean"),) if users else ()),
        *((("largest batch size", _cap_in_words(plan)),) if plan.max_batch_size is not None else ()),
        ("sample rate", f"{plan.sample_rate:.6g}" + (f" in each of {plan.bands} groups" if plan.bands > 1 else "")),
        ("noise multiplier", f"{plan.noise_multiplier:g}"),
        ("steps", f"{plan.steps}"),
        ("epochs", f"{plan.steps * plan.batch_size / plan.dataset_size:.1f}"),
        *((_group_row(group, users),) if group else ()),
        ("ε for a user" if users else "ε for one example" if group else "ε", round_up(plan.epsilon, 4)),
        ("δ", f"{plan.delta:g}"),
        ("accountant", plan.accountant),
        *((("bands of correlated noise", f"{plan.bands}"),) if plan.bands > 1 else ()),
    ):
        facts.add_row(name, text)
    both = Table(title="Both accountants", title_justify="left")
    for name in ("accountant", "ε of this plan", f"steps allowed at ε = {round_up(limit, 4)}"):
        both.add_column(name, justify="left" if name == "accountant" else "right")
    for accountant, view in views.items():
        reported, allowed = view["epsilon"], view["steps_allowed"]
        both.add_row(
            accountant,
            "out of range" if reported is None else round_up(reported, 4),
            "out of range" if allowed is None else f"{allowed}",
        )
    console = Console(highlight=False)
    console.print(facts)
    if group:
        console.print(
            f"in a recipe: noise_multiplier = {plan.noise_multiplier:g}, steps = {plan.steps}, and no epsilon", soft_wrap=True
        )
    console.print(both)
