"""The training loop of each library as documented, of a linear model without a gradient: what is published is noise."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import PrivacyPlan, PrivateStep, methods
from research.field.report import FAST_DP, OPACUS, OURS

Steps = Iterator[tuple[list[int], Tensor, Any]]
"""Of each step: the numbers of its examples, the gradient that the optimizer gets, and the library's engine."""


def rows(count: int, width: int) -> TensorDataset:
    """Examples that carry their own number."""
    return TensorDataset(torch.arange(count).float()[:, None].repeat(1, width))


def _gradient(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad.flatten().clone()


def opacus(data: TensorDataset, batch_size: int, steps: int, sigma: float, **options: Any) -> Steps:
    from opacus import PrivacyEngine

    model, engine = nn.Linear(data.tensors[0].shape[1], 1, bias=False), PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=batch_size, shuffle=True),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
        **options,
    )
    for (inputs,) in islice(chain.from_iterable(repeat(loader)), steps):
        optimizer.zero_grad()
        (0 * private(inputs)).mean().backward()
        optimizer.step()
        yield inputs[:, 0].int().tolist(), _gradient(model), engine


def fast_dp(data: TensorDataset, batch_size: int, steps: int, sigma: float) -> Steps:
    """With the shuffled loader of its examples."""
    from fastDP import PrivacyEngine

    model = nn.Linear(data.tensors[0].shape[1], 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"noise_multiplier": sigma, "max_grad_norm": 1.0, "clipping_fn": "Abadi", "target_delta": 1e-5}
    with contextlib.redirect_stdout(io.StringIO()):
        engine = PrivacyEngine(model, batch_size=batch_size, sample_size=len(data), num_steps=steps, **settings)
        engine.attach(optimizer)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    for (inputs,) in islice(chain.from_iterable(repeat(loader)), steps):
        (0 * model(inputs)).mean().backward()
        optimizer.step()
        yield inputs[:, 0].int().tolist(), _gradient(model), engine
        optimizer.zero_grad()


def ours(data: TensorDataset, batch_size: int, steps: int, sigma: float) -> Steps:
    """The loop of README."""
    model = nn.Linear(data.tensors[0].shape[1], 1, bias=False)
    plan = PrivacyPlan(dataset_size=len(data), batch_size=batch_size, noise_multiplier=sigma, steps=steps, delta=1e-5)
    seen: list[int] = []

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        seen.extend(batch[0][:, 0].detach().int().tolist())
        return 0 * model(batch[0]).flatten()

    with tempfile.TemporaryDirectory() as folder:
        step = PrivateStep(model, methods.dp_sgd(model, lr=0.0, average=0), plan, loss, data, run_dir=folder)
        seen.clear()
        for gradients in step:
            yield list(seen), gradients["weight"].flatten().clone(), step
            seen.clear()
        step.close()


LOOPS: dict[str, Callable[..., Steps]] = {OPACUS: opacus, FAST_DP: fast_dp, OURS: ours}
