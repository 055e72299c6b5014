"""Counts how often a step makes the host wait for the device, and what it launches there, by line of the project."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flat import flat, idle
from pretend_cuda.watch import Watch
from torch import Tensor, nn

from dp_microadam import Method, MicroAdam, PrivacyPlan, PrivateStep
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench import models
from dp_microadam.workbench.models.vit import TransformerSize

EXAMPLES, BATCH, STEPS, MEASURED = 64, 32, 3, 2
LARGE, SMALL = 64, 12
"""Sizes of physical chunks: the sample in one, and in several; fewer than 16 in all, where the model is checked again."""


def step_on(device: torch.device, build: Callable[[], nn.Module], side: int, chunk: int) -> tuple[int, Watch]:
    """The last of three steps, after what happens once: its number of chunks, and what was counted."""
    torch.manual_seed(0)
    model, chunks = build().to(device), []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        chunks.append(len(batch[0]))
        return class_loss(model, batch)

    data = torch.rand(EXAMPLES, 3, side, side), torch.randint(4, (EXAMPLES,))
    method = Method(MicroAdam(model.parameters()))
    plan = PrivacyPlan(EXAMPLES, BATCH, 1.0, STEPS, 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        options = {"method": method, "physical_batch_size": chunk, "seed": 1}
        step = PrivateStep(model, idle(model), plan, loss, data, run_dir=Path(folder) / "run", **flat(**options))
        for index in step:
            chunks.clear()
            with Watch() as watch:
                method.update(model, step.take())
            if index == MEASURED:
                break
        step.close()
    return len(chunks), watch


def by_line(found: Counter[tuple[str, str]]) -> Counter[str]:
    return Counter({f"{what} at {line}": count for (what, line), count in found.items()})


def counts(build: Callable[[], nn.Module], side: int, device: torch.device) -> dict[str, Any]:
    """What a chunk adds to a step and what is left of it, from the same sample in one chunk and in several."""
    (few, one), (many, other) = step_on(device, build, side, LARGE), step_on(device, build, side, SMALL)
    assert few == 1, few
    assert many > few, many
    whole, divided = by_line(one.synchronisations), by_line(other.synchronisations)
    per_chunk = {line: (divided[line] - whole[line]) / (many - few) for line in {*whole, *divided}}
    launches = (other.launches.total() - one.launches.total()) / (many - few)
    return {
        "tensors": len(list(build().parameters())),
        "chunk": {line: count for line, count in per_chunk.items() if count},
        "step": {line: whole[line] - count for line, count in per_chunk.items() if whole[line] != count},
        "launches of a chunk": launches,
        "launches of a step": one.launches.total() - launches,
    }


def wide_resnet() -> nn.Module:
    return models.wide_resnet(10, 1, 4)


def transformer() -> nn.Module:
    return models.vit(TransformerSize(32, 2, 2), 4, resolution=16, patch_size=8)


CASES = {"wrn-10-1": partial(counts, wide_resnet, 8), "vit": partial(counts, transformer, 16)}
