"""Private training in Lightning: per_example_loss in place of training_step. Needs lightning and scikit-learn."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import PrivacyPlan
from dp_microadam.integrations.lightning import PrivateLightningModule, PrivateSteps


class Digits(PrivateLightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def per_example_loss(self, batch):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets, reduction="none")

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("accuracy", (self.network(inputs).argmax(1) == targets).float().mean(), prog_bar=True)


images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = (images / 16).float()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]

folder = Path(tempfile.mkdtemp())
plan = PrivacyPlan.solve(dataset_size=len(train), batch_size=256, delta=1e-4, epsilon=8.0, steps=600)
trainer = pl.Trainer(
    default_root_dir=folder, max_epochs=-1, check_val_every_n_epoch=25, enable_progress_bar=False, logger=False
)
trainer.fit(
    Digits(),
    PrivateSteps(plan, (images[train], labels[train]), run_dir=folder / "run"),
    DataLoader(TensorDataset(images[test], labels[test]), batch_size=512),
)
found = trainer.callback_metrics
print(f"test accuracy {100 * found['accuracy']:.1f} % at ε = {found['epsilon']:.2f}, δ = {plan.delta:g}")
