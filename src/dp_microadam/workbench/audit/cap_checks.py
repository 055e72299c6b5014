"""Checks of a cap on the batch: is nobody's chance of being dropped larger than another's, and does the stated ε cover the cap?

A Poisson sample of K examples that exceeds the cap M is cut to M at random. So a step has M examples with probability P(K ≥ M),
an example is in a step with probability E[min(K, M)]/N, and of a full step the number of examples from the first half of the
data is hypergeometric. The ranges are exact. The stated ε of a run is compared with that of dp-accounting.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import binom, hypergeom
from torch import Tensor, nn

from dp_microadam.accounting.costs import SubsampledGaussian, as_dp_event
from dp_microadam.accounting.truncated import Cap
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.workbench.audit.check import FALSE_ALARM, Check, count_range
from dp_microadam.workbench.audit.published import published_steps
from dp_microadam.workbench.audit.sampling_checks import Drawn

RUNS = 5
"""Times as many steps as the sampler is checked for without a cap: about half of them are full."""

_EXAMPLES, _BATCH, _CAP = 400, 100, 100
_TRAINED_STEPS, _TRAINED_CAP, _NOISE, _DELTA = 4, 115, 2.0, 1e-5
# dp-accounting's value on its grid, which reads high by less than this.
_GRID, _ROUNDING = 1e-3, 0.005


def cap_checks(steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check the sampler for ``steps`` steps with a cap, and the ε that ``PrivateTrainer`` states for four."""
    return [*dropping_checks(steps, advance), capped_epsilon_check()]


def dropping_checks(steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check who is dropped where a sample exceeds the cap.

    Formal guarantees: for truncated Poisson sampling each check fails with probability at most ``FALSE_ALARM``.
    """
    plan = PrivacyPlan(_EXAMPLES, _BATCH, 1.0, steps, 1e-5, max_batch_size=_CAP)
    drawn: Drawn = np.zeros((steps, _EXAMPLES), dtype=np.uint8)
    for step in PoissonSampler.from_plan(plan, physical_batch_size=64):
        for chunk in step.chunks:
            np.add.at(drawn[step.index], chunk.numpy(), 1)
        advance(1)
    sizes = drawn.sum(1, dtype=np.int64)
    size = f"{steps:,} steps, {_EXAMPLES:,} examples, at most {_CAP}"
    counts = np.arange(_EXAMPLES + 1)
    law = binom.pmf(counts, _EXAMPLES, plan.sample_rate)
    full, rate = float(law[_CAP:].sum()), float((np.minimum(counts, _CAP) * law).sum()) / _EXAMPLES
    low, high = count_range(steps, full)

    def check(name: str, question: str, statistic: str, value: float, low: float, high: float, alarm: float) -> Check:
        return Check("sampling", f"cap: {name}", question, statistic, value, low, high, alarm, size)

    return [
        check(
            "largest batch",
            "does no step have more examples than the cap?",
            "most examples in a step over the cap",
            int(sizes.max()) / _CAP,
            0,
            1,
            0.0,
        ),
        check(
            "full steps",
            "is the cap reached as often as Poisson samples are so large?",
            "full steps over their expectation",
            np.count_nonzero(sizes == _CAP) / (steps * full),
            low / (steps * full),
            high / (steps * full),
            FALSE_ALARM,
        ),
        check(
            "examples",
            "is every example in as many steps as all others, but for chance?",
            "smallest two-sided p-value of an example's number of steps, times the number of examples",
            _smallest_p_value(drawn.sum(0, dtype=np.int64), steps, rate),
            FALSE_ALARM,
            np.inf,
            FALSE_ALARM,
        ),
        check(
            "who is dropped",
            "does it not depend on an example's number whether it is dropped?",
            "sum over full steps of the share of the first half, as a normal score",
            _score_of_first_half(drawn[sizes == _CAP]),
            float(ndtri(FALSE_ALARM / 2)),
            float(-ndtri(FALSE_ALARM / 2)),
            FALSE_ALARM,
        ),
    ]


def capped_epsilon_check() -> Check:
    """Check the ε that a run with a cap states against dp-accounting's for its truncated subsampled Gaussian."""
    from dp_accounting.pld import PLDAccountant

    plan = PrivacyPlan(_EXAMPLES, _BATCH, _NOISE, _TRAINED_STEPS, _DELTA, "pld", max_batch_size=_TRAINED_CAP)

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return model(batch[0]).flatten()

    stated = published_steps(
        nn.Linear(2, 1), loss, (torch.ones(_EXAMPLES, 2),), plan, lambda gradients: None, max_grad_norm=1.0
    )
    accountant = PLDAccountant(value_discretization_interval=_GRID)
    rate = _BATCH / _EXAMPLES
    accountant.compose(as_dp_event([SubsampledGaussian(rate, _NOISE, stated.updates, cap=Cap(_TRAINED_CAP, _EXAMPLES))]))
    return Check(
        "accounting",
        "cap: stated ε",
        "does the stated ε cover that examples push each other out of a full batch?",
        "stated ε over dp-accounting's",
        stated.epsilon / accountant.get_epsilon(_DELTA),
        1 - _ROUNDING,
        np.inf,
        0.0,
        f"{stated.updates:,} steps, {_EXAMPLES:,} examples, at most {_TRAINED_CAP}",
    )


def _smallest_p_value(counts: np.ndarray, trials: int, rate: float) -> float:
    tails = np.minimum(binom.sf(counts - 1, trials, rate), binom.cdf(counts, trials, rate))
    return min(1.0, 2 * len(counts) * float(tails.min()))


def _score_of_first_half(full: Drawn) -> float:
    """Standard normal if every set of examples of this size is equally likely, by randomizing the jumps; 0 of no step."""
    if not len(full):
        return 0.0
    examples = full.shape[1]
    found = full[:, : examples // 2].sum(1, dtype=np.int64)
    law = hypergeom(examples, examples // 2, int(full[0].sum()))
    inside = np.random.default_rng().random(len(found))
    lower = np.clip(law.cdf(found - 1) + inside * law.pmf(found), 1e-300, None)
    upper = np.clip(law.sf(found - 1) - inside * law.pmf(found), 1e-300, None)
    scores = np.where(lower < upper, ndtri(np.minimum(lower, upper)), -ndtri(np.minimum(lower, upper)))
    return float(scores.sum()) / math.sqrt(len(scores))
