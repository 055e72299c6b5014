"""One of several processes of a Lightning run; ``test_lightning.py`` starts them and looks at what they leave behind.

    LOCAL_RANK=… RANK=… WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python lightning_worker.py FOLDER

Also run by a process alone, for comparison: ``train(folder, devices=1)``.
"""

import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from flat import flat
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import InputError, PrivacyPlan, methods
from dp_microadam.integrations.lightning import PrivateDDPStrategy, PrivateLightningModule, PrivateSteps
from dp_microadam.training.evaluation import class_loss

PLAN = PrivacyPlan(dataset_size=60, batch_size=20, noise_multiplier=0.7, steps=8, delta=1e-3)


def examples(count, seed):
    inputs = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, (inputs[:, 0] > 0).long()


class Phased(PrivateLightningModule):
    """Trains by SPARTA: head and biases, then scores, then the chosen rows."""

    def __init__(self, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def per_example_loss(self, batch):
        return class_loss(self.network, batch)

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.per_example_loss(batch).mean(), sync_dist=True)

    def configure_optimizers(self):
        method = methods.sparta(self, lr=0.1, keep=0.5, first_phase=0.25, scoring_epochs=1.0)
        return {"optimizer": method, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.9)}


def trainer_of(folder, devices, **options):
    strategy = PrivateDDPStrategy() if devices > 1 else "auto"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(default_root_dir=folder, **{**quiet, "devices": devices, "strategy": strategy, **options})


def steps_in(folder, **options):
    return PrivateSteps(PLAN, examples(60, 0), run_dir=folder / "run", **flat(seed=4, physical_batch_size=7, **options))


def validation():
    return DataLoader(TensorDataset(*examples(20, 1)), batch_size=5)


def train(folder, devices, module=None):
    """Train to the end: the weights, and the last validation loss."""
    module = module or Phased()
    trainer = trainer_of(folder, devices, enable_checkpointing=False)
    trainer.fit(module, steps_in(folder), validation())
    return {"weights": module.network.state_dict(), "loss": float(trainer.callback_metrics["validation_loss"])}


def train_in_parts(folder, devices):
    """The same, stopped while rows are scored and resumed by a module that knows nothing: the weights."""
    saving = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=4)
    trainer_of(folder, devices, max_steps=4, callbacks=[saving]).fit(Phased(), steps_in(folder))
    module = Phased(seed=9)
    trainer = trainer_of(folder, devices, enable_checkpointing=False)
    trainer.fit(module, steps_in(folder), ckpt_path=folder / "saved" / "step=4.ckpt", weights_only=True)
    return module.network.state_dict()


def refused(folder):
    try:
        trainer_of(folder, 2, strategy="ddp", enable_checkpointing=False).fit(Phased(), steps_in(folder / "ddp"))
    except InputError as error:
        return str(error)


def main(folder):
    warnings.simplefilter("ignore")
    rank = int(os.environ["LOCAL_RANK"])
    checks = {
        "trained": lambda: train(folder / "trained", 2, Phased(seed=3 + rank)),  # all take the weights of rank 0
        "parts": lambda: train_in_parts(folder / "parts", 2),
        "refused": lambda: refused(folder),
    }
    for name, check in checks.items():
        torch.save(check(), folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
