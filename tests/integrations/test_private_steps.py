"""What the adapters have in common: another framework's loop gets privatized gradients and step numbers, and nothing else."""

import json
import subprocess
import sys

import pytest
import torch
from flat import flat, idle

from dp_microadam import InputError, PrivacyError, PrivacyPlan, PrivateStep, methods
from dp_microadam.integrations.private_steps import PrivateSteps
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.evaluation import class_loss
from dp_microadam.training.method import Method


@pytest.fixture
def make_steps(plan, train, tmp_path):
    opened = []

    def make(data=train, **options):
        opened.append(
            PrivateSteps(options.pop("plan", plan), data, run_dir=tmp_path / options.pop("run", "run"), **flat(**options))
        )
        return opened[-1]

    yield make
    for steps in opened:
        steps.close()


def started(model):
    return model, class_loss, Method(idle(model))


def test_no_more_steps_than_planned(make_steps, make_network, plan):
    steps = make_steps()
    assert (len(steps), next(iter(steps))) == (4, 0)
    steps.begin(*started(make_network()))
    taken = [steps.take() for _ in range(3) for _ in steps]  # an epoch is 4 steps
    assert taken == list(range(plan.steps))
    with pytest.raises(PrivacyError, match="all 9 steps"):
        steps.take()


def test_an_empty_sample_is_a_step_of_pure_noise(make_steps, make_network, train, tmp_path):
    # One of 120 on average: a sample is empty with probability 0.37, so that all 60 are not with probability 1e-12.
    plan = PrivacyPlan.solve(dataset_size=120, batch_size=1, delta=1e-3, noise_multiplier=1.0, steps=60)
    calls = []

    def loss(model, batch):
        calls.append(len(batch[0]))
        return class_loss(model, batch)

    model = make_network()
    steps = make_steps(plan=plan)
    steps.begin(model, loss, Method(idle(model)))
    empty = 0
    for _ in range(60):
        calls.clear()
        steps.take()
        if not calls:
            empty += 1
            gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            assert 0.3 < float(gradient.std()) < 3.0  # 66 draws of deviation 1; chance of failing below 1e-12
    assert empty
    assert read_ledger(tmp_path / "run").steps == 60


def test_a_run_goes_on_from_its_stamp_and_lost_steps_stay_spent(make_steps, make_network, plan):
    steps = make_steps()
    steps.begin(*started(make_network()))
    for _ in range(4):
        steps.take()
    state = steps.state()
    for _ in range(2):
        steps.take()
    steps.close()
    assert steps.epsilon() == plan.epsilon_after(6)
    again = make_steps()
    again.begin(*started(make_network()), state)
    assert (again.position, again.remaining) == (6, 3)
    assert again.epsilon() == plan.epsilon_after(6)


def test_a_refused_model_is_released_and_nothing_is_written(make_steps, tmp_path):
    class Centred(torch.nn.Module):
        def forward(self, inputs):
            return inputs - inputs.mean(0)

    model = torch.nn.Sequential(torch.nn.Linear(5, 4), Centred(), torch.nn.Linear(4, 2))
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    method = methods.dp_bitfit(model)
    with pytest.raises(InputError, match="example"):
        make_steps().begin(model, class_loss, method)
    assert not (tmp_path / "run").exists()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks


def test_an_optimizer_of_other_parameters_is_refused(make_steps, make_network, tmp_path):
    model = make_network()
    for parameters, sentence in ((make_network().parameters(), "not the model's"), (model[0].parameters(), "does not hold")):
        with pytest.raises(InputError, match=sentence):
            make_steps().begin(model, class_loss, Method(torch.optim.SGD(parameters)))
    assert not (tmp_path / "run").exists()


def test_steps_before_begin_are_refused(make_steps):
    steps = make_steps()
    assert (steps.position, steps.epsilon(), steps.begun) == (0, 0.0, False)
    with pytest.raises(PrivacyError, match="no ledger is open"):
        steps.take()


def test_an_optimizer_that_anyone_steps_follows_the_method_until_the_run_is_closed(make_steps, make_network):
    """In the phase that scores rows no weight moves, whoever calls the optimizer."""
    model = make_network()
    method = methods.sparta(model, lr=0.1, first_phase=0.2, scoring_epochs=0.5)
    steps = make_steps()
    steps.begin(model, class_loss, method)
    phases, moved = [], []
    while steps.remaining:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        steps.take()
        phases.append(steps.step.phase.name)
        method.optimizer.step()
        moved.append([int((parameter != old).any(-1).sum()) for parameter, old in zip(model.parameters(), before, strict=True)])
    assert phases == ["head, biases, norms"] * 2 + ["scoring"] * 2 + ["selected rows"] * 5
    assert [bool(any(rows)) for rows in moved] == [True] * 2 + [False] * 2 + [True] * 5
    assert {rows[0] for rows in moved} == {0, 2}, "a fifth of eight rows, rounded up"
    steps.close()
    assert not method.optimizer._optimizer_step_pre_hooks


def test_the_statement_is_there_from_the_beginning_and_at_the_end(make_steps, make_network, plan, tmp_path):
    steps = make_steps()
    steps.begin(*started(make_network()))
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["steps_done"] == 0
    for _ in range(plan.steps):
        steps.take()
    steps.close()
    report = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert report["private"] is True
    assert report["steps_done"] == plan.steps
    assert report["epsilon"] == pytest.approx(plan.epsilon)


def test_a_seeded_run_is_stamped_not_private(make_steps, make_network, tmp_path):
    steps = make_steps(seed=1)
    steps.begin(*started(make_network()))
    steps.close()
    assert (tmp_path / "run" / "privacy.txt").read_text().startswith("NOT PRIVATE")


def test_a_host_s_seed_does_not_repeat_samples_noise_or_dropout(make_steps, make_network):
    gradients = []
    for run in ("one", "other"):
        torch.manual_seed(0)
        model = make_network()
        torch.manual_seed(0)
        steps = make_steps(run=run)
        steps.begin(model, class_loss, Method(idle(model)))
        steps.take()
        gradients.append(model[0].weight.grad)
    assert not torch.equal(*gradients)


def test_a_hook_on_a_parameter_sees_no_gradient_without_noise(make_steps, make_network):
    # Trackers that watch gradients register such hooks.
    model, seen = make_network(), []
    for parameter in model.parameters():
        parameter.register_hook(seen.append)
        parameter.register_post_accumulate_grad_hook(seen.append)
    steps = make_steps()
    steps.begin(model, class_loss, Method(idle(model)))
    seen.clear()  # the independence check runs on synthetic examples
    steps.take()
    assert not seen


WITHOUT_HOSTS = """
import importlib, sys
for module, host in (("hugging_face", "transformers"), ("lightning", "lightning.pytorch")):
    sys.modules[host] = None
    try:
        importlib.import_module(f"dp_microadam.integrations.{module}")
    except ImportError as error:
        print(error)
"""


def test_without_the_host_the_import_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_HOSTS], capture_output=True, text=True, check=True)
    for said, extra in zip(done.stdout.splitlines(), ("hugging-face", "lightning"), strict=True):
        assert said.endswith(f"run pip install 'dp-microadam[{extra}]'")


def test_a_plan_with_bands_is_all_that_correlated_noise_needs(make_steps, make_network):
    """The loop of a host takes the steps of our own with the same plan and seed, and its ledger says the groups."""
    banded = PrivacyPlan(120, 10, 1.0, 9, 1e-3, bands=4)
    steps, model = make_steps(plan=banded, seed=5), make_network()
    steps.begin(model, class_loss, Method(idle(model)))
    found = []
    for _ in steps:
        steps.take()
        found.append(model[0].weight.grad.clone())
    again = make_network()
    own = PrivateStep(again, idle(again), banded, class_loss, steps._train, run_dir=steps.run_dir / "own", **flat(seed=5))
    other = [gradients["0.weight"] for gradients in own]
    own.close()
    assert all(torch.equal(one, two) for one, two in zip(found, other, strict=True))
    assert read_ledger(steps.run_dir).spent[0].bands == 4
    assert steps.epsilon() == banded.epsilon


def test_with_bands_every_session_counts_by_itself(make_steps, make_network):
    banded, state = PrivacyPlan(120, 10, 1.0, 12, 1e-3, bands=4), None
    for session in range(3):
        steps = make_steps(plan=banded)
        steps.begin(*started(make_network()), state)
        steps.take()
        state = steps.state()
        assert steps.epsilon() == read_ledger(steps.run_dir).epsilon() == banded.epsilon_after(4 * session + 1)
        steps.close()
    assert steps.epsilon() == banded.epsilon
    assert steps.remaining == 3
