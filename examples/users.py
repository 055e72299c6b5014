"""Several records per person: each user is protected with all they have, not each record.

Synthetic sensor readings of 400 people, some of whom have 40 readings and others one. A step draws people, takes at most 8
readings of each, and clips the mean of their gradients as a whole.
"""

import tempfile

import torch
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

PEOPLE, FEATURES = 400, 12
torch.manual_seed(0)


def readings(people):
    """So many readings of each of these people, who differ, and how they felt; with the person each is of."""
    who = torch.arange(len(people)).repeat_interleave(people)
    habits = torch.randn(len(people), FEATURES)
    values = habits[who] + 0.7 * torch.randn(len(who), FEATURES)
    labels = (values[:, :3].sum(1) + 0.5 * torch.randn(len(who)) > 0).long()
    return (values, labels), who


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")  # one loss per reading, as always


def hits(model, batch):
    inputs, targets = batch
    return (model(inputs).argmax(1) == targets).float()


train, who = readings(torch.randint(1, 41, (PEOPLE,)))
validation, _ = readings(torch.full((100,), 10))  # other people: nobody is on both sides

plan = PrivacyPlan.solve(dataset_size=PEOPLE, batch_size=40, delta=1e-4, epsilon=4.0, steps=150, examples_per_user=8)
model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 2))
method, plan = methods.default(model, plan)
with tempfile.TemporaryDirectory() as folder:
    trainer = PrivateTrainer(
        model,
        method,
        plan,
        loss,
        accuracy=hits,
        run_dir=f"{folder}/run",
        record=RecordSettings(show_progress=False),
    )
    result = trainer.fit(train, validation, users=who)

print(f"accuracy on other people {100 * result.metrics['validation_accuracy']:.1f} %")
print(f"ε = {result.epsilon:.2f} at δ = {result.delta:g} for each person with all their readings")
