"""The Gaussian mechanism. False-alarm rates of the statistical tests are below 1e-6."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from thoroughness import examples

from dp_microadam import GaussianMechanism, InputError, PrivacyError, PrivacyPlan
from dp_microadam.noise.mechanism import noise_ranges
from dp_microadam.noise.randomness import Randomness

ALARM = 1e-7
ZEROS = {"weight": torch.zeros(1000, 500), "bias": torch.zeros(77)}


def mechanism_of(noise_multiplier=1.0, sensitivity=1.0, batch_size=1, *, seed=None, secure=False, **options):
    randomness = Randomness.from_entropy(secure=secure) if seed is None else Randomness.seeded(seed, secure=secure)
    plan = PrivacyPlan(1000, batch_size, noise_multiplier, 10, 1e-5)
    return GaussianMechanism(plan, sensitivity, randomness=randomness, **options)


@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_deviation_sigma_times_sensitivity_over_the_expected_batch(secure):
    mechanism = mechanism_of(3.0, 0.5, 256, secure=secure)
    drawn = mechanism.privatize(ZEROS, step=0)["weight"].double().flatten().numpy()
    deviation = 3.0 * 0.5 / 256
    assert mechanism.noise_deviation == pytest.approx(deviation)
    assert stats.kstest(drawn / deviation, "norm").pvalue > ALARM
    error_of_variance = np.sqrt(2 / drawn.size)
    assert abs(drawn.var() / deviation**2 - 1) < stats.norm.isf(ALARM / 2) * error_of_variance


@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_is_divided_by_the_expected_batch_size_never_by_the_realised_one(secure):
    """With the same seed, two different sums differ after the mechanism by exactly their difference over B."""
    means = []
    for count in (3, 300):
        mechanism = mechanism_of(2.0, 1.0, 100, seed=1, secure=secure)
        means.append(mechanism.privatize({"w": torch.full((50,), float(count), dtype=torch.float64)}, step=0)["w"])
    expected = torch.full((50,), 297 / 100, dtype=torch.float64)
    torch.testing.assert_close(means[1] - means[0], expected, rtol=1e-12 if not secure else 1e-7, atol=0)


def test_an_empty_batch_is_a_step_of_pure_noise():
    mechanism = mechanism_of(2.0, 1.0, 100)
    means = mechanism.privatize(ZEROS, step=0)
    assert means.keys() == ZEROS.keys()
    assert all(tensor.ne(0).any() for tensor in means.values())


def test_noise_is_added_once_per_logical_step():
    mechanism = mechanism_of(2.0, 1.0, 100)
    mechanism.privatize(ZEROS, step=4)
    for step in (4, 3, 0):
        with pytest.raises(PrivacyError, match=f"step {step} was privatized already"):
            mechanism.privatize(ZEROS, step=step)
    mechanism.privatize(ZEROS, step=5)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_noise_is_float32_or_wider_whatever_the_sums_are(dtype, secure):
    mechanism = mechanism_of(secure=secure)
    mean = mechanism.privatize({"w": torch.zeros(100_000, dtype=dtype)}, step=0)["w"]
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # A bfloat16 or float16 number survives the way there and back; numbers of float32 almost never do.
    for narrow in (torch.bfloat16, torch.float16):
        assert (mean.to(narrow).to(mean.dtype) != mean).float().mean() > 0.9


def test_what_goes_in_is_not_changed_and_shapes_are_kept():
    sums = {"w": torch.ones(3, 4, 5), "scalar": torch.tensor(2.0), "transposed": torch.arange(6.0).view(2, 3).t()}
    before = {name: tensor.clone() for name, tensor in sums.items()}
    means = mechanism_of().privatize(sums, step=0)
    for name, tensor in sums.items():
        assert torch.equal(tensor, before[name])
        assert means[name].shape == tensor.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sums_that_are_not_finite_are_refused(value):
    mechanism = mechanism_of()
    with pytest.raises(PrivacyError, match="not finite"):
        mechanism.privatize({"good": torch.zeros(3), "bad": torch.tensor([0.0, value])}, step=0)


def test_the_plan_reaches_the_noise():
    """What the plan solved is what the mechanism adds."""
    plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=1.0, steps=500)
    mechanism = GaussianMechanism(plan, sensitivity=1.5)
    drawn = mechanism.privatize(ZEROS, step=0)["weight"].double()
    deviation = plan.noise_deviation(1.5)
    error_of_deviation = 1 / np.sqrt(2 * drawn.numel())
    assert abs(drawn.std().item() / deviation - 1) < stats.norm.isf(ALARM / 2) * error_of_deviation


def test_a_seeded_step_is_repeatable_and_steps_and_tensors_differ():
    sums = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    one, other = (mechanism_of(batch_size=10, seed=3) for _ in range(2))
    first = one.privatize(sums, step=7)
    again = other.privatize(dict(reversed(sums.items())), step=7)
    assert torch.equal(first["a"], again["a"])
    assert torch.equal(first["b"], again["b"])
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], one.privatize(sums, step=8)["a"])
    assert "not private" in repr(one)


def test_seeded_noise_is_drawn_for_the_purpose_noise_and_the_tensors_name():
    """So that no tensor's name can make its noise and the sample of a step come from the same stream."""
    mechanism = mechanism_of(seed=3)
    mean = mechanism.privatize({"sampling": torch.zeros(100)}, step=2)["sampling"]
    assert torch.equal(mean, Randomness.seeded(3).normals("noise sampling", 2, 100))
    assert not torch.equal(mean, Randomness.seeded(3).normals("sampling", 2, 100))


def test_noise_of_successive_steps_is_independent():
    mechanism = mechanism_of()
    a, b = (mechanism.privatize(ZEROS, step=step)["weight"].double() for step in (0, 1))
    assert abs((a * b).mean().item()) < stats.norm.isf(ALARM / 2) / np.sqrt(a.numel())


def test_secure_results_lie_on_a_grid_that_hides_the_last_bits():
    """All results are multiples of one power of two, whatever the sums were: float64's last bits are gone."""
    mechanism = mechanism_of(3.0, secure=True)
    sums = torch.rand(10_000, dtype=torch.float64) * 1e-3
    cells = mechanism.privatize({"w": sums}, step=0)["w"] * 2**19  # grid: 2^(⌊log2 3⌋ − 20)
    assert torch.equal(cells, cells.round())
    assert len(cells.unique()) > 9_900


def slice_of(rank, size, count):
    return range(count * rank // size, count * (rank + 1) // size)


@examples(40)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(1, 6), st.randoms())
def test_slices_of_the_noise_divide_the_coordinates_whatever_the_order_of_tensors(sizes, size, shuffled):
    sums = {f"tensor {number}": torch.zeros(count) for number, count in enumerate(sizes)}
    covered = {name: [] for name in sums}
    for rank in range(size):
        names = list(sums)
        shuffled.shuffle(names)
        own = noise_ranges({name: sums[name] for name in names}, slice_of(rank, size, sum(sizes)))
        assert sum(map(len, own.values())) <= -(-sum(sizes) // size)
        for name in sums:
            covered[name] += own[name]
    assert covered == {name: list(range(total.numel())) for name, total in sums.items()}


@pytest.mark.parametrize("secure", [False, True])
def test_noise_in_slices_is_that_of_one_process_and_elsewhere_the_sum_stays(secure):
    sums = {"b": torch.randn(40, 30).t(), "a": torch.randn(777), "c": torch.randn(5), "none": torch.zeros(0)}
    deviation = 3.0 * 0.5
    noisy = [
        mechanism_of(3.0, 0.5, 16, noise_slice=partial(slice_of, rank, 3), secure=secure).add_noise(sums, step=0)
        for rank in range(3)
    ]
    drawn = []
    for name, total in sums.items():
        added = torch.stack([one[name].double() - total.double() for one in noisy])
        assert added.shape[1:] == total.shape
        assert added.ne(0).sum(0).eq(1).all(), "each coordinate has noise from one rank and from no other"
        drawn.append(added.sum(0).flatten() / deviation)
    assert stats.kstest(torch.cat(drawn).numpy(), "norm").pvalue > ALARM


@pytest.mark.parametrize("own", [range(1, 0), range(-1, 4), range(6), range(0, 4, 2)])
def test_a_slice_of_other_coordinates_than_there_are_is_refused(own):
    mechanism = mechanism_of(noise_slice=lambda count: own)
    with pytest.raises(PrivacyError, match="noise_slice gave"):
        mechanism.add_noise({"w": torch.zeros(5)}, step=0)
    with pytest.raises(PrivacyError, match="noise_slice leaves coordinates without noise"):
        mechanism_of(noise_slice=lambda count: range(count - 1)).privatize(ZEROS, step=0)


@pytest.mark.parametrize("sensitivity", [0.0, float("inf")])
def test_a_sensitivity_that_is_none_is_refused(sensitivity):
    with pytest.raises(InputError, match=f"sensitivity is {sensitivity}"):
        mechanism_of(sensitivity=sensitivity)
