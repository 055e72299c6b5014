"""The adapters to other libraries' loops train on the device as they do on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from flat import flat
from pretend_cuda.cases.comparison import SAME_DRAWS, all_agree, existing, placed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import PrivacyPlan
from dp_microadam.training.evaluation import class_loss

CPU = torch.device("cpu")
PLAN = PrivacyPlan.solve(dataset_size=120, batch_size=30, delta=1e-3, noise_multiplier=1.0, steps=5)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(160, 5, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def hugging_face(device: torch.device) -> None:
    """The Hugging Face Trainer on the first GPU; with several it would wrap the model, which our adapter refuses."""
    from transformers import TrainingArguments

    from dp_microadam.integrations.hugging_face import PrivateHFTrainer

    worker = existing("integrations/hugging_face_worker.py")
    gpu, found = torch.device("cuda:0"), {}
    with tempfile.TemporaryDirectory() as folder, patch.object(torch.cuda, "device_count", lambda: 1):
        for where in (CPU, gpu):
            model = worker.without_dropout("words")
            settings = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "lr_scheduler_type": "constant"}
            args = TrainingArguments(f"{folder}/{where.type}", use_cpu=where == CPU, per_device_train_batch_size=7, **settings)
            placed(torch.zeros(1, device=args.device), where, "the host's device")
            data = {"train_dataset": worker.rows(worker.sentences(60, 0)), "eval_dataset": worker.rows(worker.sentences(20, 1))}
            trainer = PrivateHFTrainer(model, args, plan=worker.PLAN, method=worker.sparta(model), **flat(seed=4, **data))
            trainer.train()
            assert trainer.evaluate()["eval_loss"] > 0
            found[where] = dict(model.state_dict())
    all_agree(found[CPU], found[gpu], gpu, "weights", tolerance=1e-3)


def lightning(device: torch.device) -> None:
    import lightning.pytorch as pl

    from dp_microadam.integrations.lightning import PrivateLightningModule, PrivateSteps

    class Classifier(PrivateLightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def per_example_loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return class_loss(self.network, batch)

        def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
            self.log("validation_loss", self.per_example_loss(batch).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    found = {}
    inputs, labels = examples()
    with tempfile.TemporaryDirectory() as folder:
        for where in (CPU, device):
            module = Classifier()
            seen = []
            module.on_train_batch_end = lambda *_, module=module, seen=seen: seen.append(next(module.parameters()).device)
            steps = PrivateSteps(PLAN, (inputs[:120], labels[:120]), run_dir=Path(folder) / where.type, **flat(seed=4))
            place = {"accelerator": "cpu"} if where == CPU else {"accelerator": "gpu", "devices": [device.index or 0]}
            quiet = {
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            }
            pl.Trainer(max_steps=PLAN.steps, default_root_dir=folder, **place, **quiet).fit(
                module, steps, DataLoader(TensorDataset(inputs[120:], labels[120:]), batch_size=20)
            )
            assert seen
            assert {one.type for one in seen} == {where.type}, seen
            found[where] = {name: value.cpu() for name, value in module.state_dict().items()}
    if SAME_DRAWS:
        all_agree(found[CPU], found[device], CPU, "weights", tolerance=1e-3)


def opacus(device: torch.device) -> None:
    """MicroAdam inside Opacus, with generators of noise and sample that follow from the system's entropy."""
    from opacus import PrivacyEngine

    from dp_microadam import MicroAdam
    from dp_microadam.integrations.opacus import use_system_entropy

    model = network().to(device)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=MicroAdam(model.parameters()),
        data_loader=DataLoader(TensorDataset(*examples()), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    use_system_entropy(engine, optimizer, loader)
    placed(torch.zeros(1, device=optimizer.generator.device), device, "the generator of noise")
    for batch, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.to(device)), targets.to(device)).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        placed(parameter, device, name)


CASES = {"Hugging Face": hugging_face, "Lightning": lightning, "Opacus": opacus}
