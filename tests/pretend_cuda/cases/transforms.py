"""Augmentation, preparation and random networks draw on the device what the CPU draws, and their checks run there."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from pretend_cuda.cases.comparison import SAME_DRAWS, agree, existing, moved, placed
from pretend_cuda.watch import Watch
from torch import Tensor, nn

from dp_microadam.clipping.checks.randomness import EqualDraws
from dp_microadam.clipping.checks.transform import check_transform
from dp_microadam.errors import InputError
from dp_microadam.workbench import models
from dp_microadam.workbench.audit.own_run import canary_scores
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.augmentation import Augmentation, random_boxes
from dp_microadam.workbench.data.dataset import LabelledData
from dp_microadam.workbench.data.image_decoding import ResizedCentre
from dp_microadam.workbench.recipes.canaries import Canaries

CPU = torch.device("cpu")
CHECKS = existing("clipping/test_transform_check.py")

AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "flip and crop": {"flip": True, "crop_padding": 2},
    "views": {"flip": True, "crop_padding": 2, "multiplicity": 3},
    "resized crop": {"flip": True, "resized_crop": True, "multiplicity": 2},
    "crop alone": {"crop_padding": 1},
    "flip alone": {"flip": True},
    "nothing": {"multiplicity": 2},
    "to a size": {"flip": True, "size": (6, 6)},
}

ACCEPTED = (
    *("flip and crop", "resized crop", "views in a dimension of their own", "resized views", "noise", "dropout of pixels"),
    *("one coin for the batch", "by public constants", "smoothed labels", "written in place", "as a dict"),
)
REFUSED = ("cutmix", "labels of neighbours", "standardized by the batch", "divided by the largest", "large batches only")


def augmentation(options: dict[str, Any], device: torch.device) -> None:
    """The CPU's images, and nothing that the host waits for."""
    images, labels = torch.rand(4, 3, 9, 9), torch.arange(4)
    found = []
    for where in (CPU, device):
        torch.manual_seed(7)
        batch = moved((images, labels), where)
        with Watch() as watch:
            found.append(Augmentation(**options)(batch))
        assert not watch.synchronisations, watch.synchronisations
    for one, other in zip(*found, strict=True):
        placed(other, device, "augmented")
        if SAME_DRAWS:
            agree(one, other, device, "augmented")


def preparation(device: torch.device) -> None:
    empty = (torch.empty(0), torch.empty(0))
    for name, shape, inputs in (
        ("images", (3, 6, 6), torch.randint(256, (4, 3, 9, 9), dtype=torch.uint8)),
        ("a table", (5,), torch.randn(4, 5)),
    ):
        channels = shape[0]
        prepare = Preparation(LabelledData(name, 2, shape, (0.5,) * channels, (0.25,) * channels, empty, empty, empty))
        batch = inputs, torch.arange(4)
        agree(prepare(batch)[0], prepare(moved(batch, device))[0], device, name)


def resized_centre(device: torch.device) -> None:
    """What an exported model does with raw images."""
    images = torch.randint(256, (2, 3, 9, 14), dtype=torch.uint8)
    agree(ResizedCentre(7)(images), ResizedCentre(7)(images.to(device)), device, "resized centre")


def boxes(device: torch.device) -> None:
    found = []
    for where in (CPU, device):
        torch.manual_seed(3)
        box = random_boxes(8, 20, 6, where)
        found.append([getattr(box, field.name) for field in fields(box)])
    for one, other in zip(*found, strict=True):
        placed(other, device, "box")
        if SAME_DRAWS:
            agree(one, other, device, "box", 0.0)


def stochastic_depth(device: torch.device) -> None:
    torch.manual_seed(0)
    model = models.nf_resnet_50(4, width=1, stochastic_depth=0.5).train()
    images, found = torch.rand(3, 3, 32, 32), []
    for where in (CPU, device):
        torch.manual_seed(2)
        found.append(model.to(where)(images.to(where)))
    placed(found[1], device, "output")
    if SAME_DRAWS:
        agree(*found, device, "output", 1e-4)


def check(name: str, device: torch.device) -> None:
    """The check of a transform runs on the model's device, where the transform will."""
    batch, model = moved(CHECKS.images(), device), nn.Linear(1, 1).to(device)
    if name in REFUSED:
        with pytest.raises(InputError, match="augment mixes examples"):
            check_transform(CHECKS.MIXING[name], batch, model, what="augment")
    else:
        check_transform(CHECKS.APART[name], batch, model, what="augment")


def no_pixels(device: torch.device) -> None:
    """Examples that have a tensor without a single number."""
    check_transform(
        lambda batch: batch, moved((torch.rand(9, 0), torch.rand(9, 2)), device), nn.Linear(1, 1).to(device), what="x"
    )


def constant_draws(device: torch.device) -> None:
    """One number for all examples, drawn on the device that the draw is for."""
    draws = {
        "randperm": lambda: torch.randperm(4, device=device),
        "dropout": lambda: torch.nn.functional.dropout(torch.ones(4, 3, device=device), 0.5),
        "native dropout": lambda: torch.native_dropout(torch.ones(4, 3, device=device), 0.5, True)[1],
        "bernoulli": lambda: torch.bernoulli(torch.full((4, 3), 0.5, device=device)),
        "bernoulli of a chance": lambda: torch.bernoulli(torch.empty(4, 3, device=device), 0.5),
        "bernoulli_": lambda: torch.empty(4, 3, device=device).bernoulli_(0.5),
        "rand": lambda: torch.rand(4, 3, device=device),
        "rand_like": lambda: torch.rand_like(torch.ones(4, 3, device=device)),
        "normal_": lambda: torch.empty(4, 3, device=device).normal_(),
    }
    for name, draw in draws.items():
        with EqualDraws(lambda: torch.manual_seed(0)):
            drawn: Tensor = draw()
        placed(drawn, device, name)
        assert name == "randperm" or len(drawn.unique()) == 1, name


def canaries(device: torch.device) -> None:
    """The scores of an audit's canaries come from a model on the device, and go to the host."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
    given = Canaries(torch.randint(256, (9, 1, 4, 4), dtype=torch.uint8), torch.randint(10, (9,)), torch.ones(9).bool())
    found = [canary_scores(model.to(where), given, lambda batch: (batch[0] / 255, batch[1]), 4) for where in (CPU, device)]
    agree(*found, CPU, "scores")


CASES = {
    **{f"augmentation: {name}": partial(augmentation, options) for name, options in AUGMENTATIONS.items()},
    **{f"check: {name}": partial(check, name) for name in (*ACCEPTED, *REFUSED)},
    "check: no pixels": no_pixels,
    "constant draws": constant_draws,
    "preparation": preparation,
    "resized centre": resized_centre,
    "boxes": boxes,
    "canaries": canaries,
    "stochastic depth": stochastic_depth,
}
