"""Does the scale of the published gradient tell how large the data is? One example less must not change it beyond the noise."""

from __future__ import annotations

from functools import partial

from dp_microadam import PrivacyPlan
from dp_microadam.workbench.audit.statistics import two_world_epsilon
from research.field.loops import LOOPS, rows
from research.field.report import FAILS, FAST_DP, HOLDS, OPACUS, OURS, Finding, Row

SIZE, BATCH, SIGMA, WIDTH, REPETITIONS, DELTA = 400, 10, 2.0, 10_000, 100, 1e-5
THRESHOLD = SIGMA / (BATCH - 0.5)
"""Between the deviations σC/B of the noise for batches of ten and of nine."""
FALSE_ALARM = 1e-6


CLAIM = PrivacyPlan(dataset_size=SIZE, batch_size=BATCH, noise_multiplier=SIGMA, steps=1, delta=DELTA).epsilon
"""ε of one step of the sampled Gaussian mechanism, which all three libraries account."""


def check(library: str) -> Finding:
    def deviations(size: int) -> list[float]:
        return [float(gradient.std()) for _, gradient, _ in LOOPS[library](rows(size, WIDTH), BATCH, REPETITIONS, SIGMA)]

    full, less = deviations(SIZE), deviations(SIZE - 1)
    alarms = sum(one > THRESHOLD for one in full)
    misses = sum(one <= THRESHOLD for one in less)
    bound = float(two_world_epsilon(alarms, misses, len(full), len(less), DELTA, 1 - FALSE_ALARM))
    scales = (
        f"deviation of the noise {sum(full) / len(full):.4f} with {SIZE} examples, {sum(less) / len(less):.4f} with {SIZE - 1}"
    )
    told = f"{scales}; one step shows ε ≥ {bound:.2f} of the {CLAIM:.2f} that its sampled Gaussian has"
    return Finding(FAILS if bound > CLAIM else HOLDS, told)


ROW = Row(
    "Scale of the update",
    f"One example less does not show in the noise's scale (one step, σ = {SIGMA:g}, false alarm {FALSE_ALARM:g}).",
    "pytorch/opacus issues 571 and 819",
    {name: partial(check, name) for name in (OPACUS, FAST_DP, OURS)},
)

if __name__ == "__main__":
    ROW.show()
