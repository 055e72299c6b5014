"""Private selection: ε of publishing only the best of a random number of private runs.

Papernot and Steinke 2022, "Hyperparameter tuning with Rényi differential privacy", after Liu and Talwar 2019, "Private
selection from private candidates". The number of runs K is drawn from a truncated negative binomial distribution with shape
η and parameter γ (definition 1 of the paper):

    P[K = k] = (1 − γ)^k / (γ^−η − 1) · Π_{i<k} (i + η)/(i + 1)   for k ≥ 1, and (1 − γ)^k / (k·log(1/γ)) for η = 0.

η = 1 is the geometric, η = 0 the logarithmic distribution. If one run has Rényi divergence ε(λ) at each order λ, then the best
of K runs has, at every order λ > 1 and for every auxiliary order λ̂ ≥ 1 (theorem 2),

    ε'(λ) = ε(λ) + (1 + η)·((1 − 1/λ̂)·ε(λ̂) + log(1/γ)/λ̂) + log(E[K])/(λ − 1).
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dp_microadam.accounting.costs import PrivacyCost
from dp_microadam.accounting.one_step import ORDERS, Floats
from dp_microadam.errors import InputError
from dp_microadam.validation import require_in_open_closed, require_non_negative

DISTRIBUTIONS = {"geometric": 1.0, "logarithmic": 0.0}
"""The shapes η that have a name."""

MOST_EXPECTED_RUNS = 1000
_LARGEST_SHAPE = 100

# Probabilities below this are left out of a draw: less than the spacing of the 53-bit number that it starts from.
_NEGLIGIBLE = 2.0**-64


@dataclass(frozen=True)
class Repetitions:
    """The distribution of the number of runs in a private selection: truncated negative binomial, at least one run.

    ``expected_runs`` is its mean E[K], and ``shape`` its η. Both are public; the number that is drawn is not.

    >>> Repetitions(expected_runs=10).most_runs(0.9)
    22
    """

    expected_runs: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        require_in_open_closed("expected_runs", self.expected_runs, 1, MOST_EXPECTED_RUNS)
        if require_non_negative("shape", self.shape) > _LARGEST_SHAPE:
            raise InputError(f"shape is {self.shape}; it must be 0 (logarithmic), 1 (geometric) or a number up to 100")
        object.__setattr__(self, "expected_runs", float(self.expected_runs))
        object.__setattr__(self, "shape", float(self.shape))

    @property
    def name(self) -> str:
        """The distribution in words."""
        names = {shape: name for name, shape in DISTRIBUTIONS.items()}
        return names.get(self.shape, f"truncated negative binomial, shape {self.shape:g}")

    @cached_property
    def log_inverse_gamma(self) -> float:
        """log(1/γ), solved from the mean, which grows with it."""
        from scipy.optimize import brentq

        low = high = math.log(self.expected_runs)  # which is the root for the geometric distribution
        while self._mean_at(low) > self.expected_runs:
            low /= 2
        while self._mean_at(high) < self.expected_runs:
            high *= 2
        if low == high:
            return low
        return float(brentq(lambda t: self._mean_at(t) - self.expected_runs, low, high, xtol=1e-300, rtol=1e-15))

    def _mean_at(self, t: float) -> float:
        """E[K] = η·(1 − γ)/(γ·(1 − γ^η)) at γ = e^−t, and its limit at η = 0."""
        return math.expm1(t) / (-math.expm1(-self.shape * t) / self.shape if self.shape else t)

    def most_runs(self, share: float) -> int:
        """The least number that K stays within with probability ``share``; public, as it does not depend on the draw."""
        totals = itertools.accumulate(value for _, value in self._probabilities())
        return 1 + sum(1 for _ in itertools.takewhile(lambda total: total < share, totals))

    def draw(self) -> int:
        """Draw K from the operating system's entropy.

        Formal guarantees: the distribution of the result differs from the declared one by at most 2⁻⁵² in total variation, and
        nothing predicts it. It is as private as the runs themselves: theorem 2 covers publishing the best run, not K.
        """
        return self.most_runs((secrets.randbits(53) + 1) * 2.0**-53)

    def _probabilities(self) -> Iterator[tuple[int, float]]:
        """k and P[K = k] for k = 1, 2, … up to where they are negligible."""
        t, eta = self.log_inverse_gamma, self.shape
        rest = -math.expm1(-t)  # 1 − γ
        value = rest * (eta * math.exp(-eta * t) / -math.expm1(-eta * t) if eta else 1 / t)
        number = 1
        yield number, value
        while value >= _NEGLIGIBLE or number < self.expected_runs:
            value *= rest * (number + eta) / (number + 1)
            number += 1
            yield number, value


@dataclass(frozen=True)
class SelectedRun:
    """The best of a random number of runs, each of which spends ``run``: one entry of what accountants compose.

    >>> from dp_microadam.accounting.costs import SubsampledGaussian, epsilon
    >>> paper = SubsampledGaussian(sample_rate=4096 / 45000, noise_multiplier=3.0, steps=2480)
    >>> for name in ("geometric", "logarithmic"):
    ...     best_of_ten = SelectedRun((paper,), Repetitions(10, DISTRIBUTIONS[name]))
    ...     print(f"{name} {epsilon([best_of_ten], delta=1e-5):.3f}")
    geometric 13.025
    logarithmic 11.745
    """

    run: tuple[PrivacyCost, ...]
    repetitions: Repetitions

    @property
    def steps(self) -> int:
        """The steps of one run."""
        return sum(part.steps for part in self.run)

    def rdp(self, missing: int = 0) -> Floats:
        """The Rényi divergence of the selection at each of ``ORDERS``: theorem 2, at the best auxiliary order of the list.

        Formal guarantees: publishing the result of a best run is (α, ε_α)-Rényi differentially private for each returned ε_α,
        under adding or removing one example, if every run is an independent execution of the same mechanism (which may begin
        by drawing hyperparameters at random) with the divergences of ``run``; if the score that decides is computed from what
        that run may publish; if the number of runs is drawn independently from ``repetitions``; and if nothing else of the
        runs is published, neither their number nor the results of others. Runs with equal scores may be ordered by age.
        """
        return _rdp_of_selection(self, missing)


@lru_cache(maxsize=256)
def _rdp_of_selection(selected: SelectedRun, missing: int) -> Floats:
    orders = np.array(ORDERS)
    one: Floats = np.sum([part.rdp(missing) for part in selected.run], axis=0)
    repetitions = selected.repetitions
    auxiliary = (1 - 1 / orders) * one + repetitions.log_inverse_gamma / orders
    # A divergence that could not be computed gives no bound, at its own order or as the auxiliary one.
    least = np.min(np.nan_to_num(auxiliary, nan=np.inf, posinf=np.inf))
    found = one + (1 + repetitions.shape) * least + math.log(repetitions.expected_runs) / (orders - 1)
    # Rényi divergences grow with the order, so that the bound of a higher order holds for all lower ones.
    tightened: Floats = np.minimum.accumulate(np.nan_to_num(found, nan=np.inf, posinf=np.inf)[::-1])[::-1].copy()
    tightened.flags.writeable = False
    return tightened
