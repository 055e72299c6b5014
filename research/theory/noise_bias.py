"""Simulation of how noise biases the second moments of DP-Adam, DP-AdamBC and DP-MicroAdam, without any private data.

    python -m research.theory.noise_bias [--seeds 4] [--steps 1500] [--out docs/images/theory_noise_bias.png] [--json]

The gradient g is fixed: 10,000 coordinates that decay as rank^−¾, of norm 1, with fresh noise of standard deviation σ per
coordinate and step. The error of MicroAdam is not quantized, as in the paper's experiments.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DIMENSION, DENSITY, WINDOW = 10_000, 0.01, 10
BETA_2, ADAM_BC_FLOOR = 0.999, 5e-8
NOISE_TO_SIGNAL = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""√d·σ/‖g‖; the paper's CIFAR-10 run at noise multiplier 5 has √d·σ = 2 for gradients of norm at most 1."""


@dataclass(frozen=True)
class Found:
    """Measurements at one noise level, averaged over the second half of the steps.

    ``snr_*`` is Σ signal²/Σ noise² over a set of coordinates of the accumulator: those selected in a step, the rest, and those
    a selection without error feedback would have taken. ``large_*`` and ``small_*`` are mean v̂ over the 1 % of coordinates
    with the largest gradients, and over the others.
    """

    noise_to_signal: float
    snr_gradient: float
    snr_selected: float
    snr_unselected: float
    snr_selected_without_feedback: float
    large_share_of_selected: float
    large_adam: float
    large_adam_bc: float
    large_micro_adam: float
    small_adam: float
    small_adam_bc: float
    small_micro_adam: float


def simulate(noise_to_signal: float, steps: int, seed: int) -> Found:
    """Feed g plus noise to the second moments of DP-Adam, DP-AdamBC and DP-MicroAdam for ``steps`` steps."""
    rng = np.random.default_rng(seed)
    gradient = np.arange(1, DIMENSION + 1) ** -0.75 * rng.choice([-1.0, 1.0], DIMENSION)
    gradient /= np.linalg.norm(gradient)
    sigma = noise_to_signal / np.sqrt(DIMENSION)
    kept = round(DENSITY * DIMENSION)
    large = np.arange(DIMENSION) < kept
    signal, noise, second = np.zeros(DIMENSION), np.zeros(DIMENSION), np.zeros(DIMENSION)
    rows = np.zeros((WINDOW, DIMENSION))
    sums: dict[str, list[float]] = {field.name: [] for field in fields(Found)}
    for step in range(1, steps + 1):
        fresh = sigma * rng.standard_normal(DIMENSION)
        signal += gradient
        noise += fresh
        selected = np.argpartition(np.abs(signal + noise), -kept)[-kept:]
        second = BETA_2 * second + (1 - BETA_2) * (gradient + fresh) ** 2
        slot = (step - 1) % WINDOW
        rows[slot] = 0.0
        rows[slot, selected] = (signal + noise)[selected]
        if 2 * step > steps:
            at_once = np.argpartition(np.abs(gradient + fresh), -kept)[-kept:]
            _note(sums, gradient, sigma, signal, noise, fresh, selected, at_once, large)
            correction = 1 - BETA_2**step
            ages = (slot - np.arange(WINDOW)) % WINDOW
            adam = second / correction
            adam_bc = np.maximum(adam - sigma**2, ADAM_BC_FLOOR)
            micro_adam = (1 - BETA_2) / correction * (BETA_2**ages @ rows**2)
            for name, v_hat in (("adam", adam), ("adam_bc", adam_bc), ("micro_adam", micro_adam)):
                sums[f"large_{name}"].append(float(v_hat[large].mean()))
                sums[f"small_{name}"].append(float(v_hat[~large].mean()))
        signal[selected] = noise[selected] = 0.0
    sums["noise_to_signal"] = [noise_to_signal]
    return Found(**{name: float(np.mean(values)) for name, values in sums.items()})


def _note(
    sums: dict[str, list[float]],
    gradient: Array,
    sigma: float,
    signal: Array,
    noise: Array,
    fresh: Array,
    selected: NDArray[np.int64],
    at_once: NDArray[np.int64],
    large: NDArray[np.bool_],
) -> None:
    rest = np.ones(DIMENSION, dtype=bool)
    rest[selected] = False
    sums["snr_gradient"].append(_ratio(float(gradient @ gradient), DIMENSION * sigma**2))
    sums["snr_selected"].append(_ratio(float((signal[selected] ** 2).sum()), float((noise[selected] ** 2).sum())))
    sums["snr_unselected"].append(_ratio(float((signal[rest] ** 2).sum()), float((noise[rest] ** 2).sum())))
    without = _ratio(float((gradient[at_once] ** 2).sum()), float((fresh[at_once] ** 2).sum()))
    sums["snr_selected_without_feedback"].append(without)
    sums["large_share_of_selected"].append(float(large[selected].mean()))


def _ratio(signal: float, noise: float) -> float:
    return signal / noise if noise > 0 else float("inf")


def levels(steps: int, seeds: int) -> list[list[Found]]:
    """For each noise level, what each seed shows."""
    return [[simulate(level, steps, seed) for seed in range(seeds)] for level in NOISE_TO_SIGNAL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", help="write the picture here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = levels(options.steps, options.seeds)
    means = [Found(*np.mean([list(vars(one).values()) for one in level], axis=0).tolist()) for level in found]
    if options.out:
        from research.theory.pictures import draw_noise_bias

        draw_noise_bias(means, options.out)
    if options.json:
        # Without noise the ratios of signal to noise are infinite, which JSON does not know.
        print(json.dumps([{k: v if np.isfinite(v) else None for k, v in vars(mean).items()} for mean in means]))
        return
    quiet = means[0]
    print("√dσ/‖g‖ │ SNR: gradient, selected, left, without feedback │ large among selected │ v̂ inflated, large and small:")
    print("        │                                                │                      │ Adam, AdamBC, MicroAdam each")
    for mean in means[1:]:
        ratios = [
            getattr(mean, f"{part}_{name}") / getattr(quiet, f"{part}_{name}")
            for part in ("large", "small")
            for name in ("adam", "adam_bc", "micro_adam")
        ]
        snr = (mean.snr_gradient, mean.snr_selected, mean.snr_unselected, mean.snr_selected_without_feedback)
        print(f"{mean.noise_to_signal:7g}", *(f"{value:11.4g}" for value in (*snr, mean.large_share_of_selected, *ratios)))


if __name__ == "__main__":
    main()
