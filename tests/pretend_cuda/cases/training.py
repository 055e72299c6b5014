"""Training on the device follows the run on the CPU: weights, averages, checkpoints, resuming, methods and recipes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from flat import flat
from pretend_cuda.cases.comparison import SAME_DRAWS, all_agree, existing, moved, placed
from pretend_cuda.watch import Watch
from tiny_text_models import LENGTH, save_llama
from torch import nn
from torch.utils.data import TensorDataset

from dp_microadam import MicroAdam, PrivacyPlan, PrivateTrainer
from dp_microadam.training import training_data
from dp_microadam.training.evaluation import class_hits, class_loss, over_views
from dp_microadam.training.rates import Schedule
from dp_microadam.training.torch_randomness import seeded_torch, unpredictable_torch
from dp_microadam.training.trainer import UnprotectedPlan
from dp_microadam.workbench.data.augmentation import Augmentation
from dp_microadam.workbench.data.dataset import LabelledData
from dp_microadam.workbench.models.hugging_face import language_model
from dp_microadam.workbench.recipes.assemble import assemble
from dp_microadam.workbench.recipes.language import written
from dp_microadam.workbench.recipes.recipe import Recipe

CPU = torch.device("cpu")
IMAGES, LABELS = torch.rand(200, 3, 8, 8), torch.randint(4, (200,))
PLAN = PrivacyPlan.solve(epsilon=8.0, delta=1e-5, dataset_size=150, batch_size=32, steps=6)
HAND = existing("methods/conftest.py")
CONTRACT = existing("methods/test_contract.py")
WITH_PHASES = ("delayed", "public", "sparta, sum", "sparta, norms")


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = (
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(16, 4))


def trainer(where: torch.device, folder: Path, model: nn.Module | None = None, **options: Any) -> PrivateTrainer:
    model = (model or network()).to(where)
    settings: dict[str, Any] = {
        "plan": PLAN,
        "per_example_loss": over_views(class_loss, (3, 8, 8)),
        "per_example_accuracy": over_views(class_hits, (3, 8, 8)),
        "physical_batch_size": 20,
        "ema_decay": 0.9,
        "evaluate_every": 2,
        "checkpoint_every": 2,
        "diagnostics_every": 2,
        "schedule": Schedule("cosine", 6),
        "seed": 5,
        "show_progress": False,
    }
    return PrivateTrainer(
        model, MicroAdam(model.parameters(), lr=1e-2, fused=False), run_dir=folder, **flat(**{**settings, **options})
    )


def data_on(where: torch.device, kind: str) -> tuple[Any, Any]:
    train, held_out = (IMAGES[:150], LABELS[:150]), (IMAGES[150:], LABELS[150:])
    if kind == "dataset":
        return TensorDataset(*train), TensorDataset(*held_out)
    return (moved(train, where), moved(held_out, where)) if kind == "on the device" else (train, held_out)


def fit(kind: str, device: torch.device, **options: Any) -> None:
    """Weights, averaged weights and metrics of a run with dropout, evaluation, diagnostics and checkpoints."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for where in (CPU, device):
            run = trainer(where, Path(folder) / where.type, **options)
            result = run.fit(*data_on(where, kind))
            assert result.steps_done == 6
            weights = dict(run.model.state_dict())
            if run.average is not None:
                with run.average.in_place_of(run.model):
                    weights |= {f"average {name}": value.clone() for name, value in run.model.state_dict().items()}
            found[where] = weights, result.metrics
    for name, value in found[device][0].items():
        placed(value, device, name)
    if SAME_DRAWS:
        all_agree(found[CPU][0], found[device][0], device, "weights", tolerance=1e-3)


def resume(first: str, device: torch.device) -> None:
    """A run that was stopped, on the device or on the CPU, ends with the weights of one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer(device, Path(folder) / "whole")
        whole.fit(*data_on(device, "tensors"))
        begun = device if first == "device" else CPU
        trainer(begun, Path(folder) / "parts", max_steps=4).fit(*data_on(begun, "tensors"))
        run = trainer(device, Path(folder) / "parts").resume()
        run.fit(*data_on(device, "tensors"))
        assert run.finished
    if SAME_DRAWS:
        expected = {name: value.cpu() for name, value in whole.model.state_dict().items()}
        all_agree(expected, dict(run.model.state_dict()), device, "resumed", tolerance=1e-6 if first == "device" else 1e-3)


def unseeded(device: torch.device) -> None:
    """Noise, sample and dropout from the system's entropy."""
    with tempfile.TemporaryDirectory() as folder:
        for secure in (False, True):
            run = trainer(device, Path(folder) / str(secure), seed=None, secure=secure, max_steps=2)
            assert run.fit(*data_on(device, "tensors")).steps_done == 2


def random_streams(device: torch.device) -> None:
    """A step draws on the model's device from a stream of its own, and leaves all others as they were."""
    model = nn.Linear(2, 2).to(device)
    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    drawn = []
    for stream in (
        seeded_torch(model, 1, 2),
        seeded_torch(model, 1, 2),
        unpredictable_torch(model),
        unpredictable_torch(model),
    ):
        with stream:
            drawn.append(torch.rand(8, device=device))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[2], drawn[3])
    for before, after in zip(states, [torch.get_rng_state(), *torch.cuda.get_rng_state_all()], strict=True):
        assert torch.equal(before, after)


def method(variant: str, device: torch.device) -> None:
    """A method through all its phases, in which it is stopped and resumed: the weights are those of the CPU."""
    found = {}
    hand = SimpleNamespace(examples=HAND.examples, half_squared_error=HAND.half_squared_error)
    with tempfile.TemporaryDirectory() as folder:
        for where in (CPU, device):
            for stop in (3, None) if variant in WITH_PHASES else (None,):
                torch.manual_seed(0)  # MicroAdam draws the seed of its rounding
                model = HAND.tiny_network().to(where)
                made = CONTRACT.wired(variant, hand)(model)
                plan = PrivacyPlan(HAND.EXAMPLES, HAND.BATCH, HAND.SIGMA, 10, 1e-2)
                options = {"max_grad_norm": HAND.BOUND, "physical_batch_size": HAND.EXAMPLES, "seed": HAND.SEED}
                settings = {"max_steps": stop, "run_dir": Path(folder) / where.type, "show_progress": False, **options}
                run = PrivateTrainer(model, made, plan, HAND.half_squared_error, **flat(**settings))
                (run.resume() if stop is None and variant in WITH_PHASES else run).fit(HAND.examples())
            found[where] = dict(model.state_dict())
    all_agree(found[CPU], found[device], device, variant, tolerance=1e-4)


def recipe(device: torch.device) -> None:
    """A recipe trains on the GPU if there is one, with its augmentation and preparation, and is tested there."""
    parts = [(torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8), torch.randint(4, (count,))) for count in (120, 20, 20)]
    data = LabelledData("pixels", 4, (3, 8, 8), (0.5,) * 3, (0.25,) * 3, *parts)
    sizes = {"steps": 3, "batch_size": 20, "physical_batch_size": 10, "noise_multiplier": 1.0}
    views = {"multiplicity": 2, "flip": True, "crop_padding": 1}
    chosen = Recipe(name="pixels", data="cifar10", model="small-cnn", seed=1, **sizes, **views)
    with tempfile.TemporaryDirectory() as folder:
        experiment = assemble(chosen, Path(folder) / "run", data=data, show_progress=False)
        experiment.fit()
        assert 0 <= experiment.test_accuracy()[0] <= 1
    placed(next(experiment.model.parameters()), torch.device("cuda:0"), "the recipe's model")


def continued_text(device: torch.device) -> None:
    """A language model on the device goes on with a prompt as on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        pretrained = save_llama(Path(folder))
        named = {
            "data": "text-table",
            "data_options": {"max_length": LENGTH},
            "model": "hugging-face-causal",
            "model_options": {"pretrained": pretrained},
        }
        chosen = Recipe(name="words", **named, steps=1, batch_size=20, noise_multiplier=1.0)
        model = language_model(pretrained=pretrained)
        expected = written(chosen, model, "win cash")
        assert written(chosen, model.to(device), "win cash") == expected


def strategies_measured(device: torch.device) -> None:
    """What ``doctor`` measures on a GPU: every strategy runs on it, for every typical layer."""
    from research.experiments import strategy_times

    with Watch() as watch:
        first = next(iter(strategy_times.measure_strategies(str(device), 2)))
        asked = watch.launches.total()
        strategy_times._of_linear(device, 2, 1, 4, 5, 6)
    assert first.milliseconds
    assert 0 < asked < watch.launches.total()


def copies_ahead(device: torch.device) -> None:
    """Batches cross over on a stream of the device they are for, whichever is the current one."""
    seen, begin = [], training_data._begin_copy

    def watched(batch: Any, where: torch.device, copies: torch.Stream) -> Any:
        seen.append(copies.device)
        return begin(batch, where, copies)

    with patch.object(training_data, "_begin_copy", watched):
        for batch in training_data.copied_ahead([torch.zeros(2), torch.ones(2)], device):
            placed(batch, device, "batch")
    assert {(one.type, one.index) for one in seen} == {("cuda", device.index or 0)}, seen


def doctor(device: torch.device) -> None:
    from dp_microadam.workbench.command_line.commands import doctor as command

    found = command._devices()
    assert [one["device"] for one in found[1:]] == [f"cuda:{index}" for index in range(torch.cuda.device_count())], found
    json.dumps(found)


RUNS: dict[str, Callable[[torch.device], None]] = {
    "tensors": partial(fit, "tensors"),
    "a Dataset": partial(fit, "dataset"),
    "data on the device": partial(fit, "on the device"),
    "views": partial(fit, "tensors", augment=Augmentation(flip=True, crop_padding=1, multiplicity=2)),
    "bands": partial(fit, "tensors", plan=PrivacyPlan(150, 32, 1.0, 6, 1e-5, bands=3)),
    "without privacy": partial(fit, "tensors", plan=UnprotectedPlan(150, 32, 6), private=False),
    "resumed": partial(resume, "device"),
    "resumed from the CPU": partial(resume, "CPU"),
    "entropy": unseeded,
    "random streams": random_streams,
    "recipe": recipe,
    "continued text": continued_text,
    "doctor": doctor,
    "copies ahead": copies_ahead,
    "strategies measured": strategies_measured,
}

CASES = {**RUNS, **{f"method: {variant}": partial(method, variant) for variant in CONTRACT.OF_EACH_KIND}}
