"""The simulation computes what it says, and shows what research/theory.md reads off it."""

import numpy as np
import pytest
import torch
from research.theory.noise_bias import BETA_2, DIMENSION, simulate

from dp_microadam import MicroAdam


@pytest.fixture(scope="module")
def found():
    return {level: simulate(level, 300, seed=0) for level in (0.0, 0.3, 10.0)}


def gradient_squares():
    squares = np.arange(1, DIMENSION + 1) ** -1.5
    return squares / squares.sum()


def test_v_hat_of_dp_adam_is_the_squared_gradient_plus_the_variance_of_the_noise(found):
    """To within 6 standard errors of a single step, which averaging over time only narrows: no false alarm in 1e8 runs."""
    squares, variance = gradient_squares(), 100 / DIMENSION
    for part, chosen in (("large", slice(0, 100)), ("small", slice(100, None))):
        count = len(squares[chosen])
        spread = np.sqrt((2 * variance**2 + 4 * variance * squares[chosen].mean()) / count)
        expected = squares[chosen].mean() + variance
        assert getattr(found[10.0], f"{part}_adam") == pytest.approx(expected, abs=6 * spread)
        assert getattr(found[0.0], f"{part}_adam") == pytest.approx(squares[chosen].mean(), rel=1e-9)


def test_v_hat_of_micro_adam_is_that_of_the_optimizer(found):
    """MicroAdam itself, fed with the same gradient; float32 may break a tie in another way, which changes little."""
    gradient = torch.from_numpy(np.sqrt(gradient_squares())).float()
    param = torch.nn.Parameter(torch.zeros(DIMENSION))
    optimizer = MicroAdam([param], quantize=False, scope="tensor", betas=(0.9, BETA_2))
    means = []
    for step in range(1, 301):
        param.grad = gradient.clone()
        optimizer.step()
        if step > 150:
            second = torch.zeros(DIMENSION)
            for age, (where, what) in enumerate(zip(*optimizer.window(param), strict=True)):
                second[where] += (1 - BETA_2) / (1 - BETA_2**step) * BETA_2**age * what.square()
            means.append((float(second[:100].mean()), float(second[100:].mean())))
    large, small = np.mean(means, axis=0)
    assert found[0.0].large_micro_adam == pytest.approx(large, rel=1e-2)
    assert found[0.0].small_micro_adam == pytest.approx(small, rel=1e-2)


def test_the_signal_to_noise_ratio_of_the_gradient_is_that_of_the_setting(found):
    assert found[0.3].snr_gradient == pytest.approx(1 / 0.09)
    assert found[10.0].snr_gradient == pytest.approx(0.01)


def test_selection_prefers_signal_under_weak_noise_and_noise_under_strong_noise(found):
    assert found[0.3].snr_selected > 2 * found[0.3].snr_unselected > 2 * found[0.3].snr_gradient
    assert found[10.0].snr_gradient < found[10.0].snr_selected < found[10.0].snr_unselected


def test_noise_inflates_v_hat_of_micro_adam_on_large_coordinates_and_of_dp_adam_on_small_ones(found):
    def inflation(key):
        return getattr(found[10.0], key) / getattr(found[0.0], key)

    assert inflation("large_micro_adam") > inflation("large_adam") > 1.5
    assert inflation("large_adam_bc") == pytest.approx(1, abs=0.1)
    assert inflation("small_adam") > 20 * inflation("small_micro_adam")


def test_the_same_seed_gives_the_same_figures():
    assert simulate(1.0, 20, seed=3) == simulate(1.0, 20, seed=3)
