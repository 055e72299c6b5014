"""What (ε, δ) means, by privacy loss distributions: what attackers reach, μ, and ε for replacing an example.

*Replacing.* Two datasets are neighbours here if they have the same number of examples and differ in one of them. With the
numbers of all examples kept, sampling is the same in both; a step in which the example is sampled adds u to the sum on one
dataset and v on the other, vectors of norm at most 1 in units of the sensitivity. So a step is

    (1 − q)·N(0, σ²) + q·N(u, σ²)   against   (1 − q)·N(0, σ²) + q·N(v, σ²).

Theorem: among all such u and v, in any dimension, u = 1 and v = −1 on a line give the largest δ at every ε. (Zhu, Dong and Wang
2022, "Optimal accounting of differential privacy via characteristic function", has dominating pairs and why they compose; the
pair is that of dp-accounting's REPLACE_ONE.)

The reason: with a = exp(ε), q·N(u) under the expectation, and R_v, R_0 the likelihood ratios of N(v) and N(0) to N(u),
δ(ε) = q·E[max(0, 1 − a·R_v − c·R_0)], c = (a − 1)(1 − q)/q ≥ 0. R_v and R_0 are exp(G − Var(G)/2) for jointly Gaussian G with
variances ‖u − v‖²/σ² and ‖u‖²/σ² and covariance ⟨u − v, u⟩/σ². Along a path of covariances Σ the expectation of g(R) changes by
½·Σᵢⱼ dΣᵢⱼ·E[RᵢRⱼ·∂²g/∂Rᵢ∂Rⱼ], and all second derivatives of this g are at least 0: it grows with each of the three
entries. They are largest, at 4, 1 and 2 over σ², for ‖u‖ = 1 and v = −u, all at once. ε < 0 is the same with u and v swapped.

Steps compose adaptively because the pair dominates each of them. With bands an example's participations fall into disjoint
blocks of rows, as ``bands.py`` says; in each block u and v are the contributions c⊗g of the two examples, whose norms are at
most 1 as well, and both have the same number and so the same group.

With a cap (``one_step.py``), whether so many others are drawn that someone may be dropped is a public coin. If not, the pair
is the one above. If so, the step adds up a random set R of others, or, if the example is kept, R without a random member y and
with x or its replacement x′: u = x − y and v = x′ − y have norms of at most 2 and a distance of at most 2, so that all three
entries are at most those of u = 2 and v = −2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dp_microadam.accounting.costs import PrivacyCost, SubsampledGaussian, composed_losses, epsilon, steps_alone
from dp_microadam.accounting.one_step import REPLACED
from dp_microadam.accounting.privacy_loss import epsilon_of_composition
from dp_microadam.accounting.trade_off import GaussianBound, gaussian_bound, trade_off
from dp_microadam.errors import InputError
from dp_microadam.validation import require_in_open


def replace_one_epsilon(spent: Sequence[PrivacyCost], delta: float) -> float:
    """ε at ``delta`` if one example is replaced by another, by PLD.

    At least ε for adding or removing an example, since the other example may contribute nothing, and less than the general rule
    for removing one and adding another gives.

    Formal guarantees: the composition of all steps is (ε, ``delta``)-differentially private for two datasets that differ in the
    contents of one example, under the assumptions of :func:`~dp_microadam.accounting.costs.epsilon`.

    Raises:
        InputError: for steps that PLD does not take: too many, with too little noise, or at too small a δ.

    >>> paper = SubsampledGaussian(sample_rate=4096 / 45000, noise_multiplier=3.0, steps=2480)
    >>> f"{replace_one_epsilon([paper], delta=1e-5):.3f}"
    '16.750'
    """
    require_in_open("delta", delta, 0, 1)
    parts = tuple(part for part in steps_alone(spent) if part.steps > 0)
    return _replace_one_epsilon(parts, delta) if parts else 0.0


@lru_cache(maxsize=256)
def _replace_one_epsilon(spent: tuple[SubsampledGaussian, ...], delta: float) -> float:
    (losses,) = composed_losses(spent, delta, (REPLACED,), "for replacing one example")
    return epsilon_of_composition(losses, delta)  # both directions are the same, mirrored


FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
"""Attackers that are stated: those who accuse one innocent in ten, in a hundred and in a thousand."""


def meaning(spent: Sequence[PrivacyCost], delta: float) -> dict[str, Any]:
    """What the steps in ``spent`` let an attacker find out, as a dict for JSON.

    Formal guarantees: ``attacks`` has, for each rate of false positives, a bound on the rate of true positives of any attack on
    one unit. The run is ``mu``-Gaussian differentially private for attacks whose rates of false positives and of false
    negatives are both at least ``mu_smallest_rate``; ``mu`` is None if that can be said of no number. Replacing one unit by
    another is (``replace_one_epsilon``, ``delta``)-differentially private; ``add_or_remove_epsilon`` is that of the same
    accountant for adding or removing one. Where none of this can be computed, ``not_computed`` says why.

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
    return GaussianBound(float(round_up(mu)), 0.0)


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
    replaced, added = (round_up(found[key]) for key in ("replace_one_epsilon", "add_or_remove_epsilon"))
    return [
        ("What attackers reach", "; ".join(shares)),
        ("Gaussian privacy", f"{mu_in_words(found)}; from the privacy loss distribution, not by a limit theorem"),
        (
            "Replacing one unit",
            f"ε = {replaced} at δ = {delta:g} if one unit is exchanged for another ({added} for adding or removing one), by "
            "privacy loss distribution",
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
    return "100 %" if share > 0.9999 else f"{round_up(100 * share)} %"


def round_up(value: float, digits: int = 2) -> str:
    """ε, or another number, rounded up: rounding to nearest would claim more privacy than there is.

    >>> round_up(7.9911), round_up(8.0), round_up(0.0004)
    ('8.00', '8.00', '0.01')
    """
    if not math.isfinite(value):
        return str(value)
    scaled = value * 10**digits
    whole = round(scaled) if math.isclose(scaled, round(scaled), rel_tol=1e-12) else math.ceil(scaled)
    return f"{whole / 10**digits:.{digits}f}"
