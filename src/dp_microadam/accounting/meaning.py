"""What (ε, δ) means, for privacy statements, model cards and plans: what attackers reach, μ, and ε for replacing an example.

All of it is computed from privacy loss distributions, whichever accountant computes ε. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dp_microadam.accounting.costs import PrivacyCost, SubsampledGaussian, epsilon
from dp_microadam.accounting.replacement import replace_one_epsilon
from dp_microadam.accounting.trade_off import GaussianBound, gaussian_bound, trade_off
from dp_microadam.errors import InputError

FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
"""Attackers that are stated: those who accuse one innocent in ten, in a hundred and in a thousand."""


def meaning(spent: Sequence[PrivacyCost], delta: float) -> dict[str, Any]:
    """What the steps in ``spent`` let an attacker find out, as a dict for JSON.

    Formal guarantees: ``attacks`` has, for each rate of false positives, a bound on the rate of true positives of any attack on
    one unit. The run is ``mu``-Gaussian differentially private for attacks whose rates of false positives and of false
    negatives are both at least ``mu_smallest_rate``; ``mu`` is None if that can be said of no number. Replacing one unit by
    another is (``replace_one_epsilon``, ``delta``)-differentially private; ``add_or_remove_epsilon`` is the ε of the same
    accountant for adding or removing one, to compare it with. Where none of this can be computed,
    ``not_computed`` says why.

    >>> meaning([SubsampledGaussian(sample_rate=1.0, noise_multiplier=math.sqrt(3), steps=3)], delta=1e-5)["mu"]
    1.0
    """
    steps = [part for part in spent if isinstance(part, SubsampledGaussian)]
    if len(steps) < len(spent):
        return {"not_computed": "a selection among runs is accounted for by RDP alone, which has no such curve"}
    try:
        curve = trade_off(spent)
        bound = _exact_bound(steps) or gaussian_bound(curve)
        replaced, added = replace_one_epsilon(spent, delta), epsilon(spent, delta, "pld")
    except InputError as error:
        return {"not_computed": str(error)}
    return {
        "attacks": [
            {"false_positive_rate": rate, "true_positive_rate": curve.true_positives(rate)} for rate in FALSE_POSITIVE_RATES
        ],
        "mu": None if bound is None else bound.mu,
        "mu_smallest_rate": None if bound is None else bound.smallest_rate,
        "replace_one_epsilon": replaced,
        "add_or_remove_epsilon": added,
    }


def _exact_bound(spent: Sequence[SubsampledGaussian]) -> GaussianBound | None:
    """μ of steps without subsampling, which are one Gaussian mechanism; it holds for all rates. None with subsampling."""
    if any(part.sample_rate < 1 or part.cap is not None for part in spent if part.steps):
        return None
    mu = math.sqrt(math.fsum(part.steps / part.noise_multiplier**2 for part in spent))
    return GaussianBound(round_up_to(mu, 2), 0.0)


def meaning_in_words(found: Mapping[str, Any], delta: float) -> list[tuple[str, str]]:
    """The same as lines of a privacy statement, by name. Everything is rounded up."""
    if "not_computed" in found:
        return [("What attackers reach", f"not computed: {found['not_computed']}")]
    first, *others = found["attacks"]
    shares = [
        f"an attack that accuses {one_in(first['false_positive_rate'])} of those who did not take part finds at most "
        f"{percent(first['true_positive_rate'])} of those who did",
        *(f"{one_in(row['false_positive_rate'])}: {percent(row['true_positive_rate'])}" for row in others),
    ]
    replaced, added = (round_up_to(found[key], 2) for key in ("replace_one_epsilon", "add_or_remove_epsilon"))
    return [
        ("What attackers reach", "; ".join(shares)),
        ("Gaussian privacy", f"{mu_in_words(found)}; from the privacy loss distribution, not by a limit theorem"),
        (
            "Replacing one unit",
            f"ε = {replaced:.2f} at δ = {delta:g} if one unit is exchanged for another, by privacy loss distribution; the same "
            f"gives {added:.2f} for one that is added or removed",
        ),
    ]


def mu_in_words(found: Mapping[str, Any]) -> str:
    """μ of :func:`meaning`, and for which attacks it holds."""
    if found["mu"] is None:
        return "no μ, since an attack may find almost everyone"
    smallest = found["mu_smallest_rate"]
    for_which = f", for attacks with error rates of at least {smallest:g}" if smallest else ""
    return f"μ ≤ {found['mu']:.2f}{for_which}"


def one_in(rate: float) -> str:
    """A rate in words.

    >>> one_in(0.001)
    '1 in 1,000'
    """
    return f"1 in {round(1 / rate):,}"


def percent(share: float) -> str:
    """A share in per cent, rounded up to two decimals.

    >>> percent(0.38914), percent(1.0)
    ('38.92 %', '100 %')
    """
    return "100 %" if share > 0.9999 else f"{round_up_to(100 * share, 2):.2f} %"


def round_up_to(value: float, digits: int) -> float:
    """The next multiple of 10^−``digits``; a value that is one up to rounding stays."""
    scaled = value * 10**digits
    whole = round(scaled) if math.isclose(scaled, round(scaled), rel_tol=1e-12) else math.ceil(scaled)
    return whole / 10**digits
