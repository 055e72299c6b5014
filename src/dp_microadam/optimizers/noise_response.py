"""How far an optimizer moves the weights if its gradients are nothing but noise: what a learning rate means under privacy.

Adam divides by the size of what it sees, so that noise of any size moves every coordinate by ``lr`` in a step. MicroAdam with
one second moment for a tensor does the same: it adds gradients up until a coordinate is among the largest of its block, and
then moves it by lr/√v̂ times their sum.

With a second moment for every coordinate, as in the paper, it moves a selected coordinate by a fixed amount instead: m̂/√v̂ of a
coordinate that is alone in the window is its sign, times a constant that only depends on the options. Each step selects a
fraction ``density`` of the coordinates, so the root mean square of a step follows, whatever the noise is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dp_microadam.errors import InputError

_MOST_IN_WINDOW = 0.3


def amount_per_selection(options: Mapping[str, Any]) -> float:
    """How far ``second_moment="coordinate"`` moves a coordinate by selecting it once, relative to ``lr``, over its window.

    ``options`` are those of a parameter group. With ``bias_correction="paper"`` it is the amount after a few thousand steps.

    >>> paper = {"betas": (0.9, 0.999), "window": 10, "density": 0.01, "bias_correction": "paper"}
    >>> round(amount_per_selection(paper), 1)
    20.6
    """
    (beta_1, beta_2), window = options["betas"], options["window"]
    amount = sum((1 - beta_1) * beta_1**age / math.sqrt((1 - beta_2) * beta_2**age) for age in range(window))
    if options["bias_correction"] == "window":
        amount *= math.sqrt(1 - beta_2**window) / (1 - beta_1**window)
    return amount


def step_under_noise(options: Mapping[str, Any]) -> float:
    """The root mean square of what a step of MicroAdam adds to a coordinate under noise, relative to ``lr``; 1 for Adam.

    T steps of rate lr walk a distance of lr·√(T·d) times this with d parameters. With ``second_moment="coordinate"`` that is
    because signs of different selections are independent; it holds where the window has most coordinates once, with
    ``density``·``window`` well below 1 or a window of 1, and others are refused. So is selection without error feedback, which
    leaves out most of the noise.

    >>> options = {"betas": (0.9, 0.999), "window": 10, "density": 0.01, "bias_correction": "paper"}
    >>> [round(step_under_noise({**options, "second_moment": moment}), 2) for moment in ("tensor", "coordinate")]
    [1.0, 2.06]

    Raises:
        InputError: for options with which it is not known.
    """
    if not options.get("error_feedback", True):
        raise InputError("lr_unit is 'walk', which is not defined without error feedback; use lr_unit 'absolute'")
    if options["second_moment"] == "tensor":
        return 1.0
    if options["window"] > 1 and options["density"] * options["window"] > _MOST_IN_WINDOW:
        raise InputError(
            f"lr_unit is 'walk' and second_moment 'coordinate', which needs density·window of at most {_MOST_IN_WINDOW}; it is "
            f"{options['density'] * options['window']:g}; use lr_unit 'absolute'"
        )
    return amount_per_selection(options) * math.sqrt(options["density"])
