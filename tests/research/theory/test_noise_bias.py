"""The simulation computes what it says, and shows what research/theory.md reads off it."""

import numpy as np
import pytest
from research.theory.noise_bias import DIMENSION, simulate


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
