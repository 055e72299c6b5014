"""Launches of an optimizer's step on whole networks, for the documentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from pretend_cuda.watch import Watch
from torch import nn

from dp_microadam import MicroAdam
from dp_microadam.workbench import models

OPTIMIZERS = {"MicroAdam": partial(MicroAdam, fused=False), "AdamW": partial(torch.optim.AdamW, foreach=True)}


def launches_of_a_step(build: Callable[[], nn.Module], device: torch.device) -> dict[str, int]:
    """Parameters, tensors, and the launches of a step: MicroAdam in plain torch with a full window, and AdamW (foreach)."""
    shapes = [parameter.shape for parameter in build().parameters()]
    found = {"parameters": sum(shape.numel() for shape in shapes), "tensors": len(shapes)}
    for name, make in OPTIMIZERS.items():
        params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = make(params)
        optimizer.step()
        for state in optimizer.state.values():
            state["step"].fill_(10)  # as many as the window holds
        with Watch() as watch:
            optimizer.step()
        found[name] = watch.launches.total()
    return found


CASES = {
    "wrn-16-4": partial(launches_of_a_step, lambda: models.wide_resnet(16, 4)),
    "nf-resnet-50": partial(launches_of_a_step, lambda: models.nf_resnet_50(1000)),
    "vit-base": partial(launches_of_a_step, lambda: models.vit("base")),
}
