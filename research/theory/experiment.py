"""Measures the convergence rate: mean squared gradient norms of Algorithms 3 and 1 over T, compared with the corrected bound.

    python -m research.theory.experiment [--seeds 64] [--out docs/images/theory_rate.png] [--json]

Every number of steps T is a separate run with its own η, as in the theorem. ε_s, k and the bits are chosen such that
(1 + ω)q < 1 and that 1/√T, not ε_s/(12LC₀), is the step size from T = 100 on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from research.theory.bounds import Setting, corrected_bound, noise_deviation, stochastic_rounding_error, top_k_contraction
from research.theory.many_seeds import AnalyticalViews, Array, MicroAdams
from research.theory.problem import CauchyRegression

ALGORITHMS = ("Algorithm 3", "Algorithm 1", "Algorithm 1, window-corrected")
"""The first is covered by the theorem, the second is the optimizer's default, the third one of its options."""
KEPT, BITS, EPS = 2, 8, 0.2
NOISE_MULTIPLIER = 2.0
ALL_STEPS = tuple(round(10 ** (2 + half / 2)) for half in range(7))
LAST_DECADES = 1_000
"""Smallest T that is used for the slope."""
_INK, _FAINT = "#333333", "#d8d8d8"
_BLUE, _ORANGE, _GREEN, _GREY = "#1f5fa8", "#d9730d", "#2a7f4f", "#8a8a8a"
_TWO_SIDED_99 = 2.576


@dataclass(frozen=True)
class Curve:
    """``averages[i]`` has (1/T)·Σ‖∇f(θ_t)‖² of every seed for T = ``steps[i]``; ``bounds`` only where the theorem applies."""

    algorithm: str
    noise: float
    steps: tuple[int, ...]
    averages: list[Array]
    bounds: list[float] | None
    largest_second_moment: float

    @property
    def means(self) -> Array:
        return np.array([average.mean() for average in self.averages])

    @property
    def standard_errors(self) -> Array:
        return np.array([average.std(ddof=1) / math.sqrt(len(average)) for average in self.averages])

    def slope(self, since: int = LAST_DECADES) -> tuple[float, float]:
        """Least-squares slope of log mean over log T for T ≥ ``since``, and its standard error from that of the means."""
        chosen = [i for i, steps in enumerate(self.steps) if steps >= since]
        x = np.log10([self.steps[i] for i in chosen])
        weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
        means, errors = self.means[chosen], self.standard_errors[chosen]
        return float(weights @ np.log10(means)), float(np.sqrt((weights**2) @ (errors / means / math.log(10)) ** 2))


def setting_of(problem: CauchyRegression, noise_multiplier: float) -> Setting:
    """The theorem's constants for a problem; f* is replaced by its lower bound 0."""
    return Setting(
        initial_gap=float(problem.loss(np.zeros((1, problem.dimension)))[0]),
        smoothness=problem.smoothness,
        gradient_bound=problem.gradient_bound,
        gradient_deviation=problem.gradient_deviation,
        noise_deviation=noise_deviation(noise_multiplier, problem.gradient_bound, problem.batch_size),
        dimension=problem.dimension,
        beta_1=0.9,
        eps=EPS,
        contraction=top_k_contraction(KEPT, problem.dimension),
        rounding_error=stochastic_rounding_error(problem.dimension, BITS),
    )


def measure(
    problem: CauchyRegression,
    algorithm: str,
    noise_multiplier: float,
    all_steps: Sequence[int],
    seeds: int,
    *,
    seed: int = 1,
) -> Curve:
    """Run one of ``ALGORITHMS`` from θ = 0 for each number of steps."""
    covered = algorithm == ALGORITHMS[0]
    setting = setting_of(problem, noise_multiplier)
    averages, largest = [], 0.0
    for steps in all_steps:
        rng = np.random.default_rng((seed, 3 if covered else 1, steps, round(1e6 * noise_multiplier)))
        bound = corrected_bound(setting, steps)
        start = np.zeros((seeds, problem.dimension))
        runs: AnalyticalViews | MicroAdams
        if covered:
            runs = AnalyticalViews(start, bound.step_size, EPS, KEPT, BITS)
        else:
            # √ε_s outside the root is what ε_s under it is where v̂ = 0.
            correction = "paper" if algorithm == ALGORITHMS[1] else "window"
            runs = MicroAdams(start, bound.step_size, math.sqrt(EPS), KEPT, bias_correction=correction)
        average, reached = _run(problem, runs, setting.noise_deviation, steps, rng)
        averages.append(average)
        largest = max(largest, reached)
    bounds = [corrected_bound(setting, steps).total for steps in all_steps] if covered else None
    return Curve(algorithm, setting.noise_deviation, tuple(all_steps), averages, bounds, largest)


def _run(
    problem: CauchyRegression, runs: AnalyticalViews | MicroAdams, noise: float, steps: int, rng: np.random.Generator
) -> tuple[Array, float]:
    """Mean of ‖∇f(θ_t)‖² over t for each seed, and the largest v̂ of Algorithm 3."""
    shape = runs.theta.shape
    total = np.zeros(shape[0])
    for _ in range(steps):
        exact, batch = problem.gradients(runs.theta, rng)
        total += np.einsum("sd,sd->s", exact, exact)
        runs.step(batch + noise * rng.standard_normal(shape), rng.random(shape))
    largest = float(runs.largest_second.max()) if isinstance(runs, AnalyticalViews) else 0.0
    return total / steps, largest


def draw_rate(curves: Sequence[Curve], since: int, path: str) -> None:
    """Plot bound, measurement and slope over T, without and with privacy noise."""
    from dp_microadam.workbench.reporting.figures import canvas, save_png

    figure = canvas(10.0, 5.2)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, noisy in zip(panels, (False, True), strict=True):
        shown = [curve for curve in curves if (curve.noise > 0) == noisy]
        for curve in shown:
            _draw_curve(axes, curve, since)
        axes.grid(color=_FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"steps T of a run with η = 1/√T; slopes from T = {since:,} on", color=_INK)
        axes.set_title(f"with noise, σ = {shown[0].noise:g}" if noisy else "without noise, σ = 0", color=_INK)
        axes.legend(loc="center left", bbox_to_anchor=(0.0, 0.485), labelcolor=_INK, fontsize=8.5, frameon=False)
    panels[0].set_ylabel("mean of ‖∇f(θₜ)‖² over the run", color=_INK)
    save_png(figure, path)


def _draw_curve(axes: Any, curve: Curve, since: int) -> None:
    colour, marker = {"Algorithm 3": (_BLUE, "o"), "Algorithm 1": (_ORANGE, "s")}.get(curve.algorithm, (_GREEN, "^"))
    slope, error = curve.slope(since)
    if curve.bounds:
        axes.plot(curve.steps, curve.bounds, color=_INK, linewidth=1.8, label="corrected bound (Algorithm 3)")
    within = _TWO_SIDED_99 * error
    label = f"{curve.algorithm}: slope {slope:.3f} ± {within:.3f}".replace(" -", " −")
    spread = _TWO_SIDED_99 * curve.standard_errors
    axes.errorbar(curve.steps, curve.means, yerr=spread, color=colour, marker=marker, markersize=5, linewidth=1.6, label=label)
    if curve.bounds:
        reference = [0.55 * curve.means[-1] * math.sqrt(curve.steps[-1] / steps) for steps in curve.steps]
        axes.plot(curve.steps, reference, color=_GREY, linewidth=1.2, linestyle="--", label="slope −0.5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--most-steps", type=int, default=ALL_STEPS[-1])
    parser.add_argument("--out", help="write the picture here")
    options = parser.parse_args()
    problem = CauchyRegression.drawn()
    all_steps = [steps for steps in ALL_STEPS if steps <= options.most_steps]
    curves = [
        measure(problem, algorithm, multiplier, all_steps, options.seeds)
        for algorithm in ALGORITHMS
        for multiplier in (0.0, NOISE_MULTIPLIER)
    ]
    if options.out:
        draw_rate(curves, LAST_DECADES, options.out)
    for curve in curves:
        slope, error = curve.slope()
        print(f"{curve.algorithm}, σ = {curve.noise:g}: slope {slope:.4f} ± {error:.4f} (standard error)")
        for steps, mean, spread in zip(curve.steps, curve.means, curve.standard_errors, strict=True):
            print(f"  T = {steps:>6}: {mean:.4e} ± {spread:.1e}", end="")
            print(f", bound {curve.bounds[curve.steps.index(steps)]:.4e}" if curve.bounds else "")
        if curve.bounds:
            print(f"  largest v̂ {curve.largest_second_moment:.3g}, {100 * curve.largest_second_moment / EPS:.2g} % of ε_s")


if __name__ == "__main__":
    main()
