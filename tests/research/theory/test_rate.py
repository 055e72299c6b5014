"""The many-seed algorithms are the paper's, and in small the experiment of research/theory.md shows what that page says."""

import math

import numpy as np
import pytest
import torch
from research.theory.bounds import corrected_bound, stochastic_rounding_error
from research.theory.experiment import ALGORITHMS, ALL_STEPS, NOISE_MULTIPLIER, measure, setting_of
from research.theory.many_seeds import AnalyticalViews, MicroAdams, rounded
from research.theory.problem import CauchyRegression

from dp_microadam.optimizers.micro_adam_reference import MicroAdamReference

SEEDS, DIMENSION = 3, 12
ONE_IN_THREE_MILLION = 5
"""Standard errors: a normal mean lies further off on one side with probability 2.9e-7."""


def gradients(seed=0):
    return np.random.default_rng(seed).standard_normal((40, SEEDS, DIMENSION))


def test_algorithm_3_line_by_line():
    """One seed at a time, in plain loops over coordinates."""
    many = AnalyticalViews(np.ones((SEEDS, DIMENSION)), lr=0.1, eps=0.3, kept=3, bits=4)
    rng = np.random.default_rng(4)
    theta, error, m, v, v_hat = ([value] * DIMENSION for value in (1.0, 0.0, 0.0, 0.0, 0.0))
    for gradient in gradients():
        offsets = rng.random((SEEDS, DIMENSION))
        many.step(gradient, offsets)
        accumulated = [g + e for g, e in zip(gradient[1], error, strict=True)]
        kept = sorted(range(DIMENSION), key=lambda j: -abs(accumulated[j]))[:3]  # line 4
        rest = [0.0 if j in kept else a for j, a in enumerate(accumulated)]
        low, level = min(rest), (max(rest) - min(rest)) / 15
        error = [low + level * math.floor((r - low) / level + u) for r, u in zip(rest, offsets[1], strict=True)]  # line 5
        for j in range(DIMENSION):
            compressed = accumulated[j] if j in kept else 0.0
            m[j] = 0.9 * m[j] + 0.1 * compressed  # line 6
            v[j] = 0.999 * v[j] + 0.001 * compressed**2  # line 7
            v_hat[j] = max(v_hat[j], v[j])  # line 8
            theta[j] -= 0.1 * m[j] / math.sqrt(v_hat[j] + 0.3)  # line 9
        np.testing.assert_allclose(many.theta[1], theta, rtol=0, atol=1e-9)
        np.testing.assert_allclose(many.error[1], error, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bias_correction", ["paper", "window"])
def test_algorithm_1_steps_as_the_reference_does(bias_correction):
    many = MicroAdams(np.ones((SEEDS, DIMENSION)), lr=0.1, eps=0.3, kept=3, bias_correction=bias_correction)
    ones = [torch.nn.Parameter(torch.ones(DIMENSION)) for _ in range(SEEDS)]
    options = {"density": 0.25, "bias_correction": bias_correction}
    optimizers = [MicroAdamReference([one], lr=0.1, eps=0.3, **options) for one in ones]
    for gradient in gradients(1):
        gradient = gradient.astype(np.float32).astype(np.float64)
        for one, optimizer, row in zip(ones, optimizers, gradient, strict=True):
            one.grad = torch.from_numpy(row).float()
            optimizer.step()
        many.step(gradient)
        for seed, (one, optimizer) in enumerate(zip(ones, optimizers, strict=True)):
            # Selected values are kept in bfloat16 there; go on from it, so that differences do not add up.
            np.testing.assert_allclose(many.theta[seed], one.detach().numpy(), rtol=0, atol=1e-3)
            many.theta[seed], many.rows[:, seed] = one.detach().numpy(), optimizer.state[one]["window"].numpy()
            error = optimizer._error(optimizer.state[one], optimizer.param_groups[0]).double().numpy()
            np.testing.assert_allclose(many.error[seed], error, rtol=0, atol=1e-5)
            many.error[seed] = error


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_rounding_at_random_is_unbiased_and_within_omega(bits):
    """A mean over 40,000 draws lies within 6 standard errors: a false alarm in fewer than 1e-7 of runs, 24 coordinates."""
    values = np.random.default_rng(2).standard_normal(8)
    draws = rounded(np.tile(values, (40_000, 1)), bits, np.random.default_rng(3).random((40_000, 8)))
    level = (values.max() - values.min()) / (2**bits - 1)
    assert np.abs(draws.mean(axis=0) - values).max() <= 6 * level / 2 / np.sqrt(40_000)
    errors = np.linalg.norm(draws - values, axis=1) / np.linalg.norm(values)
    assert errors.max() <= stochastic_rounding_error(8, bits, values.min(), values.max())


def test_constants_of_the_problem_hold():
    """∇f is that of f; no example's gradient exceeds G, no difference quotient of ∇f L; batches vary within σ_g."""
    problem = CauchyRegression.drawn()
    rng = np.random.default_rng(0)
    points = 0.1 * rng.standard_normal((500, problem.dimension))
    exact, batch = problem.gradients(points, rng)
    direction, small = rng.standard_normal(points.shape), 1e-6
    quotient = (problem.loss(points + small * direction) - problem.loss(points - small * direction)) / (2 * small)
    np.testing.assert_allclose(quotient, (exact * direction).sum(axis=1), rtol=1e-4, atol=1e-8)
    assert np.linalg.norm(batch, axis=1).max() <= problem.gradient_bound
    moved = points + 0.01 * direction
    change = np.linalg.norm(problem.gradients(moved, rng)[0] - exact, axis=1) / np.linalg.norm(moved - points, axis=1)
    assert change.max() <= problem.smoothness * (1 + 1e-12)
    single = CauchyRegression(problem.inputs, problem.targets, problem.scale, 1)
    each = np.stack([single.gradients(points[:1], rng)[1][0] for _ in range(300)])
    assert ((each - exact[0]) ** 2).sum(axis=1).mean() <= problem.gradient_deviation**2 * problem.batch_size


@pytest.mark.parametrize("noise_multiplier", [0.0, NOISE_MULTIPLIER])
def test_algorithm_3_stays_under_the_bound_at_the_rate_the_theorem_promises(noise_multiplier):
    setting = setting_of(CauchyRegression.drawn(), noise_multiplier)
    assert all(corrected_bound(setting, steps).step_size == 1 / math.sqrt(steps) for steps in ALL_STEPS)
    curve = measure(CauchyRegression.drawn(), ALGORITHMS[0], noise_multiplier, (100, 316, 1000, 3162), seeds=32)
    for mean, error, bound in zip(curve.means, curve.standard_errors, curve.bounds, strict=True):
        assert mean + ONE_IN_THREE_MILLION * error < bound
    slope, error = curve.slope(since=316)
    # Not above −½ as far as the seeds can tell, and they tell to within 0.05.
    assert slope - ONE_IN_THREE_MILLION * error <= -0.5
    assert ONE_IN_THREE_MILLION * error < 0.05
    # The measurement can tell: without much descent the mean stays at ‖∇f(θ₁)‖², which has slope 0.
    assert measure(CauchyRegression.drawn(), ALGORITHMS[0], 0.0, (10, 30), seeds=8).slope(since=10)[0] > -0.4
