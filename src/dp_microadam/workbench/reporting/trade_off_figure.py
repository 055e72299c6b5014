"""The figure of what attackers reach: the least rate of misses over that of false accusations, with ε's lines and chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dp_microadam.accounting.costs import PrivacyCost
from dp_microadam.accounting.trade_off import TradeOff, trade_off
from dp_microadam.errors import InputError
from dp_microadam.ledger.statement import round_up
from dp_microadam.workbench.reporting.figures import Figure, add_legend, new_figure, one_panel
from dp_microadam.workbench.reporting.palette import INK, STYLES, Style

_HEIGHT = 270
_POINTS = 161
_CHANCE = STYLES[-1]
_NOTE = "No attack is below a run's curve. Dashed: the weaker bound that (ε, δ) alone gives. Dotted: guessing."


def trade_off_figure(
    runs: Sequence[tuple[str, Style, Sequence[PrivacyCost], float, float]], name: str = "trade-off"
) -> Figure | None:
    """The trade-off curves of runs: label, style, what was spent, ε and δ of each; None if no curve can be computed."""
    drawn = [(label, style, curve, epsilon, delta) for label, style, spent, epsilon, delta in runs if (curve := _curve(spent))]
    if not drawn:
        return None
    figure, grid = new_figure(_HEIGHT)
    axes = grid[0, 0]
    axes.plot([0, 100], [100, 0], color=_CHANCE.colour, linewidth=1.4, linestyle=_CHANCE.line_style, label="chance")
    for label, style, curve, epsilon, delta in drawn:
        rates = np.linspace(0, 1, _POINTS)[1:-1] ** 3  # close together where the curve is steep
        missed = [curve.false_negatives(float(rate)) for rate in rates]
        axes.plot(100 * rates, 100 * np.array(missed), color=style.colour, linewidth=2.0, label=label, zorder=3)
        _draw_lines_of_epsilon(axes, epsilon, delta, style if len(drawn) > 1 else None)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_xlabel("accused of those who did not take part (%)")
    axes.set_ylabel("missed of those who did (%)")
    add_legend(figure)
    return one_panel(name, "What attackers reach", figure, note=_NOTE)


def _curve(spent: Sequence[PrivacyCost]) -> TradeOff | None:
    try:
        return trade_off(spent)
    except InputError:
        return None


def _draw_lines_of_epsilon(axes: Any, epsilon: float, delta: float, style: Style | None) -> None:
    """The least misses that (ε, δ) alone allows: max(0, 1 − δ − e^ε·α, e^(−ε)·(1 − δ − α))."""
    factor = math.exp(min(epsilon, 700.0))
    corner = (1 - delta) / (1 + factor)
    axes.plot(
        [0, 100 * corner, 100 * (1 - delta)], [100 * (1 - delta), 100 * corner, 0],
        color=INK if style is None else style.colour, linewidth=1.3, linestyle=(0, (5, 3)), clip_on=False,
        label=f"ε = {round_up(epsilon)} alone" if style is None else None,
    )  # fmt: skip
