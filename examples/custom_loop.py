"""Your own training loop around private steps, which a killed process can resume. Needs scikit-learn."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from dp_microadam import PerformanceSettings, PrivacyPlan, PrivateStep, methods

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = (images / 16).float()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]
run = Path(tempfile.mkdtemp())  # yours, to resume: the ledger stays there
checkpoint = run / "checkpoint.pt"
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


plan = PrivacyPlan.solve(dataset_size=len(train), batch_size=256, delta=1e-4, epsilon=8.0, steps=600)
method, plan = methods.default(model, plan)
step = PrivateStep(
    model,
    method,
    plan,
    loss,
    (images[train], labels[train]),
    run_dir=run,
    performance=PerformanceSettings(physical_batch_size=128),
)
if checkpoint.exists():  # steps recorded after it stay spent
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    method.load_state_dict(saved["method"])
    step.load_state_dict(saved["step"])
for gradients in step:  # record, sample, clip, add noise
    method.update(model, gradients)
    if step.position % 200 == 0:
        torch.save({"model": model.state_dict(), "method": method.state_dict(), "step": step.state_dict()}, checkpoint)
step.close()  # writes what was spent
method.finish(model)  # the averaged weights

accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"test accuracy {100 * accuracy:.1f} % at ε = {step.epsilon():.2f}, δ = {plan.delta:g}")
