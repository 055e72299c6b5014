"""Learning rates in units of the noise: what they are by hand, and that a run steps with them."""

import math
from contextlib import closing
from functools import partial

import pytest
import torch

from dp_microadam import InputError, Method, MicroAdam, PrivacyPlan, PrivateStep, methods
from dp_microadam.optimizers.threshold_adam import ThresholdAdam
from dp_microadam.plan.learning_rate import DISTANCE, walk_scale
from dp_microadam.training.rate_units import RunNoise, walk_factor

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


def take_one_step(method, plan, run_dir):
    """The change of a weight of 10,000 coordinates by one real private step, and the privatized mean it was made from."""
    model = method.model
    step = PrivateStep(
        model, lambda model, batch: model(batch).sum(1), plan, torch.randn(1000, 100), run_dir=run_dir, method=method, seed=1
    )
    with closing(step):
        next(iter(step))
        before = model.weight.detach().clone()
        means = step.take()
        given = means["weight"].clone()
        method.apply(model, means)
        return model.weight.detach() - before, given


def with_model(make):
    model = torch.nn.Linear(100, 100, bias=False)
    method = make(model)
    method.model = model
    return method


@pytest.mark.parametrize("plan", [PLAN, BANDED], ids=["one band", "four bands"])
def test_sgd_steps_with_the_plans_own_rate(plan, tmp_path):
    method = with_model(lambda model: Method(torch.optim.SGD(model.parameters(), lr=DISTANCE), lr_unit="walk"))
    change, mean = take_one_step(method, plan, tmp_path)
    torch.testing.assert_close(change, -plan.learning_rate(10_000) * mean, rtol=1e-4, atol=1e-6)
    assert method.learning_rate == pytest.approx(plan.learning_rate(10_000))
    assert method.optimizer.param_groups[0]["lr"] == DISTANCE  # as the user set it


def test_momentum_does_not_change_how_far_the_noise_walks(tmp_path):
    method = with_model(lambda model: Method(torch.optim.SGD(model.parameters(), lr=DISTANCE, momentum=0.9), lr_unit="walk"))
    change, mean = take_one_step(method, PLAN, tmp_path)
    torch.testing.assert_close(change, -0.1 * PLAN.learning_rate(10_000) * mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", [PLAN, BANDED], ids=["one band", "four bands"])
def test_dp_walk_steps_in_units_of_the_gradient_it_sees(plan, tmp_path):
    # The noise is all but everything, so the root mean square of the mean is nearly the noise of a single step, and a step is
    # nearly that of SGD with the plan's rate.
    method = with_model(methods.dp_walk)
    change, mean = take_one_step(method, plan, tmp_path)
    root_mean_square = mean.square().mean().sqrt()
    horizon = plan.steps * (plan.noise_ratios.running_sum / plan.noise_ratios.single_step) ** 2
    torch.testing.assert_close(change, -0.15 / math.sqrt(horizon) * mean / root_mean_square, rtol=1e-3, atol=1e-6)


def test_frozen_parameters_do_not_count():
    model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 1, bias=False))
    for parameters, frozen in ((10_100, False), (100, True)):
        model[0].weight.requires_grad_(not frozen)
        method = Method(torch.optim.SGD(model.parameters(), lr=1.0), lr_unit="walk")
        method.measure(RunNoise(0.5, 25.0))
        assert method.learning_rate == pytest.approx(parameters**-0.25 / (0.5 * 5))


def test_absolute_rates_are_what_they_were():
    method = Method(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.25))
    method.measure(RunNoise(0.5, 25.0))
    assert method.learning_rate == 0.25
    assert "lr_unit" not in method.optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("make", "noise", "words"),
    [
        (
            torch.optim.Adagrad,
            1.0,
            "the optimizer is Adagrad; it is defined for SGD, Adam, AdamW, TensorAdam and ThresholdAdam",
        ),
        (lambda params: torch.optim.SGD(params, lr=1.0), 0.0, "this run adds none"),
    ],
)
def test_a_unit_that_does_not_fit_is_refused_before_a_step_is_spent(make, noise, words):
    with pytest.raises(InputError, match=words):
        Method(make([torch.nn.Parameter(torch.zeros(3))]), lr_unit="walk").measure(RunNoise(noise, 4.0))
    with pytest.raises(InputError, match="lr_unit is 'steps'; it must be"):
        Method(make([torch.nn.Parameter(torch.zeros(3))]), lr_unit="steps")


def test_threshold_adam_walks_as_far_as_the_unit_says():
    weights = [torch.nn.Parameter(torch.zeros(10_000))]
    assert walk_factor(ThresholdAdam(weights), RunNoise(0.5, 100), 10_000) == pytest.approx(0.01)
    assert walk_factor(ThresholdAdam(weights), RunNoise(0.5, horizon=25, steps=100), 10_000) == pytest.approx(0.1 / 5)


def test_bands_change_rates_by_what_optimizers_make_of_them():
    for make, factor in ((ThresholdAdam, 4.0), (MicroAdam, 2.0), (partial(torch.optim.SGD, lr=1.0), 1.0)):
        method = Method(make([torch.nn.Parameter(torch.zeros(5))]))
        method.correlate(4.0)
        assert method._rate_factor(method.optimizer.param_groups[0]) == factor


def test_without_noise_optimizers_that_divide_by_the_gradient_keep_the_unit():
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(10_000))])
    assert walk_factor(adam, RunNoise(0.0, 100), 10_000) == pytest.approx(0.01)


def test_the_unit_is_saved_with_the_optimizer():
    first = Method(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0), lr_unit="walk")
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    other.load_state_dict(first.optimizer.state_dict())
    assert other.param_groups[0]["lr_unit"] == "walk"
