"""Is every batch a Poisson sample, as the accountant takes it to be? Then draws of an example in an epoch are binomial."""

from __future__ import annotations

from collections import Counter

from scipy import stats

from research.field.loops import fast_dp, opacus, ours, rows
from research.field.report import FAST_DP, HOLDS, JAX_PRIVACY, OPACUS, OURS, USER, Finding, Row

SIZE, BATCH, EPOCHS, DELTA = 100, 10, 50, 1e-5
STEPS = SIZE // BATCH
EXPECTED = float(stats.binom.pmf(1, STEPS, BATCH / SIZE))
FALSE_ALARM = 1e-6


def once(batches: list[list[int]]) -> tuple[float, bool]:
    """The share of examples that are drawn exactly once in an epoch, and whether Poisson samples may have it."""
    found = 0
    for epoch in range(EPOCHS):
        drawn = Counter(row for batch in batches[epoch * STEPS : (epoch + 1) * STEPS] for row in batch)
        found += sum(count == 1 for count in drawn.values())
    pairs = SIZE * EPOCHS
    return found / pairs, float(stats.binomtest(found, pairs, EXPECTED).pvalue) > FALSE_ALARM


def by_opacus() -> Finding:
    told = {}
    for poisson in (True, False):
        steps = list(opacus(rows(SIZE, 1), BATCH, EPOCHS * STEPS, 2.0, poisson_sampling=poisson))
        told[poisson] = (*once([one[0] for one in steps]), steps[-1][2].get_epsilon(DELTA))
    (share, holds, epsilon), (other, _, same) = told[True], told[False]
    says = "its docstring says that this does not fit the accountant's assumptions"
    return Finding(
        HOLDS if holds else USER,
        f"{100 * share:.0f} % once, ε = {epsilon:.2f}; with poisson_sampling=False {100 * other:.0f} %, ε = {same:.2f}: {says}",
    )


def by_jax_privacy() -> Finding:
    from jax_privacy.batch_selection import CyclicPoissonSampling

    sampler = CyclicPoissonSampling(sampling_prob=BATCH / SIZE, iterations=EPOCHS * STEPS)
    share, holds = once([batch.tolist() for batch in sampler.batch_iterator(SIZE)])
    told = "its accountant also has batches of fixed size, at twice the sensitivity"
    return Finding(HOLDS if holds else USER, f"{100 * share:.0f} % once by CyclicPoissonSampling; {told}")


def by_fast_dp() -> Finding:
    steps = list(fast_dp(rows(SIZE, 1), BATCH, EPOCHS * STEPS, 2.0))
    share, holds = once([one[0] for one in steps])
    epsilon = steps[-1][2].get_privacy_spent()["eps_rdp"]
    told = "it has no sampler; with the shuffled loader of its examples"
    return Finding(
        HOLDS if holds else USER, f"{told} {100 * share:.0f} % once, ε = {epsilon:.2f} of the sampled Gaussian mechanism"
    )


def by_us() -> Finding:
    share, holds = once([one[0] for one in ours(rows(SIZE, 1), BATCH, EPOCHS * STEPS, 2.0)])
    return Finding(HOLDS if holds else USER, f"{100 * share:.0f} % once; there is no other sampling")


ROW = Row(
    "Batches are Poisson samples",
    f"Of {STEPS} batches {100 * EXPECTED:.0f} % of the examples are in exactly one, as ε assumes; shuffled, all are"
    f" ({SIZE * EPOCHS:,} pairs of example and epoch, false alarm {FALSE_ALARM:g}).",
    "pytorch/opacus issue 80",
    {JAX_PRIVACY: by_jax_privacy, OPACUS: by_opacus, FAST_DP: by_fast_dp, OURS: by_us},
)

if __name__ == "__main__":
    ROW.show()
