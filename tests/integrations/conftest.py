"""What the adapters are tested with: two easy classes, a small network with dropout, and a plan of few steps."""

import pytest
import torch

from dp_microadam import PrivacyPlan


@pytest.fixture
def make_network():
    """Builds the same network every time."""

    def make():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))

    return make


@pytest.fixture
def plan():
    return PrivacyPlan.solve(dataset_size=120, batch_size=30, delta=1e-3, noise_multiplier=1.0, steps=9)


@pytest.fixture
def users():
    """Forty users of the 120 training examples, with two to eight each, whose examples do not lie together."""
    return [number % 40 if number < 80 else number % 6 for number in range(120)]


@pytest.fixture
def plan_of_users():
    return PrivacyPlan.solve(dataset_size=40, batch_size=10, delta=1e-3, noise_multiplier=1.0, steps=5, examples_per_user=3)


@pytest.fixture
def train(examples):
    return tuple(tensor[:120] for tensor in examples)


@pytest.fixture
def held_out(examples):
    return tuple(tensor[120:].clone() for tensor in examples)


@pytest.fixture
def examples():
    inputs = torch.randn(160, 5, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()
