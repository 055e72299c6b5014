"""Regression and quantiles: how far a disease has progressed after a year, with a range that holds it in 80 % of cases.

442 patients, ten measurements each (scikit-learn). One network predicts three quantiles by the pinball loss.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

columns, progress = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
columns, progress = columns * 20, (progress - 150) / 100  # public constants: the score is known to lie between 25 and 346
order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
train, test = order[:354], order[354:]
quantiles = torch.tensor([0.1, 0.5, 0.9])
model = nn.Linear(10, 3)


def loss(model, batch):
    inputs, targets = batch
    below = targets.unsqueeze(1) - model(inputs)
    return torch.maximum(quantiles * below, (quantiles - 1) * below).sum(1)  # pinball loss, summed over an example's quantiles


plan = PrivacyPlan.solve(dataset_size=len(train), batch_size=64, delta=1e-4, epsilon=8.0, steps=400)
method, plan = methods.default(model, plan)
trainer = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False))
result = trainer.fit((columns[train], progress[train]))

with torch.no_grad():
    low, median, high = model(columns[test]).unbind(1)
truth = progress[test]
error, spread = (median - truth).abs().mean(), (truth.median() - truth).abs().mean()
print(f"error {100 * error:.0f}, where always saying the median has {100 * spread:.0f}")
print(f"within the range: {100 * ((low < truth) & (truth < high)).float().mean():.1f} %, ε = {result.epsilon:.2f}")
