"""The sum of clipped per-example gradients of one batch without noise, by each library, and by autograd in float64."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import ClippedGradients
from research.field.report import FAST_DP, OPACUS, OURS

Sum = Callable[[nn.Module, Tensor, Tensor, float], Tensor]
"""Of (model, inputs, labels, clipping norm): Σᵢ clip(gᵢ, C) of the cross entropy, flat."""


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def by_autograd(model: nn.Module, inputs: Tensor, labels: Tensor, norm: float) -> Tensor:
    """The definition: one example at a time, in float64."""
    model = copy.deepcopy(model).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    total = torch.zeros(sum(parameter.numel() for parameter in _trained(model)), dtype=torch.float64)
    for row in range(len(inputs)):
        loss = F.cross_entropy(model(inputs[row : row + 1]), labels[row : row + 1])
        gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, _trained(model)))
        total += gradient * min(1.0, norm / float(gradient.norm()))
    return total


def by_opacus(model: nn.Module, inputs: Tensor, labels: Tensor, norm: float, *, mode: str) -> Tensor:
    from opacus import PrivacyEngine

    model = copy.deepcopy(model).train()
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(_trained(model), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=len(inputs)),
        noise_multiplier=0.0,
        max_grad_norm=norm,
        grad_sample_mode=mode,
    )
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    criterion(made[0](inputs), labels).backward()
    made[1].step()
    return _sum_of_means(model, len(inputs))


def by_fast_dp(model: nn.Module, inputs: Tensor, labels: Tensor, norm: float, *, mode: str) -> Tensor:
    """With the clipping function of Abadi et al., which the other libraries have, too."""
    from fastDP import PrivacyEngine

    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(_trained(model), lr=0.0)
    size = len(inputs)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": norm, "clipping_fn": "Abadi", "clipping_mode": mode}
    with contextlib.redirect_stdout(io.StringIO()):
        PrivacyEngine(model, batch_size=size, sample_size=size, epochs=1, **settings).attach(optimizer)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return _sum_of_means(model, size)


def _sum_of_means(model: nn.Module, size: int) -> Tensor:
    found = (torch.zeros_like(one) if one.grad is None else one.grad for one in _trained(model))
    return size * torch.cat([one.flatten() for one in found]).double()


def by_ours(model: nn.Module, inputs: Tensor, labels: Tensor, norm: float, *, mode: str | None) -> Tensor:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    engine = ClippedGradients(copy.deepcopy(model), loss, max_grad_norm=norm, strategy=mode)
    engine.accumulate((inputs, labels))
    return torch.cat([one.flatten() for one in engine.sums.values()]).double()


def by_jax(loss: Callable[[Any, Any], Any], parameters: Tensor, batch: Tensor, norm: float) -> Tensor:
    """``clipped_grad`` of JAX-Privacy, for a loss of (parameters, batch) written in JAX."""
    import jax
    from jax_privacy import clipping

    summed = clipping.clipped_grad(loss, l2_clip_norm=norm)
    found = summed(jax.numpy.asarray(parameters.numpy()), jax.numpy.asarray(batch.numpy()))
    return torch.tensor(jax.device_get(found)).double().flatten()


WAYS: dict[str, dict[str, Sum]] = {
    OPACUS: {mode: partial(by_opacus, mode=mode) for mode in ("hooks", "functorch", "ghost")},
    FAST_DP: {mode: partial(by_fast_dp, mode=mode) for mode in ("MixOpt", "ghost")},
    OURS: {mode or "default": partial(by_ours, mode=mode) for mode in (None, "ghost", "keep")},
}
"""Every way in which a library computes the sum, the default first."""


def refusal(error: Exception) -> str:
    """The beginning of what a library says when it refuses."""
    words = " ".join(str(error).split())
    return words if len(words) <= 70 else f"{words[:70]} …"
