"""A Poisson sample may be empty: is its step taken, with noise, and counted?"""

from __future__ import annotations

from research.field.loops import opacus, ours, rows
from research.field.report import FAILS, HOLDS, JAX_PRIVACY, OPACUS, OURS, Finding, Row

SIZE, STEPS, WIDTH = 40, 200, 2_000
SCALE = 1.0  # σC/B for σ = C = B = 1: the deviation of every step's noise


def judged(sizes: list[int], deviations: list[float], counted: int) -> Finding:
    empty = [deviation for size, deviation in zip(sizes, deviations, strict=True) if size == 0]
    noisy = sum(abs(deviation - SCALE) < 0.1 for deviation in empty)
    told = f"{noisy} of {len(empty)} empty batches published noise alone, {counted} of {STEPS} steps counted"
    return Finding(HOLDS if noisy == len(empty) > 0 and counted == STEPS else FAILS, told)


def by_opacus() -> Finding:
    steps = list(opacus(rows(SIZE, WIDTH), 1, STEPS, 1.0))
    counted = sum(count for _, _, count in steps[-1][2].accountant.history)
    return judged([len(one[0]) for one in steps], [float(one[1].std()) for one in steps], counted)


def by_jax_privacy() -> Finding:
    import jax
    from jax_privacy import clipping, noise_addition

    summed = clipping.clipped_grad(lambda weight, batch: (weight * batch).sum(), l2_clip_norm=1.0)
    weight = jax.numpy.zeros(WIDTH)
    total = summed(weight, jax.numpy.ones((1, WIDTH)), is_padding_example=jax.numpy.array([True]))
    privatizer = noise_addition.gaussian_privatizer(stddev=1.0)
    noisy, _ = privatizer.update(total, privatizer.init(weight))
    told = f"the user pads; a batch of padding has a sum of {float(abs(total).max()):g} and noise of {float(noisy.std()):.2f}"
    return Finding(HOLDS if not total.any() and abs(float(noisy.std()) - SCALE) < 0.1 else FAILS, told)


def by_us() -> Finding:
    steps = list(ours(rows(SIZE, WIDTH), 1, STEPS, 1.0))
    return judged([len(one[0]) for one in steps], [float(one[1].std()) for one in steps], steps[-1][2].position)


ROW = Row(
    "Empty batches",
    "The step of an empty batch publishes noise as every other does, and is counted.",
    "pytorch/opacus issue 161",
    {OPACUS: by_opacus, JAX_PRIVACY: by_jax_privacy, OURS: by_us},
)

if __name__ == "__main__":
    ROW.show()
