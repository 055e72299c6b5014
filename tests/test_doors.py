"""One default: every door trains with the same method, distance, average and bands, and reaches the same weights."""

import copy

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import TrainingArguments

from dp_microadam import PerformanceSettings, PrivacyPlan, PrivacySettings, PrivateStep, PrivateTrainer, RecordSettings, methods
from dp_microadam.integrations.hugging_face import PrivateHFTrainer
from dp_microadam.integrations.lightning import PrivateLightningModule, PrivateSteps
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.recipes.assemble import assemble
from dp_microadam.workbench.recipes.recipe import Recipe

SEEDED, CHUNKS = PrivacySettings(seed=3), PerformanceSettings(physical_batch_size=64)
QUIET = RecordSettings(show_progress=False)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that names no method, trained; and what the other doors need to do the same: model, plan with one band, data."""
    named = Recipe(
        name="doors",
        data="digits",
        model="mlp",
        model_options={"hidden": [8]},
        epsilon=20.0,
        steps=120,
        batch_size=16,
        physical_batch_size=64,
        seed=3,
    )
    experiment = assemble(named, tmp_path_factory.mktemp("doors") / "recipe", show_progress=False)
    start = copy.deepcopy(experiment.model)
    images, labels = experiment.data.train
    plan = PrivacyPlan.solve(dataset_size=len(labels), batch_size=16, delta=named.delta, epsilon=20.0, steps=120)
    experiment.fit()
    prepared = Preparation(experiment.data)((images, labels))
    return experiment, start, plan, prepared


def by_trainer(model, plan, data, folder):
    method, plan = methods.default(model, plan)
    trainer = PrivateTrainer(model, method, plan, class_loss, run_dir=folder, privacy=SEEDED, performance=CHUNKS, record=QUIET)
    trainer.fit(data)
    return method, plan


def by_own_loop(model, plan, data, folder):
    method, plan = methods.default(model, plan)
    step = PrivateStep(model, method, plan, class_loss, data, run_dir=folder, privacy=SEEDED, performance=CHUNKS)
    for gradients in step:
        method.update(model, gradients)
    step.close()
    method.finish(model)
    return method, plan


def by_hugging_face(model, plan, data, folder):
    rows = [{"images": image, "labels": label} for image, label in zip(*data, strict=True)]
    arguments = TrainingArguments(
        str(folder), report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", remove_unused_columns=False
    )
    trainer = PrivateHFTrainer(
        model,
        arguments,
        plan=plan,
        train_dataset=_Rows(rows),
        per_example_loss=lambda model, batch: class_loss(model, (batch["images"], batch["labels"])),
        privacy=SEEDED,
        performance=CHUNKS,
    )
    trainer.train()
    trainer.private_steps.step.method.finish(model)
    return trainer.private_steps.step.method, trainer.private_steps.plan


class _Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class _Module(PrivateLightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def per_example_loss(self, batch):
        return class_loss(self.model, batch)


def by_lightning(model, plan, data, folder):
    steps = PrivateSteps(plan, data, run_dir=folder / "run", privacy=SEEDED, performance=CHUNKS)
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    Trainer(max_epochs=-1, default_root_dir=folder, **options, **quiet).fit(module := _Module(model), steps)
    steps.step.method.finish(module)
    return steps.step.method, steps.plan


DOORS = {"trainer": by_trainer, "own loop": by_own_loop, "Hugging Face": by_hugging_face, "Lightning": by_lightning}


def settings_of(method, plan):
    (group,) = method.optimizer.param_groups
    options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
    return type(method), type(method.optimizer), options, method._decay, plan


@pytest.mark.parametrize("door", DOORS)
def test_every_door_has_the_same_default_and_reaches_the_same_weights(recipe, door, tmp_path):
    experiment, start, plan, data = recipe
    model = copy.deepcopy(start)
    method, banded = DOORS[door](model, plan, data, tmp_path / "run")
    ours = experiment.trainer
    assert banded.bands > 1, "the test should see bands"
    assert settings_of(method, banded) == settings_of(ours.method, ours.plan)
    for (name, one), other in zip(model.named_parameters(), experiment.model.parameters(), strict=True):
        if door == "Lightning":  # noise follows the names of parameters, and a module's begin with its attribute
            assert one.shape == other.shape
        else:
            assert torch.equal(one, other), name
    averages = method.average.state_dict(), ours.method.average.state_dict()
    assert len(averages[0]) == len(averages[1])
    if door != "Lightning":
        assert all(torch.equal(averages[0][name], value) for name, value in averages[1].items())
