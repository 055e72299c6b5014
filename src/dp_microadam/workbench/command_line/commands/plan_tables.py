"""What ``dp-microadam plan`` prints and draws: the plan, both accountants, attackers, bands and proposals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_microadam.plan.advice import Proposal
    from dp_microadam.plan.plan import PrivacyPlan


def _group_row(group: Mapping[str, Any], unit: str) -> tuple[str, str]:
    from dp_microadam.ledger.statement import round_up

    size = group["group_size"]
    whom = f"somebody with up to {size} examples" if unit == "example" else f"{size} {unit}s together"
    return f"ε for {whom}", round_up(group["group_epsilon"], 4)


def print_tables(
    plan: PrivacyPlan, unit_name: str, limit: float, views: dict[str, dict[str, Any]], group: Mapping[str, Any]
) -> None:
    """The plan, and what both accountants say of it; ``unit_name`` is what a unit is called, or empty."""
    from rich.console import Console
    from rich.table import Table

    from dp_microadam.ledger.statement import round_up, unit_in_words

    facts = Table(title="Privacy plan", title_justify="left", show_header=False)
    unit = unit_name or plan.unit
    named, most = unit != "example", plan.examples_per_user
    for name, text in (
        *((("unit", unit_in_words(plan.unit, unit_name)),) if named else ()),
        (f"{unit}s" if named else "dataset size", f"{plan.dataset_size}"),
        (f"expected {unit}s per step" if named else "expected batch size", f"{plan.batch_size}"),
        *(((f"examples of a {unit} in a step", f"at most {most}, as their mean"),) if most is not None else ()),
        *((("largest batch size", _cap_in_words(plan)),) if plan.max_batch_size is not None else ()),
        ("sample rate", f"{plan.sample_rate:.6g}" + (f" in each of {plan.bands} groups" if plan.bands > 1 else "")),
        ("noise multiplier", f"{plan.noise_multiplier:g}"),
        ("steps", f"{plan.steps}"),
        ("epochs", f"{plan.steps * plan.batch_size / plan.dataset_size:.1f}"),
        *((_group_row(group, unit),) if group else ()),
        (f"ε for a {unit}" if named else "ε for one example" if group else "ε", round_up(plan.epsilon, 4)),
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
    console.print(both)


def _cap_in_words(plan: PrivacyPlan) -> str:
    """The cap and how often it drops someone."""
    from dp_microadam.accounting.one_step import more_than

    assert plan.cap is not None
    share = more_than(plan.cap.units, plan.cap.population, plan.sample_rate)
    return f"{plan.max_batch_size}, exceeded by a sample in {100 * share:.2g} % of the steps"


def print_bands(plan: PrivacyPlan, rows: list[dict[str, Any]], sized: bool) -> None:
    """What other numbers of bands would give; ``sized`` says whether the size of the model is known."""
    from rich.console import Console
    from rich.table import Table

    if len(rows) < 2:
        return
    table = Table(title="Bands of correlated noise, at the same ε and steps", title_justify="left")
    for name in ("bands", "noise multiplier", "noise of the running sum", "of a single step", "memory"):
        table.add_column(name, justify="right")
    for row in rows:
        size = row["memory_bytes"]
        memory = f"{row['memory_vectors']} × parameters × 4 bytes" if size is None else f"{size / 2**20:,.1f} MiB"
        marks = "*" if row["bands"] == plan.bands else ""
        marks += " auto" if row["automatic"] else ""
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
    if not sized and plan.bands == 1 and any(row["automatic"] and row["bands"] > 1 for row in rows):
        console.print("auto is what recipes take, and plans that are told the number of parameters: --parameters P")


def print_meaning(told: dict[str, Any], unit: str) -> None:
    """What an attacker on the finished run reaches, μ, and ε for replacing one ``unit``, such as a patient."""
    from rich.console import Console
    from rich.table import Table

    from dp_microadam.accounting.meaning import mu_in_words, one_in, percent
    from dp_microadam.ledger.statement import round_up

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
        f"ε = {replaced} if one {unit} is replaced by another, {added} if one is added or removed (pld)", soft_wrap=True
    )


def print_proposals(proposals: Sequence[Proposal], chosen: Proposal) -> None:
    """The batch sizes that were compared, and the proposal as keys of a recipe."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Proposals", title_justify="left")
    for name in ("batch size", "steps", "noise multiplier", "bands", "noise of the mean gradient", "score"):
        table.add_column(name, justify="right")
    for one in proposals:
        table.add_row(
            f"{one.batch_size}{'*' if one is chosen else ''}",
            f"{one.steps}",
            f"{one.noise_multiplier:.3g}",
            f"{one.bands}",
            f"{one.noise:.3g}",
            f"{one.score:.2f}",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("noise for a clipping norm of 1; the smallest score is best; * is the proposal, in a recipe", soft_wrap=True)
    console.print(f"batch_size = {chosen.batch_size}\nsteps = {chosen.steps}\nbands = {chosen.bands}")


def draw(plan: PrivacyPlan, path: Path) -> None:
    """Draw the trade-off curve of the finished run as a PNG file."""
    from dp_microadam.errors import InputError
    from dp_microadam.workbench.reporting.figures import STYLES, save_png
    from dp_microadam.workbench.reporting.run_figures import trade_off_figure

    if not path.parent.is_dir() or path.is_dir():
        raise InputError(f"picture is {str(path)!r}; it must be a file in a folder that exists")
    spent = [plan.spent_after(plan.steps)]
    figure = trade_off_figure([("this plan", STYLES[0], spent, plan.epsilon, plan.delta)])
    if figure is None:
        raise InputError(f"picture is {str(path)!r}, but what attackers reach cannot be computed for this plan; leave it out")
    save_png(figure.drawn, path)
