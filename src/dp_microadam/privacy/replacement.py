"""Privacy when one example is replaced by another: the second number of a privacy statement.

Two datasets are neighbours here if they have the same number of examples and differ in one of them. With the numbers of all
examples kept, sampling is the same in both; a step in which the example is sampled adds u to the sum on one dataset and v on
the other, vectors of norm at most 1 in units of the sensitivity. So a step is

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
blocks of rows, as ``banded.py`` says; in each block u and v are the contributions c⊗g of the two examples, whose norms are at
most 1 as well, and both have the same number and so the same group. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

from dp_microadam.errors import InputError
from dp_microadam.privacy.accounting import PLD_LEAST_NOISE, PLD_MOST_STEPS, SubsampledGaussian
from dp_microadam.privacy.privacy_loss import (
    CELLS_PER_DEVIATION,
    NODE_WEIGHTS,
    NODES,
    Floats,
    PrivacyLoss,
    epsilon_of_composition,
    least_delta,
    log_likelihood_ratios,
    reach_for,
)
from dp_microadam.validation import require_in_open

_UNIT = 2.0**-53


def replace_one_epsilon(spent: Sequence[SubsampledGaussian], delta: float) -> float:
    """ε at ``delta`` if one example is replaced by another, by PLD.

    At least ε for adding or removing an example, since the other example may contribute nothing. It is computed and not
    doubled: without subsampling it is that of twice the sensitivity; the general rule for removing one and adding another gives
    2ε at a larger δ.

    Formal guarantees: the composition of all steps is (ε, ``delta``)-differentially private for two datasets that differ in the
    contents of one example, under the assumptions of :func:`~dp_microadam.privacy.accounting.epsilon`.

    Raises:
        InputError: for steps that PLD does not take: too many, with too little noise, or at too small a δ.

    >>> paper = SubsampledGaussian(sample_rate=4096 / 45000, noise_multiplier=3.0, steps=2480)
    >>> f"{replace_one_epsilon([paper], delta=1e-5):.3f}"
    '16.750'
    """
    require_in_open("delta", delta, 0, 1)
    parts = tuple(part for part in spent if part.steps > 0)
    return _replace_one_epsilon(parts, delta) if parts else 0.0


@lru_cache(maxsize=256)
def _replace_one_epsilon(spent: tuple[SubsampledGaussian, ...], delta: float) -> float:
    steps = sum(part.steps for part in spent)
    least_noise = min(part.noise_multiplier for part in spent)
    reach = reach_for(delta, steps)
    if steps > PLD_MOST_STEPS:
        raise InputError(f"steps is {steps}; replacing one example is accounted for up to {PLD_MOST_STEPS} steps")
    if least_noise < PLD_LEAST_NOISE:
        raise InputError(f"noise_multiplier is {least_noise}; for replacing one example it must be at least {PLD_LEAST_NOISE}")
    if reach is None:
        raise InputError(f"delta is {delta:g}; for replacing one example it must be at least {least_delta(steps):.2g}")
    # Both directions are the same, mirrored.
    laws = [(loss_of_one_replacement(part.sample_rate, part.noise_multiplier, reach), part.steps) for part in spent]
    return epsilon_of_composition(laws, delta)


@lru_cache(maxsize=16)
def loss_of_one_replacement(sample_rate: float, noise_multiplier: float, reach: float) -> PrivacyLoss:
    """The privacy loss of (1 − q)·N(0, σ²) + q·N(1, σ²) against the same with N(−1, σ²).

    With r(x) = log(1 − q + q·exp((2x − 1)/2σ²)) the loss at x is r(x) − r(−x), which grows with x. Cells and tails are treated
    as in :func:`~dp_microadam.privacy.privacy_loss.loss_of_one_step`.

    Formal guarantees: as there.
    """
    q, sigma = sample_rate, noise_multiplier
    width = 2.0 ** round(math.log2(sigma / CELLS_PER_DEVIATION))
    ends: Floats = (
        np.arange(-math.ceil(reach * sigma / width), math.ceil((1 + reach * sigma) / width) + 1, dtype=np.float64) * width
    )
    weights = (1 - q, q)
    ratios, mirrored = (log_likelihood_ratios(weights, sigma, at) for at in (ends, -ends))
    shares, mirrored_shares = (
        np.exp(math.log(q) + (2 * at - 1) / (2 * sigma**2) - logarithm) for at, logarithm in ((ends, ratios), (-ends, mirrored))
    )

    # 1 − exp(loss at the lower end − loss) at the nodes of each cell and at its upper end, from sums of positive terms.
    distances = np.append(NODES, 1.0) * width / sigma**2
    grows = shares[:-1, None] * np.expm1(distances)
    falls = mirrored_shares[:-1, None] * -np.expm1(-distances)
    drops = (grows + falls) / (1 + grows)
    to_larger = drops[:, :-1] / drops[:, -1:]

    log_density = -0.5 * ((ends[:-1, None] + NODES * width) / sigma) ** 2 + ratios[:-1, None] + np.log1p(grows[:, :-1])
    probabilities = np.exp(log_density) * (NODE_WEIGHTS * width / (sigma * math.sqrt(2 * math.pi)))
    masses = np.zeros(len(ends))
    masses[:-1] += (probabilities * (1 - to_larger)).sum(axis=1)
    masses[1:] += (probabilities * to_larger).sum(axis=1)
    log_tail = float(log_ndtr(-reach))
    masses[0] += math.exp(log_tail)

    slopes = (shares + mirrored_shares) / sigma**2
    rounding = 16 * _UNIT * (np.abs(ratios) + np.abs(mirrored) + slopes * (np.abs(ends) + 1) + q)
    losses = ratios - mirrored + rounding
    kept = masses > 0
    return PrivacyLoss(losses[kept], np.log(masses[kept]), log_tail + math.log(2))
