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
most 1 as well, and both have the same number and so the same group.

With a cap (``truncated.py``), whether so many others are drawn that someone may be dropped is a public coin. If not, the pair
is the one above. If so, the step adds up a random set R of others, or, if the example is kept, R without a random member y and
with x or its replacement x′: u = x − y and v = x′ − y have norms of at most 2 and a distance of at most 2, so that all three
entries are at most those of u = 2 and v = −2. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dp_microadam.accounting.costs import (
    PLD_LEAST_NOISE,
    PLD_MOST_STEPS,
    PrivacyCost,
    SubsampledGaussian,
    least_noise,
    steps_alone,
)
from dp_microadam.accounting.privacy_loss import epsilon_of_composition, least_delta, reach_for
from dp_microadam.accounting.step_loss import PrivacyLoss, loss_of_replaced_step
from dp_microadam.accounting.truncated import by_coin
from dp_microadam.errors import InputError
from dp_microadam.validation import require_in_open


def replace_one_epsilon(spent: Sequence[PrivacyCost], delta: float) -> float:
    """ε at ``delta`` if one example is replaced by another, by PLD.

    At least ε for adding or removing an example, since the other example may contribute nothing. It is computed and not
    doubled: without subsampling it is that of twice the sensitivity; the general rule for removing one and adding another gives
    2ε at a larger δ.

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
    steps = sum(part.steps for part in spent)
    reach = reach_for(delta, steps)
    if steps > PLD_MOST_STEPS:
        raise InputError(f"steps is {steps}; for replacing one example it must be at most {PLD_MOST_STEPS}")
    if least_noise(spent) < PLD_LEAST_NOISE:
        least = min(part.noise_multiplier for part in spent)
        raise InputError(f"noise_multiplier is {least}; for replacing one example it must be at least {PLD_LEAST_NOISE}")
    if reach is None:
        raise InputError(f"delta is {delta:g}; for replacing one example it must be at least {least_delta(steps):.2g}")
    # Both directions are the same, mirrored.
    return epsilon_of_composition([(loss_of_one_replacement(part, reach), part.steps) for part in spent], delta)


def loss_of_one_replacement(part: SubsampledGaussian, reach: float) -> PrivacyLoss:
    """The privacy loss of one of the steps if one example is replaced by another, the same in both directions."""
    q, cap = part.sample_rate, part.cap
    plain = loss_of_replaced_step((1 - q, q), part.noise_multiplier, reach)
    if cap is None:
        return plain
    kept = cap.kept(q)
    return by_coin(plain, loss_of_replaced_step((1 - kept, kept), part.noise_multiplier / 2, reach), cap.reached(q))
