"""Learning rates in units of the noise: what they are by hand, and that a run steps with them."""

import math
from contextlib import closing

import pytest
import torch

from dp_microadam import InputError, Method, MicroAdam, PrivacyPlan, PrivacySettings, PrivateStep, ThresholdAdam, methods
from dp_microadam.plan.learning_rate import DISTANCE, walk_scale
from dp_microadam.training.rates import RunNoise

PLAN = PrivacyPlan(dataset_size=1000, batch_size=50, noise_multiplier=1.5, steps=400, delta=1e-5)
BANDED = PrivacyPlan(dataset_size=1000, batch_size=50, noise_multiplier=1.5, steps=400, delta=1e-5, bands=4)


def sums_of_noise(plan, count, generator):
    """The noise in the sum of the first 1, 2, … means, one row per step, simulated from the plan's coefficients."""
    c = plan.noise_coefficients
    steps = []
    for _ in range(plan.steps):
        drawn = torch.randn(count, generator=generator) * plan.noise_multiplier / plan.batch_size
        for j, before in enumerate(reversed(steps[-(len(c) - 1) :] if len(c) > 1 else []), start=1):
            drawn = drawn - c[j] * before
        steps.append(drawn / c[0])
    return torch.stack(steps).cumsum(0)


@pytest.mark.parametrize("plan", [PLAN, BANDED], ids=["one band", "four bands"])
def test_the_walk_is_what_the_noise_of_all_steps_adds_up_to(plan):
    # The root mean square over steps of the simulated sums, beside one that grows like √t and ends at the walk. 4,000
    # coordinates estimate it to 0.4 % (one deviation); 4 % are beyond ten of them.
    sums = sums_of_noise(plan, 4_000, torch.Generator().manual_seed(0))
    grown = torch.arange(1, plan.steps + 1) / plan.steps
    simulated = float((sums.square().mean() / grown.mean()).sqrt())
    assert plan.noise_walk() == pytest.approx(simulated, rel=0.04)


def test_the_learning_rate_of_a_plan_by_hand():
    # τ = 1.5·3/50 = 0.09; after 400 steps the walk is 0.09·20 = 1.8; 1.5·10000^−¼ = 0.15.
    assert PLAN.noise_walk(sensitivity=3.0) == pytest.approx(1.8)
    assert PLAN.learning_rate(10_000, sensitivity=3.0) == pytest.approx(0.15 / 1.8)
    assert (DISTANCE, walk_scale(10_000)) == (1.5, pytest.approx(0.1))


def take_one_step(make, plan, run_dir):
    """The method, the change of a weight of 10,000 coordinates by one real step, and the privatized mean it was made from."""
    model = torch.nn.Linear(100, 100, bias=False)
    method = make(model)
    data, settings = torch.randn(1000, 100), PrivacySettings(seed=1)
    step = PrivateStep(model, method, plan, lambda model, batch: model(batch).sum(1), data, run_dir=run_dir, privacy=settings)
    with closing(step):
        step.account.begin()
        for _ in range(2):
            before = model.weight.detach().clone()
            means = step.take()
            given = means["weight"].clone()
        method.update(model, means)
        return method, model.weight.detach() - before, given


def sgd(**options):
    return lambda model: Method(torch.optim.SGD(model.parameters(), lr=7.0, **options), distance=DISTANCE)


@pytest.mark.parametrize("plan", [PLAN, BANDED], ids=["one band", "four bands"])
def test_sgd_steps_with_the_plans_own_rate(plan, tmp_path):
    method, change, mean = take_one_step(sgd(), plan, tmp_path)
    torch.testing.assert_close(change, -plan.learning_rate(10_000) * mean, rtol=1e-4, atol=1e-6)
    assert method.learning_rate == pytest.approx(plan.learning_rate(10_000))
    assert method.optimizer.param_groups[0]["lr"] == 7.0  # as the user set it


def test_momentum_does_not_change_how_far_the_noise_walks(tmp_path):
    _, change, mean = take_one_step(sgd(momentum=0.9), PLAN, tmp_path)
    torch.testing.assert_close(change, -0.1 * PLAN.learning_rate(10_000) * mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", [PLAN, BANDED], ids=["one band", "four bands"])
def test_dp_walk_steps_in_units_of_the_gradient_it_sees(plan, tmp_path):
    # The noise is all but everything, so the root mean square of the mean is nearly the noise of a single step, and a step is
    # nearly that of SGD with the plan's rate.
    _, change, mean = take_one_step(methods.dp_walk, plan, tmp_path)
    root_mean_square = mean.square().mean().sqrt()
    effective = plan.steps * (plan.noise_ratios.running_sum / plan.noise_ratios.single_step) ** 2
    torch.testing.assert_close(change, -0.15 / math.sqrt(effective) * mean / root_mean_square, rtol=1e-3, atol=1e-6)


def rate(optimizer, noise, **options):
    method = Method(optimizer, **options)
    method.prepare(noise, noise.steps)
    return method.learning_rate


def weights(size=10_000):
    return [torch.nn.Parameter(torch.zeros(size))]


def test_frozen_parameters_do_not_count():
    model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 1, bias=False))
    for parameters, frozen in ((10_100, False), (100, True)):
        model[0].weight.requires_grad_(not frozen)
        found = rate(torch.optim.SGD(model.parameters(), lr=1.0), RunNoise(0.5, 25, 25.0), distance=1.0)
        assert found == pytest.approx(parameters**-0.25 / (0.5 * 5))


def test_a_rate_stays_what_it_is():
    assert rate(torch.optim.SGD(weights(), lr=0.25), RunNoise(0.5, 25, 25.0, growth=3.0)) == 0.25


def test_a_torch_scheduler_multiplies_a_distance():
    optimizer = torch.optim.SGD(weights(), lr=0.3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    method = Method(optimizer, distance=1.0, schedule=schedule)
    method.prepare(RunNoise(0.5, 100, 100.0), 100)
    rates = []
    for _ in range(3):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(10_000)
        with method.around_step(torch.nn.Module()):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
    assert rates == pytest.approx([0.1 / 5, 0.1 / 10, 0.1 / 20])


@pytest.mark.parametrize(
    ("make", "noise", "words"),
    [
        (torch.optim.Adagrad, 1.0, "the optimizer is Adagrad; it is defined for SGD, Adam, AdamW, ThresholdAdam"),
        (lambda params: torch.optim.SGD(params, lr=1.0), 0.0, "this run adds none"),
    ],
)
def test_a_distance_that_does_not_fit_is_refused_before_a_step_is_spent(make, noise, words):
    with pytest.raises(InputError, match=words):
        rate(make(weights(3)), RunNoise(noise, 4, 4.0), distance=1.0)


def test_a_distance_takes_into_account_what_bands_take_back():
    assert rate(ThresholdAdam(weights()), RunNoise(0.5, 100, 25.0), distance=1.0) == pytest.approx(0.1 / 5)


def test_the_papers_rate_grows_with_the_root_of_single_steps_and_has_no_distance():
    noise = RunNoise(0.5, 100, 25.0, growth=4.0)
    assert rate(MicroAdam(weights(), lr=1e-3), noise) == pytest.approx(2e-3)
    with pytest.raises(InputError, match="the optimizer is MicroAdam; it is defined for"):
        rate(MicroAdam(weights()), noise, distance=1.0)


def test_every_group_has_the_distance_of_its_own():
    one, other = weights(5_000), weights(5_000)
    method = Method(ThresholdAdam([{"params": one, "distance": 3.0}, {"params": other}]), distance=1.0)
    method.prepare(RunNoise(1.0, 4, 4.0), 4)
    rates = [method._rates.of(group, 0) for group in method.optimizer.param_groups]
    assert rates == pytest.approx([0.15, 0.05])


def test_without_noise_optimizers_that_divide_by_the_gradient_keep_the_distance():
    assert rate(torch.optim.AdamW(weights()), RunNoise(0.0, 100, 100.0), distance=1.0) == pytest.approx(0.01)
