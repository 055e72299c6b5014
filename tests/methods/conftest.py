"""A problem small enough to do by hand: two linear layers, 13 parameters, eight examples, and all of it again in numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flat import flat
from samplers import sampler_of
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer
from dp_microadam.noise.randomness import Randomness
from dp_microadam.training.trainer import UnprotectedPlan

SEED, BOUND, SIGMA, EXAMPLES, BATCH = 7, 0.6, 0.8, 8, 4
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def half_squared_error(model, batch):
    inputs, targets = batch
    return (model(inputs).squeeze(1) - targets).square() / 2


def tiny_network():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def examples(count=EXAMPLES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(count, generator=generator, dtype=torch.float64)


class ByHand:
    """The run's sample, clipped sums and noise, from their definitions: float64, one example at a time, no autograd."""

    def __init__(self, private, steps):
        self.private = private
        self.weights = {name: value.numpy().copy() for name, value in tiny_network().state_dict().items()}
        self.inputs, self.targets = (part.numpy() for part in examples())
        sampler = sampler_of(EXAMPLES, BATCH, steps, seed=SEED)
        self.samples = [[int(i) for chunk in step.chunks for i in chunk] for step in sampler]
        self.noise = Randomness.seeded(SEED)

    def gradient(self, inputs, target):
        first, hidden_bias, last, bias = (self.weights[name] for name in NAMES)
        hidden = first @ inputs + hidden_bias
        residual = (last @ hidden + bias - target).item()
        back = residual * last[0]
        return {
            "0.weight": np.outer(back, inputs),
            "0.bias": back,
            "1.weight": residual * hidden[None],
            "1.bias": np.array([residual]),
        }

    def clipped(self, example, factors):
        """clip(s⊙g, C) over the parameters that ``factors`` names."""
        whole = self.gradient(self.inputs[example], self.targets[example])
        scaled = {name: factor * whole[name] for name, factor in factors.items()}
        size = np.sqrt(sum((part**2).sum() for part in scaled.values()))
        shrink = min(1.0, BOUND / size) if self.private else 1.0
        return {name: shrink * part for name, part in scaled.items()}

    def mean(self, step, factors=None, of=lambda gradient: gradient):
        """(Σᵢ of(clip(s⊙gᵢ, C)) + noise)/B; the noise is the run's own, as its seed gives it."""
        factors = {name: np.ones_like(self.weights[name]) for name in NAMES} if factors is None else factors
        total = {name: of(np.zeros_like(self.weights[name])) for name in factors}
        for example in self.samples[step]:
            for name, part in self.clipped(example, factors).items():
                total[name] = total[name] + of(part)
        return {name: (part + self.draw(name, step, part.shape)) / BATCH for name, part in total.items()}

    def draw(self, name, step, shape):
        if not self.private:
            return np.zeros(shape)
        count = int(np.prod(shape))
        return BOUND * SIGMA * self.noise.normals(f"noise {name}", step, count, torch.float64).numpy().reshape(shape)


@pytest.fixture
def hand():
    """A run of a method through the trainer, and everything needed to repeat it by hand."""

    def train(make, run_dir, *, steps, private=True, callbacks=(), **options):
        model = tiny_network()
        method = make(model)
        plan = PrivacyPlan(EXAMPLES, BATCH, SIGMA, steps, 1e-2) if private else UnprotectedPlan(EXAMPLES, BATCH, steps)
        trainer = PrivateTrainer(
            model,
            method,
            plan,
            half_squared_error,
            run_dir=run_dir,
            callbacks=callbacks,
            **flat(max_grad_norm=BOUND, physical_batch_size=EXAMPLES, seed=SEED, show_progress=False, **options),
        )
        return SimpleNamespace(trainer=trainer, model=model, method=method, data=examples())

    return SimpleNamespace(train=train, ByHand=ByHand, half_squared_error=half_squared_error, examples=examples, names=NAMES)
