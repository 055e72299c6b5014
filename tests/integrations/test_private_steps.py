"""What every adapter rests on: the host gets privatized gradients and step numbers, and nothing else."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.data import Dataset

from dp_microadam import InputError, PrivacyError, PrivacyPlan
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.integrations.private_steps import PrivateSteps
from dp_microadam.privacy.ledger import read_ledger
from dp_microadam.privacy.mechanism import GaussianMechanism
from dp_microadam.privacy.randomness import Randomness
from dp_microadam.privacy.sampling import PoissonSampler
from dp_microadam.training.evaluation import class_loss


@pytest.fixture
def make_steps(plan, train, tmp_path):
    opened = []

    def make(data=train, **options):
        opened.append(PrivateSteps(options.pop("plan", plan), data, run_dir=tmp_path / options.pop("run", "run"), **options))
        return opened[-1]

    yield make
    for steps in opened:
        steps.close()


def test_the_gradient_is_that_of_the_building_blocks_one_example_at_a_time(make_steps, make_network, plan, train):
    model = make_network().eval()
    steps = make_steps(seed=7, physical_batch_size=8)
    steps.begin(model, class_loss)
    assert steps.take() == 0
    (step,) = [step for step in PoissonSampler.from_plan(plan, randomness=Randomness.seeded(7)) if step.index == 0]
    rows = torch.cat(list(step.chunks))
    total, _ = clipped_sum(model, class_loss, tuple(tensor[rows] for tensor in train), max_grad_norm=1.0)
    expected = GaussianMechanism.from_plan(plan, 1.0, randomness=Randomness.seeded(7)).privatize(total, step=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


class Watched(Dataset):
    """Notes how many steps the ledger had when an example was read."""

    def __init__(self, train, run):
        self.train, self.run, self.seen = train, run, []

    def __len__(self):
        return len(self.train[0])

    def __getitem__(self, index):
        ledger = self.run / "ledger.jsonl"
        self.seen.append(read_ledger(self.run).steps if ledger.exists() else None)
        return tuple(tensor[index] for tensor in self.train)


def test_a_step_is_in_the_ledger_before_an_example_of_it_is_read(make_steps, make_network, train, tmp_path):
    data = Watched(train, tmp_path / "run")
    steps = make_steps(data)
    steps.begin(make_network(), class_loss)
    for taken in range(3):
        data.seen.clear()
        steps.take()
        assert data.seen
        assert set(data.seen) == {taken + 1}


def test_a_step_that_fails_is_spent_and_its_error_tells_nothing(make_steps, make_network, train, tmp_path):
    def broken(model, batch):
        if fail:
            raise ValueError(f"secret {batch[0][0]}")
        return class_loss(model, batch)

    fail = False
    steps = make_steps()
    steps.begin(make_network(), broken)
    fail = True
    with pytest.raises(PrivacyError, match="withheld") as caught:
        steps.take()
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert read_ledger(tmp_path / "run").steps == 1


def test_no_more_steps_than_planned(make_steps, make_network, plan):
    steps = make_steps()
    steps.begin(make_network(), class_loss)
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
    steps.begin(model, loss)
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


def test_what_is_iterated_over_are_step_numbers(make_steps):
    steps = make_steps()
    assert len(steps) == 4
    assert next(iter(steps)) == 0


def test_a_run_goes_on_from_its_stamp_and_lost_steps_stay_spent(make_steps, make_network, plan):
    steps = make_steps()
    steps.begin(make_network(), class_loss)
    for _ in range(4):
        steps.take()
    stamp = json.loads(json.dumps(steps.stamp()))
    for _ in range(2):
        steps.take()
    steps.close()
    again = make_steps()
    again.begin(make_network(), class_loss, stamp)
    assert (again.position, again.remaining) == (6, 3)
    assert again.epsilon() == plan.epsilon_after(6)


def test_a_run_goes_on_from_a_stamp_that_was_taken_after_it_was_closed(make_steps, make_network, plan):
    steps = make_steps()
    steps.begin(make_network(), class_loss)
    steps.take()
    steps.close()
    assert steps.epsilon() == plan.epsilon_after(1)
    again = make_steps()
    again.begin(make_network(), class_loss, steps.stamp())
    assert again.take() == 1


def test_data_of_another_size_than_the_plan_s_is_refused_at_once(make_steps, train, tmp_path):
    with pytest.raises(InputError, match="100 examples"):
        make_steps(tuple(tensor[:100] for tensor in train))
    assert not (tmp_path / "run").exists()


def test_a_stamp_of_another_run_is_refused(make_steps, make_network):
    stamps = []
    for run in ("one", "other"):
        steps = make_steps(run=run)
        steps.begin(make_network(), class_loss)
        stamps.append(steps.stamp())
        steps.close()
    with pytest.raises(PrivacyError, match="another run"):
        make_steps(run="one").begin(make_network(), class_loss, stamps[1])
    with pytest.raises(InputError, match="no run to go on with"):
        make_steps(run="none").begin(make_network(), class_loss, stamps[1])


def test_a_ledger_shorter_than_the_checkpoint_is_refused(make_steps, make_network, tmp_path):
    steps = make_steps()
    steps.begin(make_network(), class_loss)
    for _ in range(4):
        steps.take()
    stamp = steps.stamp()
    steps.close()
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyError, match="missing from the ledger"):
        make_steps().begin(make_network(), class_loss, stamp)


def test_a_run_that_exists_is_not_begun_again(make_steps, make_network):
    steps = make_steps()
    steps.begin(make_network(), class_loss)
    steps.close()
    with pytest.raises(InputError, match="has a ledger already"):
        make_steps().begin(make_network(), class_loss)


def test_a_model_in_which_examples_interact_is_refused_before_anything_is_written(make_steps, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    with pytest.raises(InputError, match="BatchNorm"):
        make_steps().begin(model, class_loss)
    assert not (tmp_path / "run").exists()


def test_the_statement_is_there_from_the_beginning_and_at_the_end(make_steps, make_network, plan, tmp_path):
    steps = make_steps()
    steps.begin(make_network(), class_loss)
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
    steps.begin(make_network(), class_loss)
    steps.close()
    assert (tmp_path / "run" / "privacy.txt").read_text().startswith("NOT PRIVATE")


def test_a_host_s_seed_does_not_repeat_samples_noise_or_dropout(make_steps, make_network):
    gradients = []
    for run in ("one", "other"):
        torch.manual_seed(0)
        model = make_network()
        torch.manual_seed(0)
        steps = make_steps(run=run)
        steps.begin(model, class_loss)
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
    steps.begin(model, class_loss)
    seen.clear()  # the independence check runs on synthetic examples
    steps.take()
    assert not seen


def test_examples_are_read_by_workers_if_asked(make_steps, make_network, train):
    gradients = []
    for workers in (0, 1):
        model = make_network().eval()
        steps = make_steps(torch.utils.data.TensorDataset(*train), run=f"run-{workers}", seed=2, num_workers=workers)
        steps.begin(model, class_loss)
        steps.take()
        gradients.append(model[0].weight.grad)
        steps.close()
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("module", "host", "extra"),
    [("hugging_face", "transformers", "hugging-face"), ("lightning", "lightning.pytorch", "lightning")],
)
def test_without_the_host_the_import_says_what_to_install(module, host, extra):
    code = f"import sys; sys.modules['{host}'] = None; import dp_microadam.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith(f"run pip install 'dp-microadam[{extra}]'")
