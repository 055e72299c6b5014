"""What selection, signs and four bits do to a weak signal: computed, against identities, limits and simulations."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from research.theory.efficiency import efficiency

from dp_microadam import InputError, MicroAdam


@pytest.mark.parametrize("density", [0.003, 0.01, 0.1, 0.3, 0.9])
def test_wald_s_second_identity_holds(density):
    # E a² = τ²·E N, and E N = 1/density: an identity that the computation does not use.
    found = efficiency(density)
    assert found.size**2 / found.signs == pytest.approx(1 / density, rel=1e-8)


def test_limits():
    # Without feedback signs of Gaussian values keep 2/π; the rarer a selection, the less its values differ.
    assert efficiency(1.0).signs == pytest.approx(2 / math.pi)
    assert efficiency(0.999).signs == pytest.approx(2 / math.pi, abs=0.01)
    kept = [efficiency(density).signs for density in (0.9, 0.3, 0.1, 0.01, 0.003)]
    assert kept == sorted(kept)
    assert kept[-1] > 0.999
    # A continuous walk leaves ±θ after θ² steps on average; the overshoot of discrete ones adds 0.58 to each end.
    assert efficiency(0.003).threshold + 0.5826 == pytest.approx(math.sqrt(1 / 0.003), rel=1e-3)


def walks(density, drift, steps, coordinates, seed):
    """The sums of signs of selections, the residuals and all gradients of a threshold rule, simulated."""
    rng, threshold = np.random.default_rng(seed), efficiency(density).threshold
    walked, residual = np.zeros(coordinates), np.zeros(coordinates)
    for _ in range(steps):
        residual += drift + rng.standard_normal(coordinates)
        selected = np.abs(residual) >= threshold
        walked += np.where(selected, np.sign(residual), 0.0)
        residual[selected] = 0.0
    return walked, residual


@pytest.mark.parametrize("density", [0.1, 0.3])
def test_a_simulation_has_the_efficiency_that_is_computed(density):
    # 40,000 walks of 600 steps from the middle of a run: the slope is known to 0.4 % and the variance to 0.7 %, so that e is
    # known to 1.1 %; 6 % are more than five deviations: fewer than one false alarm in a million.
    drift, steps = 0.05, 600
    up, rest = walks(density, drift, steps, 40_000, 1)
    down, fallen = walks(density, -drift, steps, 40_000, 2)
    slope = (up.mean() - down.mean()) / (2 * drift)
    found = efficiency(density)
    assert slope**2 / (steps * up.var()) == pytest.approx(found.signs, rel=0.06)
    still, _ = walks(density, 0.0, steps, 40_000, 3)
    assert still.var() == pytest.approx(density * steps, rel=0.06)
    lag = (rest.mean() - fallen.mean()) / (2 * drift)
    assert lag == pytest.approx(found.lag, abs=5.5 * math.sqrt(found.lag / 80_000) / drift)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quantize": False, "density": 0.6, "window": 1}, efficiency(0.6).signs),
        ({"quantize": False, "density": 0.1, "window": 1}, efficiency(0.1).signs),
    ],
    ids=["few steps gather", "ten steps gather"],
)
def test_microadam_keeps_of_a_weak_signal_what_is_computed(options, expected):
    # Half of 400,000 coordinates have a gradient of +0.1 and half of −0.1 standard deviations of the noise. Over 100 steps the
    # mean of what they moved is 10 ± 10/√400,000, which is 0.16 %, and the variance is known to 0.22 %, so that e is known to
    # 0.4 %; 6 % are for the drift, which is not infinitely small.
    size, steps, drift = 400_000, 100, 0.1
    param = torch.nn.Parameter(torch.zeros(size))
    optimizer = MicroAdam([param], lr=1.0, bias_correction="window", **options)
    sign = torch.ones(size)
    sign[size // 2 :] = -1.0
    generator = torch.Generator().manual_seed(4)
    start = None
    for step in range(120 + steps):
        if step == 120:  # thresholds and residuals have settled
            start = param.detach().clone()
        param.grad = drift * sign + torch.randn(size, generator=generator)
        optimizer.step()
    moved = (start - param.detach()) * sign
    found = float(moved.mean()) ** 2 / drift**2 / (steps * float(moved.var()))
    assert found == pytest.approx(expected, rel=0.06)


def test_a_density_that_is_none_is_refused():
    with pytest.raises(InputError, match="density is 0"):
        efficiency(0.0)


def test_the_command_prints_the_table_of_the_documentation():
    command = [sys.executable, "-m", "research.theory.efficiency", "--density", "0.1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[1].split() == ["0.1", "2.54", "0.975", "0.991", "1.4"]
