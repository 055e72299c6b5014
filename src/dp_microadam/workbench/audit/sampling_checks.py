"""Checks of the sampling: is it the Poisson sampling that the accountant assumes?

Each of N examples is in each of T steps with probability q, independently. So the number of examples in a step is
Binomial(N, q), in mean and in variance (batches of fixed size have none), an example's number of steps is Binomial(T, q), and
two steps, or two examples, coincide with probability q². All ranges are exact, not asymptotic: counts are compared with the
binomial distribution itself, and spreads by turning each count into a normal number with the distribution function, at random
inside its jumps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import binom
from torch import Tensor, nn

from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.workbench.audit.check import FALSE_ALARM, Check, count_range, mean_square_range
from dp_microadam.workbench.audit.published import published_steps

Drawn = NDArray[np.uint8]
"""How often each step sampled each example: steps × examples."""

# Beyond three blocks of random numbers, each of which has a generator of its own.
BLOCK = 1 << 16
_EXAMPLES = 3 * BLOCK + 5_000
_BATCH = 20_000
# Few examples for the trainer, each with a gradient of its own, and so little noise that everyone's presence can be read.
_WIDTH = 40
_RATE_OF_RUN = 0.2
_NOISE_OF_RUN = 0.05
_CLIPPING_NORM = 0.7
_COLUMNS = 1 << 15


def sampler_checks(steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check ``PoissonSampler`` on more than three blocks of random numbers, in two runs of ``steps`` steps each."""
    plan = sampler_plan(steps)
    drawn = np.zeros((2 * steps, _EXAMPLES), dtype=np.uint8)
    rows = iter(drawn)
    for _ in range(2):
        sampler = PoissonSampler.from_plan(plan, physical_batch_size=4096)
        for step in sampler.load(torch.arange(_EXAMPLES)):
            row = next(rows)
            for chunk in step.chunks:
                np.add.at(row, chunk.numpy(), 1)
            advance(1)
    return [*drawing_checks("sampler", drawn, plan.sample_rate), _blocks(drawn, plan.sample_rate)]


def sampler_plan(steps: int) -> PrivacyPlan:
    """A plan with a generic sample rate; the sampler does not use the noise."""
    return PrivacyPlan(_EXAMPLES, _BATCH, noise_multiplier=1.0, steps=steps, delta=1e-6)


def published_sample_checks(steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check the sampling of a run of ``PrivateTrainer`` from its privatized gradients, and the contribution of each example.

    Each example's gradient is ten times the clipping norm, at an entry of the weights that no other example has. So what a
    step publishes, in units of C/B, is 1 at the entries of those who were drawn and 0 at the others, plus noise.
    """
    examples = _WIDTH * _WIDTH
    plan = PrivacyPlan(examples, round(_RATE_OF_RUN * examples), _NOISE_OF_RUN, steps, delta=1e-5)
    places = torch.arange(examples)
    eye = torch.eye(_WIDTH)
    data = (eye[places // _WIDTH], 10 * _CLIPPING_NORM * eye[places % _WIDTH])
    seen: list[Tensor] = []

    def observe(gradients: dict[str, Tensor]) -> None:
        seen.append(gradients["weight"].t().flatten().double() * (plan.batch_size / _CLIPPING_NORM))
        advance(1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, outputs = batch
        return (model(inputs) * outputs).sum(1)

    published_steps(
        nn.Linear(_WIDTH, _WIDTH, bias=False), loss, data, plan, observe, max_grad_norm=_CLIPPING_NORM, physical_batch_size=64
    )
    values = torch.stack(seen).numpy()
    drawn = np.clip(values.round(), 0, 255).astype(np.uint8)
    return [*drawing_checks("trainer", drawn, plan.sample_rate), _contributions(values, drawn), _noise_beside(values - drawn)]


def drawing_checks(source: str, drawn: Drawn, rate: float) -> list[Check]:
    """Check that ``drawn`` is a Poisson sample of this rate in every step; ``source`` names the sampler.

    Formal guarantees: for a Poisson sample each check fails with probability at most ``FALSE_ALARM``.
    """
    steps, examples = drawn.shape
    size = f"{steps:,} steps, {examples:,} examples"
    at_least_once = (drawn > 0).astype(np.uint8)

    def check(name: str, question: str, statistic: str, value: float, low: float, high: float, detail: str = "") -> Check:
        alarm = 0.0 if high == 1 and low == 0 else FALSE_ALARM
        return Check("sampling", f"{source}: {name}", question, statistic, value, low, high, alarm, size, detail)

    most = int(drawn.max(initial=0))
    expected = drawn.size * rate
    low, high = count_range(drawn.size, rate)
    per_step, per_example = drawn.sum(1, dtype=np.int64), drawn.sum(0, dtype=np.int64)
    checks = [
        check("once", "is nobody drawn twice in one step?", "most draws of one example in one step", most, 0, 1),
        check(
            "sample rate",
            "is the number of draws that of the plan's rate?",
            "draws over their expectation",
            int(per_step.sum()) / expected,
            low / expected,
            high / expected,
        ),
        check(
            "batch sizes",
            "do the sizes of batches vary as binomial ones do?",
            "mean square of the steps' batch sizes as normal scores",
            _mean_square_of_scores(per_step, examples, rate),
            *mean_square_range(steps),
        ),
        check(
            "examples",
            "are all examples drawn equally often, but for chance?",
            "mean square of the examples' counts as normal scores",
            _mean_square_of_scores(per_example, steps, rate),
            *mean_square_range(examples),
        ),
        _overlaps(source, at_least_once, rate, size),
    ]
    for name, question, first, second in (
        ("next step", "does a step say nothing about the next?", at_least_once[0:-1:2], at_least_once[1::2]),
        ("neighbours", "does an example say nothing about its neighbour?", at_least_once[:, 0:-1:2], at_least_once[:, 1::2]),
    ):
        checks.append(_coincidences("sampling", f"{source}: {name}", question, first, second, rate, size))
    return checks


def _mean_square_of_scores(counts: NDArray[np.int64], trials: int, rate: float) -> float:
    """Mean of z², where z is standard normal if the count is Binomial(trials, rate): exactly so, by randomizing its jumps."""
    inside = np.random.default_rng().random(len(counts))
    below, at = binom.sf(counts - 1, trials, rate), binom.pmf(counts, trials, rate)
    # The upper tail keeps its digits where a count is far too large; a tail of zero is as unlikely as numbers get.
    upper = np.clip(below - inside * at, 1e-300, None)
    lower = np.clip(binom.cdf(counts - 1, trials, rate) + inside * at, 1e-300, None)
    return float(np.mean(ndtri(np.minimum(upper, lower)) ** 2))


def _overlaps(source: str, drawn: Drawn, rate: float, size: str) -> Check:
    """The least probable number of common examples over all pairs of steps."""
    steps, examples = drawn.shape
    common = np.zeros((steps, steps))
    for start in range(0, examples, _COLUMNS):
        part = drawn[:, start : start + _COLUMNS].astype(np.float32)
        common += part @ part.T
    first, second = np.triu_indices(steps, 1)
    found = common[first, second]
    tails = np.minimum(binom.sf(found - 1, examples, rate**2), binom.cdf(found, examples, rate**2))
    worst = int(np.argmin(tails))
    return Check(
        "sampling",
        f"{source}: pairs of steps",
        "are samples neither repeated nor kept apart?",
        "smallest two-sided p-value of two steps' common examples, times the number of pairs",
        min(1.0, 2 * len(found) * float(tails[worst])),
        FALSE_ALARM,
        np.inf,
        FALSE_ALARM,
        size,
        f"steps {first[worst] + 1} and {second[worst] + 1}",
    )


def _coincidences(part: str, name: str, question: str, first: Drawn, second: Drawn, rate: float, size: str) -> Check:
    """Check that disjoint pairs, each member sampled at the rate, occur together with its square."""
    columns, rows = min(first.shape[1], second.shape[1]), min(len(first), len(second))
    first, second = first[:rows, :columns], second[:rows, :columns]
    expected = first.size * rate**2
    low, high = count_range(first.size, rate**2)
    both = np.count_nonzero(first & second)
    return Check(
        part, name, question, "coincidences over their expectation", both / expected, low / expected, high / expected,
        FALSE_ALARM, size,
    )  # fmt: skip


def _blocks(drawn: Drawn, rate: float) -> Check:
    """Check that examples one block apart are sampled independently: each block of uniform numbers has its own generator."""
    at_least_once = (drawn > 0).astype(np.uint8)
    size = f"{drawn.shape[0]:,} steps, {BLOCK:,} pairs of examples"
    question = f"does an example say nothing about the one {BLOCK:,} further on?"
    first, second = at_least_once[:, :BLOCK], at_least_once[:, BLOCK : 2 * BLOCK]
    return _coincidences("sampling", "sampler: blocks", question, first, second, rate, size)


def _contributions(values: NDArray[np.float64], drawn: Drawn) -> Check:
    """Check that a sampled example contributes the clipping norm over the expected batch size: 1, on average over a step."""
    taking_part = drawn > 0
    counts = np.maximum(taking_part.sum(1), 1)
    means = np.where(taking_part, values - 1, 0).sum(1) / counts
    return Check(
        "clipping",
        "trainer: contributions",
        "does each example add the clipping norm over the expected batch size, whoever else is there?",
        "mean square of the steps' average excess over 1, over its variance",
        float(np.mean(means**2 * counts)) / _NOISE_OF_RUN**2,
        *mean_square_range(len(values)),
        FALSE_ALARM,
        f"{values.shape[0]:,} steps, {values.shape[1]:,} examples",
    )


def _noise_beside(noise: NDArray[np.float64]) -> Check:
    """Check that the noise in directions with examples is as large as in those without, in every step."""
    low, high = mean_square_range(noise.size)
    return Check(
        "noise",
        "trainer: beside examples",
        "is the noise what the plan says where examples take part?",
        "mean square of the noise over the plan's variance",
        float(np.mean((noise / _NOISE_OF_RUN) ** 2)),
        low,
        high,
        FALSE_ALARM,
        f"{noise.shape[0]:,} steps, {noise.shape[1]:,} coordinates",
    )
