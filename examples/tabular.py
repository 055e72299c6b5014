"""A private classifier of tabular data: 569 tumours, 30 measurements each, a small MLP. Needs scikit-learn."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from dp_microadam import PrivacyPlan, PrivacySettings, PrivateTrainer, RecordSettings, methods

columns, labels = (torch.tensor(array) for array in load_breast_cancer(return_X_y=True))
# Constants to normalize by must be public. Logarithms bring lengths, areas and ratios to one scale without looking at the data.
columns = (columns + 1e-3).log().float() / 4
order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
train, test = order[:456], order[456:]

model = nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 2))


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def accuracy(model, batch):
    inputs, targets = batch
    return (model(inputs).argmax(1) == targets).float()


plan = PrivacyPlan.solve(dataset_size=len(train), batch_size=64, delta=1e-4, epsilon=8.0, steps=600)
method, plan = methods.default(model, plan)
trainer = PrivateTrainer(
    model,
    method,
    plan,
    loss,
    accuracy=accuracy,
    privacy=PrivacySettings(public=("logarithm as the scale of the input",)),
    record=RecordSettings(evaluate_every=200),
)
result = trainer.fit((columns[train], labels[train]), validation=(columns[test], labels[test]))
print(f"test accuracy {100 * result.metrics['validation_accuracy']:.1f} % at ε = {result.epsilon:.2f}, δ = {result.delta:g}")
