"""``python -m research theory [RUN]``: evaluate the convergence bound term by term, and whether the theorem applies."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.workbench.command_line.completers import complete_with, run_folders

if TYPE_CHECKING:
    from research.theory.bounds import Bound, Setting

_NOT_COVERED = (
    "The theorem is about Algorithm 3 (dense moments, AMSGrad, rounding at random, ε_s under the root). What is run, "
    "Algorithm 1, has a window, no AMSGrad, rounds to nearest and adds ε_s outside the root: it is not covered."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "theory",
        help="evaluate the convergence bound, term by term",
        description="Compute the convergence bound, as printed in the paper and corrected, from given values or a run's.",
        epilog="example:\n  python -m research theory runs/mine --initial-gap 2.3 --smoothness 1 --gradient-deviation 1",
    )
    run_dir = parser.add_argument(
        "run_dir", type=Path, nargs="?", metavar="RUN", help="run folder to read values from that are not given here"
    )
    complete_with(run_folders, run_dir)
    given = parser.add_argument_group("not recorded in a run (required)")
    given.add_argument("--initial-gap", type=float, required=True, metavar="F", help="f(θ₁) − f*")
    given.add_argument("--smoothness", type=float, required=True, metavar="L", help="Lipschitz constant of the gradient")
    given.add_argument(
        "--gradient-deviation",
        type=float,
        required=True,
        metavar="S",
        help="standard deviation σ_g of the stochastic gradients",
    )
    read = parser.add_argument_group("read from RUN if not given")
    read.add_argument("--steps", type=int, metavar="T", help="number of updates")
    read.add_argument("--dimension", type=int, metavar="D", help="number of trained parameters, treated as one tensor")
    read.add_argument("--noise-multiplier", type=float, metavar="N", help="0 for the non-private limit")
    read.add_argument("--batch-size", type=int, metavar="B", help="expected batch size; the theorem's σ is N·C/B")
    read.add_argument("--max-grad-norm", type=float, metavar="C", help="clipping norm, the theorem's G (default: 1)")
    read.add_argument("--beta-1", type=float, metavar="B", help="β₁ of the optimizer (default: 0.9)")
    read.add_argument("--eps", type=float, metavar="E", help="ε_s under the root (default: 1e-16, the square of Adam's 1e-8)")
    read.add_argument(
        "--density", type=float, metavar="P", help="fraction of the coordinates selected per step (default: 0.01, the paper's)"
    )
    read.add_argument("--bits", type=int, metavar="B", help="bits of the quantized error; 0 for no quantization (default: 4)")
    read.add_argument("--bucket-size", type=int, metavar="N", help="coordinates per quantization bucket (default: 128)")
    read.add_argument(
        "--rounding-error", type=float, metavar="W", help="ω itself, instead of its worst case for --bits and --bucket-size"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from research.theory.bounds import corrected_bound, printed_bound

    setting, steps, updates = _read(options)
    bounds: dict[str, Bound] = {}
    if setting.applies:
        bounds = {"corrected": corrected_bound(setting, steps), "printed": printed_bound(setting, steps)}
    if options.json:
        print(json.dumps(_report(setting, steps, updates, bounds), ensure_ascii=False))
    else:
        _print(setting, steps, updates, bounds)
    return 0


def _read(options: argparse.Namespace) -> tuple[Setting, int, int | None]:
    """The setting from the command line, else from the run, else the paper's; the number of steps; and,
    if these are what a run has planned, how many updates it has done of them."""
    from dp_microadam.errors import InputError
    from dp_microadam.validation import require_in_open_closed, require_integer
    from research.theory.bounds import Setting, block_contraction, noise_deviation, stochastic_rounding_error

    known: dict[str, Any] = {}
    if options.run_dir is not None:
        from research.theory.run_numbers import numbers_of_run

        known = numbers_of_run(options.run_dir)

    def value(name: str, default: Any = None) -> Any:
        given = getattr(options, name, None)
        found = given if given is not None else known.get(name, default)
        if found is None:
            raise InputError(f"{name} is not given; give --{name.replace('_', '-')}, or a run to read it from")
        return found

    steps = require_integer("steps", value("steps"), 1)
    sizes = known.get("sizes") if options.dimension is None else None
    sizes = sizes or [require_integer("dimension", value("dimension"), 1)]
    bound = value("max_grad_norm", 1.0)
    density = require_in_open_closed("density", value("density", 0.01), 0.0, 1.0)
    block = 32_768 if known.get("scope", "block") == "block" else None
    if options.rounding_error is not None:
        rounding_error = options.rounding_error
    else:
        quantized = known.get("quantize", True) and known.get("error_feedback", True)
        bits = require_integer("bits", value("bits", 4 if quantized else 0), 0)
        bucket = min(128, max(sizes))
        rounding_error = stochastic_rounding_error(bucket, bits) if bits else 0.0
    eps = options.eps if options.eps is not None else known.get("eps", 1e-8) ** 2
    beta_1 = options.beta_1 if options.beta_1 is not None else known.get("betas", (0.9, 0.999))[0]
    setting = Setting(
        initial_gap=options.initial_gap,
        smoothness=options.smoothness,
        gradient_bound=bound,
        gradient_deviation=options.gradient_deviation,
        noise_deviation=noise_deviation(value("noise_multiplier"), bound, value("batch_size")),
        dimension=sum(sizes),
        beta_1=beta_1,
        eps=eps,
        contraction=block_contraction(sizes, density, block),
        rounding_error=rounding_error,
    )
    return setting, steps, known.get("updates") if options.steps is None else None


def _report(setting: Setting, steps: int, updates: int | None, bounds: dict[str, Bound]) -> dict[str, Any]:
    report: dict[str, Any] = {
        "applies": setting.applies,
        "covers_what_is_run": False,
        "steps": steps,
        "steps_are": "given" if updates is None else "planned",
        "updates_done": updates,
        **asdict(setting),
        "joint_contraction": setting.joint_contraction,
        "largest_rounding_error": setting.largest_rounding_error if setting.contraction > 0 else None,
        "c1": setting.c1 if setting.applies else None,
        "c2": setting.c2 if setting.applies else None,
    }
    for name in ("corrected", "printed"):
        bound = bounds.get(name)
        report[name] = bound and {**asdict(bound), "total": bound.total, "dominant": bound.dominant}
    return report


def _print(setting: Setting, steps: int, updates: int | None, bounds: dict[str, Bound]) -> None:
    from rich.console import Console
    from rich.table import Table

    from research.theory.bounds import TERMS

    console = Console(highlight=False)
    facts = Table(title="Constants", title_justify="left", show_header=False)
    rows = [
        ("T", f"{steps}" if updates is None else f"{steps} planned, {updates} done; --steps {updates} for the bound so far"),
        ("d", f"{setting.dimension}"),
        ("σ = noise multiplier · C/B", f"{setting.noise_deviation:.4g}"),
        ("G + √d·σ", f"{setting.noisy_gradient:.4g}"),
        ("q of top-k", f"{setting.contraction:.6g}"),
        ("ω of rounding", f"{setting.rounding_error:.4g}"),
        ("(1 + ω)q", f"{setting.joint_contraction:.6g}"),
    ]
    if setting.applies:
        rows += [("C₁", f"{setting.c1:.4g}"), ("C₂", f"{setting.c2:.4g}")]
    for name, text in rows:
        facts.add_row(name, text)
    console.print(facts)
    if not setting.applies:
        console.print(
            f"The theorem does not apply: (1 + ω)q must be below 1, which needs ω below {setting.largest_rounding_error:.3g}. "
            "There is no bound; --bits, --density and --rounding-error show what would have one.",
            soft_wrap=True,
        )
    else:
        table = Table(title="Bound on the mean of E‖∇f(θ_t)‖², by term", title_justify="left")
        table.add_column("term")
        table.add_column("corrected", justify="right")
        table.add_column("as printed", justify="right")
        table.add_column("comes from")
        for term, meaning in TERMS.items():
            table.add_row(term, *(f"{bound.terms[term]:.4g}" for bound in bounds.values()), meaning)
        table.add_section()
        table.add_row("total", *(f"{bound.total:.4g}" for bound in bounds.values()), "")
        table.add_row("C₀", *(f"{bound.c0:.4g}" for bound in bounds.values()), "above √(v̂ + ε_s)")
        table.add_row("step size η", *(f"{bound.step_size:.4g}" for bound in bounds.values()), "")
        console.print(table)
        bound = bounds["corrected"]
        share = bound.terms[bound.dominant] / bound.total
        console.print(f"{bound.dominant} dominates: {100 * share:.0f} % of the corrected bound.", soft_wrap=True)
        if bound.total >= setting.gradient_bound**2:
            console.print(
                f"The bound says nothing: ‖∇f‖² is below G² = {setting.gradient_bound**2:.4g} anyway.", soft_wrap=True
            )
    console.print(_NOT_COVERED, soft_wrap=True)
