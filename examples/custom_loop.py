"""Your own loop from the building blocks: sampler, clipped gradients, noise, ledger, optimizer. Needs scikit-learn."""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

from dp_microadam import ClippedGradients, GaussianMechanism, MicroAdam, PoissonSampler, PrivacyLedger, PrivacyPlan, Randomness
from dp_microadam.privacy.ledger import RunSettings

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = (images / 16).float()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


plan = PrivacyPlan.solve(dataset_size=len(train), batch_size=256, delta=1e-4, epsilon=8.0, steps=600)
randomness = Randomness.from_entropy()
sampler = PoissonSampler.from_plan(plan, physical_batch_size=128, randomness=randomness)
gradients = ClippedGradients(model, loss, max_grad_norm=1.0)
mechanism = GaussianMechanism.from_plan(plan, gradients.sensitivity, randomness=randomness)
settings = RunSettings(randomness.private, randomness.description, gradients.sensitivity)
optimizer = MicroAdam(model.parameters(), lr=3e-3)

with PrivacyLedger.create(tempfile.mkdtemp(), plan, settings) as ledger:
    for step in sampler.load((images[train], labels[train])):
        ledger.record_step()  # before anything of the step is used
        for chunk in step.chunks:  # none, for an empty sample: a step of pure noise
            gradients.accumulate(chunk)
        means = mechanism.privatize(gradients.sums, step=step.index)
        gradients.reset()
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
    spent = ledger.epsilon()

accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"test accuracy {100 * accuracy:.1f} % at ε = {spent:.2f}, δ = {plan.delta:g}")
