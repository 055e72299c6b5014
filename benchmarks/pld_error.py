"""How far the PLD accountant reads above the truth: over sampling rates, noise, steps and δ, against three other ways.

    OMP_NUM_THREADS=1 python benchmarks/pld_error.py --points 300

The truth, whichever applies: the closed form of the Gaussian mechanism (rate 1) or of a single step, in 60 digits; the inverse
Laplace transform of the exact moment generating function, which needs no grid of losses and no convolution; and where its
integrand decays too slowly, convolution without tilting in extended precision, on two grids, extrapolated to spacing zero.
Prints the worst of each, and fails if any ε lies below the truth by more than that way's own error.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable

import mpmath
import numpy as np
import scipy.fft
from scipy.optimize import brentq

from dp_microadam.accounting.costs import ORDERS, SubsampledGaussian, epsilon, rdp_of_one_step


def root_of_decreasing(delta_of: Callable[[float], float], delta: float, largest: float) -> float:
    """The ε at which a falling δ(ε) meets ``delta``; 0 if it begins below."""
    if delta_of(0.0) <= delta:
        return 0.0
    while delta_of(largest) > delta:
        largest *= 2
    return float(brentq(lambda e: math.log(max(delta_of(e), 1e-320) / delta), 0.0, largest, xtol=1e-12 * largest, rtol=1e-14))


def by_bisection(delta_of: Callable[[mpmath.mpf], mpmath.mpf], delta: float) -> float:
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    if delta_of(low) <= delta:
        return 0.0
    while delta_of(high) > delta:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return float(high)


def closed_form(rate: float, sigma: float, steps: int, delta: float) -> float:
    """ε of the Gaussian mechanism (Balle and Wang 2018) if the rate is 1, of a single step otherwise; 60 digits."""
    with mpmath.workdps(60):
        q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
        if rate == 1:
            mu = mpmath.sqrt(steps) / s
            return by_bisection(lambda e: mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu), delta)
        assert steps == 1

        def removed(e: mpmath.mpf) -> mpmath.mpf:
            x = s**2 * mpmath.log((mpmath.exp(e) - 1 + q) / q) + mpmath.mpf(1) / 2
            above, shifted = mpmath.ncdf(-x / s), mpmath.ncdf((1 - x) / s)
            return (1 - q) * above + q * shifted - mpmath.exp(e) * above

        def added(e: mpmath.mpf) -> mpmath.mpf:
            if mpmath.exp(-e) <= 1 - q:
                return mpmath.mpf(0)
            x = s**2 * mpmath.log((mpmath.exp(-e) - 1 + q) / q) + mpmath.mpf(1) / 2
            below, shifted = mpmath.ncdf(x / s), mpmath.ncdf((x - 1) / s)
            return below - mpmath.exp(e) * ((1 - q) * below + q * shifted)

        return max(by_bisection(removed, delta), by_bisection(added, delta))


def by_inverse_laplace(rate: float, sigma: float, steps: int, delta: float) -> float | None:
    """ε from δ(ε) = 1/2πi ∫ M(z)^T exp(−zε)/(z(z + 1)) dz along Re z = θ; None where the integrand decays too slowly."""
    orders = np.array(ORDERS)
    bounds = steps * rdp_of_one_step(rate, sigma) + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    best = int(np.argmin(bounds))
    theta, guess = float(orders[best]) - 1, float(bounds[best])
    if guess <= 0 or best == len(orders) - 1:
        return None
    largest = 0.0
    for removed in (True, False):
        period = 80 / theta + 4 * guess + (60 / sigma if removed else 0)
        spacing = 2 * math.pi / period
        found: list[np.ndarray] = []
        count, block = 0, 128
        while True:
            z = theta + 1j * spacing * (count + np.arange(block))
            highest = spacing * (count + block)
            width = min(sigma / 40, sigma**2 / highest * 1.5)
            x = np.arange(-14 * sigma, 14 * sigma + (theta + 1) * removed, width)
            if len(x) * block > 8e6:
                return None
            exponent = (2 * x - 1) / (2 * sigma**2)
            small = np.log1p(rate * np.expm1(np.minimum(exponent, 600)))
            ratio = np.where(exponent > 40, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent), small)
            # E_Q[r^(1 + z)] if removed, E_Q[r^(−z)] if added, Q = N(0, σ²), less 1, so that log1p keeps the digits
            power = (1 + z if removed else -z)[:, None] * ratio
            log_weight = -0.5 * (x / sigma) ** 2 + math.log(width / (sigma * math.sqrt(2 * math.pi)))
            with np.errstate(over="ignore", invalid="ignore"):
                terms = np.where(
                    np.abs(power.real) < 1,
                    np.exp(log_weight) * np.expm1(power),
                    np.exp(log_weight + power) - np.exp(log_weight),
                )
            log_moments = steps * np.log1p(terms.sum(axis=1))
            found.append(log_moments - np.log(z * (z + 1)))
            count += block
            if np.max(found[-1].real[-32:]) < found[0].real[0] - 30:
                break
            if count > 4096:
                return None
        values = np.concatenate(found)
        z = theta + 1j * spacing * np.arange(len(values))
        half = np.ones(len(values))
        half[0] = 0.5

        def delta_of(
            e: float, values: np.ndarray = values, z: np.ndarray = z, half: np.ndarray = half, h: float = spacing
        ) -> float:
            exponents = values - z * e
            shift = float(exponents.real[0])
            total = float(np.sum(half * np.exp(exponents - shift).real)) * h / math.pi
            return math.inf if shift > 650 else max(total, 0.0) * math.exp(shift)

        lower = max(0.0, guess - 20 / theta)  # further down the integral is a small difference of large numbers
        if not delta_of(lower) > delta:
            if largest >= lower > 0:  # of adding; removing spends more
                continue
            return None
        largest = max(
            largest, float(brentq(lambda e: math.log(max(delta_of(e), 1e-320) / delta), lower, guess * 1.01, xtol=1e-12))
        )
    return largest


def by_extended_precision(rate: float, sigma: float, steps: int, delta: float, spacing: float, cells: int) -> float:
    """ε by convolution in extended precision, no tilt, each loss moved to the two grid points beside it."""
    largest = 0.0
    for removed in (True, False):
        x = np.linspace(-16 * sigma, 16 * sigma + removed, 400_001)
        exponent = (2 * x - 1) / (2 * sigma**2)
        small = np.log1p(rate * np.expm1(np.minimum(exponent, 600)))
        ratio = np.where(exponent > 40, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent), small)
        log_density = -0.5 * (x / sigma) ** 2 + (ratio if removed else 0)
        mass = np.exp(log_density).astype(np.longdouble) * (x[1] - x[0]) / (sigma * np.sqrt(2 * np.longdouble(math.pi)))
        loss = ratio if removed else -ratio
        below = np.floor(loss / spacing)
        rest = (loss - below * spacing).astype(np.longdouble)
        up = np.expm1(-rest) / np.expm1(-np.longdouble(spacing))
        law = np.zeros(cells, dtype=np.longdouble)
        np.add.at(law, below.astype(int) % cells, mass * (1 - up))
        np.add.at(law, (below.astype(int) + 1) % cells, mass * up)
        law /= law.sum()
        composed = scipy.fft.irfft(scipy.fft.rfft(law) ** steps, cells)
        losses = spacing * np.concatenate([np.arange(cells // 4 * 3), np.arange(-(cells // 4), 0)])

        def delta_of(e: float, composed: np.ndarray = composed, losses: np.ndarray = losses) -> float:
            above = losses > e
            return float(np.sum(composed[above] * -np.expm1(e - losses[above])))

        largest = max(largest, root_of_decreasing(delta_of, delta, 1.0))
    return largest


def truth(rate: float, sigma: float, steps: int, delta: float, ours: float) -> tuple[str, float, float] | None:
    """Which way, what it says, and its own relative error."""
    if rate == 1 or steps == 1:
        return "closed form", closed_form(rate, sigma, steps, delta), 1e-12
    laplace = by_inverse_laplace(rate, sigma, steps, delta)
    if laplace is not None:
        return "inverse Laplace transform", laplace, 1e-8
    if delta < 1e-13 * steps**0.5 or ours == 0:
        return None
    cells = 2**19
    span = 16 * ours + 2 * float(np.logaddexp(math.log1p(-rate), math.log(rate) + 10 / sigma + 0.5 / sigma**2))
    fine, coarse = (by_extended_precision(rate, sigma, steps, delta, k * span / cells, cells // k) for k in (1, 2))
    extrapolated = fine - (coarse - fine) / 3
    own = 1e-4  # for an ε of 8e-6 it lay 2e-5 above the inverse Laplace transform in 40 digits
    return ("extended precision", extrapolated, own) if abs(fine / extrapolated - 1) < own / 4 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    worst: dict[str, tuple[float, object]] = {}
    least: dict[str, tuple[float, object]] = {}
    counts: dict[str, int] = {}
    slowest, wrong = 0.0, 0
    told = -math.inf
    for number in range(arguments.points):
        if time.perf_counter() - told > 5:
            told = time.perf_counter()
            largest = max((error for error, _ in worst.values()), default=0.0)
            print(f"{number} of {arguments.points} points; too high by at most {largest:.2e}", file=sys.stderr, flush=True)
        rate = 1.0 if number % 5 == 0 else 10 ** draw.uniform(-6, -0.01)
        sigma = 10 ** draw.uniform(math.log10(0.3), 2)
        steps = 1 if number % 5 == 1 else round(10 ** draw.uniform(0, 6))
        delta = 10 ** draw.uniform(-15, -3)
        point = (rate, sigma, steps, delta)
        begin = time.perf_counter()
        ours = epsilon([SubsampledGaussian(rate, sigma, steps)], delta, "pld")
        slowest = max(slowest, time.perf_counter() - begin)
        found = truth(*point, ours)
        if found is None:
            counts["none applies"] = counts.get("none applies", 0) + 1
            continue
        way, exact, own = found
        way += ", ε below 0.1" if exact < 0.1 else ""
        counts[way] = counts.get(way, 0) + 1
        error = 0.0 if ours == exact == 0 else ours / exact - 1 if exact > 0 else math.inf
        if error > 1e-4:
            print(f"{way}: ε {ours:.6g}, truth {exact:.6g}, too high by {error:.2e} at q, σ, T, δ = {point}", flush=True)
        if arguments.verbose:
            print(
                f"{way:26} q={rate:.3g} σ={sigma:.3g} T={steps} δ={delta:.2g}: {ours:.8g} truth {exact:.8g} "
                f"{error:+.2e} ± {own:.0e}",
                flush=True,
            )
        worst[way] = max(worst.get(way, (-math.inf, None)), (error, point))
        least[way] = min(least.get(way, (math.inf, None)), (error, point))
        wrong += error < -own
    for way, (error, point) in worst.items():
        print(
            f"{way}: {counts[way]} points; too high by at most {error:.2e} "
            f"(q, σ, T, δ = {point}), at least {least[way][0]:.2e} {least[way][1]}"
        )
    print(f"no way to check: {counts.get('none applies', 0)} points; slowest ε {slowest:.2f} s; below the truth: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
