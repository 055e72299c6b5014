"""``python -m research theory``: evaluate the convergence bound term by term, and whether the theorem applies."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from research.theory.bounds import Bound, Setting

_NOT_COVERED = (
    "The theorem is about Algorithm 3 (dense moments, AMSGrad, rounding at random, ε_s under the root). What is run, "
    "Algorithm 1, has a window, no AMSGrad, rounds to nearest and adds ε_s outside the root: it is not covered."
)
_BLOCK, _BUCKET = 32_768, 128
"""Coordinates in a block of the paper's MicroAdam, and in a bucket of its quantized error."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "theory",
        help="evaluate the convergence bound, term by term",
        description="Compute the convergence bound, as printed in the paper and corrected.",
        epilog="example:\n  python -m research theory --initial-gap 2.3 --smoothness 1 --gradient-deviation 1 --steps 7227 "
        "--dimension 2700000 --noise-multiplier 5 --batch-size 4096",
    )
    required: Any = {"required": True, "type": float}
    parser.add_argument("--initial-gap", metavar="F", help="f(θ₁) − f*", **required)
    parser.add_argument("--smoothness", metavar="L", help="Lipschitz constant of the gradient", **required)
    parser.add_argument("--gradient-deviation", metavar="S", help="deviation σ_g of the stochastic gradients", **required)
    parser.add_argument("--steps", type=int, required=True, metavar="T", help="number of updates")
    parser.add_argument("--dimension", type=int, required=True, metavar="D", help="number of parameters, taken as one tensor")
    parser.add_argument("--noise-multiplier", metavar="N", help="0 for the non-private limit", **required)
    parser.add_argument("--batch-size", type=int, required=True, metavar="B", help="expected batch size; σ is N·C/B")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, metavar="C", help="clipping norm, G (default: 1)")
    parser.add_argument("--beta-1", type=float, default=0.9, metavar="B", help="β₁ of the optimizer (default: 0.9)")
    parser.add_argument("--eps", type=float, default=1e-16, metavar="E", help="ε_s (default: 1e-16, the square of Adam's 1e-8)")
    parser.add_argument("--density", type=float, default=0.01, metavar="P", help="fraction selected per step (default: 0.01)")
    parser.add_argument("--bits", type=int, default=4, metavar="B", help="bits of the error; 0 for all (default: 4)")
    parser.add_argument("--rounding-error", type=float, metavar="W", help="ω itself, instead of its worst case for --bits")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.validation import require_integer
    from research.theory.bounds import corrected_bound, printed_bound

    setting, steps = _setting(options), require_integer("steps", options.steps, 1)
    bounds: dict[str, Bound] = {}
    if setting.applies:
        bounds = {"corrected": corrected_bound(setting, steps), "printed": printed_bound(setting, steps)}
    _print(setting, steps, bounds)
    return 0


def _setting(options: argparse.Namespace) -> Setting:
    from dp_microadam.validation import require_in_open_closed, require_integer
    from research.theory.bounds import Setting, block_contraction, noise_deviation, stochastic_rounding_error

    dimension = require_integer("dimension", options.dimension, 1)
    density = require_in_open_closed("density", options.density, 0.0, 1.0)
    bits = require_integer("bits", options.bits, 0)
    worst = stochastic_rounding_error(min(_BUCKET, dimension), bits) if bits else 0.0
    return Setting(
        initial_gap=options.initial_gap,
        smoothness=options.smoothness,
        gradient_bound=options.max_grad_norm,
        gradient_deviation=options.gradient_deviation,
        noise_deviation=noise_deviation(options.noise_multiplier, options.max_grad_norm, options.batch_size),
        dimension=dimension,
        beta_1=options.beta_1,
        eps=options.eps,
        contraction=block_contraction([dimension], density, _BLOCK),
        rounding_error=worst if options.rounding_error is None else options.rounding_error,
    )


def _print(setting: Setting, steps: int, bounds: dict[str, Bound]) -> None:
    from research.theory.bounds import TERMS

    print(f"T = {steps}, d = {setting.dimension}, σ = {setting.noise_deviation:.4g}, G + √d·σ = {setting.noisy_gradient:.4g}")
    print(f"q = {setting.contraction:.6g}, ω = {setting.rounding_error:.4g}, (1 + ω)q = {setting.joint_contraction:.6g}")
    if not setting.applies:
        print(
            f"The theorem does not apply: (1 + ω)q must be below 1, which needs ω below {setting.largest_rounding_error:.3g}. "
            "There is no bound; --bits, --density and --rounding-error show what would have one."
        )
    else:
        print(f"\n{'bound on the mean of E‖∇f(θ_t)‖²':34}{'corrected':>12}{'as printed':>12}   comes from")
        rows = {term: [bound.terms[term] for bound in bounds.values()] for term in TERMS}
        rows |= {"total": [bound.total for bound in bounds.values()], "C₀": [bound.c0 for bound in bounds.values()]}
        rows["step size η"] = [bound.step_size for bound in bounds.values()]
        for name, values in rows.items():
            print(f"{name:34}{values[0]:12.4g}{values[1]:12.4g}   {TERMS.get(name, '')}".rstrip())
        bound = bounds["corrected"]
        share = bound.terms[bound.dominant] / bound.total
        print(f"\n{bound.dominant} dominates: {100 * share:.0f} % of the corrected bound.")
        if bound.total >= setting.gradient_bound**2:
            print(f"The bound says nothing: ‖∇f‖² is below G² = {setting.gradient_bound**2:.4g} anyway.")
    print(_NOT_COVERED)
