"""The figures of research/theory.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.workbench.reporting.figures import canvas, save_png

if TYPE_CHECKING:
    from research.theory.experiment import Curve
    from research.theory.noise_bias import Found

_INK, _FAINT = "#333333", "#d8d8d8"
_BLUE, _ORANGE, _GREEN, _GREY = "#1f5fa8", "#d9730d", "#2a7f4f", "#8a8a8a"
_TWO_SIDED_99 = 2.576
_LEGEND: dict[str, Any] = {"framealpha": 1.0, "edgecolor": "white", "facecolor": "white"}


def plain_axes(axes: Any) -> None:
    """Light grid, no frame."""
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)


def draw_rate(curves: Sequence[Curve], since: int, path: str | Path) -> None:
    """Plot bound, measurement and slope over T, without and with privacy noise."""
    figure = canvas(10.0, 5.2)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, noisy in zip(panels, (False, True), strict=True):
        shown = [curve for curve in curves if (curve.noise > 0) == noisy]
        for curve in shown:
            _draw_curve(axes, curve, since)
        plain_axes(axes)
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


def draw_noise_bias(found: Sequence[Found], path: str | Path) -> None:
    """Plot the signal-to-noise ratio of selected coordinates, and the inflation of v̂; the first entry is without noise."""
    quiet, *noisy = found
    levels = [one.noise_to_signal for one in noisy]
    figure = canvas(10.0, 4.8)
    ratio, moment = figure.subplots(1, 2)
    for name, colour, style, label in (
        ("snr_selected", _BLUE, "-", "selected"),
        ("snr_unselected", _ORANGE, "-", "left in the error"),
        ("snr_selected_without_feedback", _GREEN, "--", "selected, no error feedback"),
        ("snr_gradient", _GREY, ":", "the gradient as a whole"),
    ):
        ratio.plot(levels, [getattr(one, name) for one in noisy], style, color=colour, marker="o", markersize=4, label=label)
    ratio.axhline(1.0, color=_INK, linewidth=0.8)
    ratio.set_ylabel("signal² / noise²", color=_INK)
    ratio.set_title("what DP-MicroAdam selects", color=_INK)
    for name, colour, label in (
        ("adam", _GREY, "DP-Adam"),
        ("adam_bc", _GREEN, "DP-AdamBC"),
        ("micro_adam", _BLUE, "DP-MicroAdam"),
    ):
        for part, style, where in (("large", "-", "largest 1 %"), ("small", "--", "other 99 %")):
            key = f"{part}_{name}"
            values = [getattr(one, key) / getattr(quiet, key) for one in noisy]
            moment.plot(levels, values, style, color=colour, marker="o", markersize=4, label=f"{label}, {where}")
    moment.axhline(1.0, color=_INK, linewidth=0.8)
    moment.set_ylabel("mean v̂ / the same without noise", color=_INK)
    moment.set_title("how noise inflates v̂", color=_INK)
    for axes in (ratio, moment):
        plain_axes(axes)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("noise to signal, √d·σ/‖g‖", color=_INK)
        axes.legend(labelcolor=_INK, fontsize=9, loc="lower left" if axes is ratio else "upper left", **_LEGEND)
    save_png(figure, path)
