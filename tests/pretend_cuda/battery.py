"""What has to run on a GPU as it does on the CPU: ``python -m pretend_cuda.battery [CASE …]`` from tests/.

Each case runs under :class:`~pretend_cuda.watch.Watch`. A line of JSON per case says how it went. With ``DP_MICROADAM_DEVICE``
the cases run on that real device.
"""

# ruff: noqa: E402 - the device has to be there before torch is imported

from __future__ import annotations

import copy
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretend_cuda import build, device

CANNOT_BUILD = 77
"""Exit code if there is no device; the reason is on standard error."""

try:
    DEVICE = device.install()
except build.CannotBuild as reason:
    print(reason, file=sys.stderr)
    sys.exit(CANNOT_BUILD)

import pytest
import torch
from pretend_cuda.watch import MixedDevices, Watch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from dp_microadam import ClippedGradients, GaussianMechanism, MicroAdam, PrivacyPlan, PrivateTrainer
from dp_microadam.errors import PrivacyError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.noise.randomness import Randomness
from dp_microadam.optimizers.adam_bc import AdamBC
from dp_microadam.optimizers.tensor_adam import TensorAdam
from dp_microadam.optimizers.threshold_adam import ThresholdAdam
from dp_microadam.training.evaluation import class_loss
from dp_microadam.training.method import Method
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, RecordSettings
from dp_microadam.workbench import models

CPU, HERE = torch.device("cpu"), torch.device(DEVICE)
REAL = device.real_device() is not None
TOLERANCE = 1e-3 if REAL else 1e-5
"""Of differences, relative to the norm. The pretend device has the CPU's kernels, in which layouts may change roundings."""


def moved(tree: Any, where: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.detach().to(where) if isinstance(leaf, Tensor) else leaf, tree)


def agree(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Tensors by name: ``found`` are on the device, and equal the CPU's up to rounding."""
    assert expected.keys() == found.keys()
    whole = sum(float(value.detach().double().square().sum()) for value in expected.values()) ** 0.5
    for name, value in expected.items():
        assert found[name].device == HERE or REAL, f"{name} is on {found[name].device}"
        off = float((value.detach().double() - found[name].detach().cpu().double()).norm())
        assert off <= tolerance * max(float(value.detach().double().norm()), 0.01 * whole), f"{name} is off by {off}"


class Apply(nn.Module):
    """A network whose output is made by a function of its module."""

    def __init__(self, module: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self.module, inputs)


def tied() -> nn.Module:
    return Apply(nn.Embedding(9, 5), lambda words, inputs: nn.functional.linear(torch.tanh(words(inputs)), words.weight))


def attention() -> nn.Module:
    return Apply(nn.MultiheadAttention(8, 2, batch_first=True), lambda own, x: own(x, x, x, need_weights=False)[0])


def recurrent(kind: type[nn.Module]) -> nn.Module:
    return Apply(kind(3, 5, batch_first=True), lambda cells, inputs: cells(inputs)[0])


ROWS, SEQUENCES, IMAGES = (6,), (5, 6), (4, 7, 7)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), ROWS, {}),
    "ghost": (lambda: nn.Linear(6, 4), SEQUENCES, {"strategy": "ghost"}),
    "keep": (lambda: nn.Linear(6, 4), SEQUENCES, {"strategy": "keep"}),
    "drop": (lambda: nn.Linear(6, 4), SEQUENCES, {"strategy": "drop"}),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, groups=2)), IMAGES, {}),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), IMAGES, {}),
    "weight standardization": (lambda: WeightStandardizedConv2d(4, 6, 3, gain=True), IMAGES, {}),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm(7)), IMAGES, {}),
    "per layer": (lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.GroupNorm(1, 3)), IMAGES, {"clipping": "per-layer"}),
    "embedding": (lambda: nn.Embedding(9, 5, padding_idx=2), (), {}),
    "embedding bag": (lambda: nn.EmbeddingBag(9, 5), (), {}),
    "tied": (tied, (), {}),
    "attention": (attention, (5, 8), {}),
    "LSTM": (partial(recurrent, nn.LSTM), (4, 3), {}),
    "GRU": (partial(recurrent, nn.GRU), (4, 3), {}),
    "wide ResNet": (lambda: models.wide_resnet(10, 1), (3, 12, 12), {}),
}


OPTIMIZERS = {MicroAdam: 3, ThresholdAdam: 5, TensorAdam: 1, AdamBC: 0}
"""And how often a step on five tensors may wait for the device."""


def patterned_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with a different output gradient at every position, times each example's weight."""
    output = model(batch[0]).flatten(1)
    return (output.sin() * torch.linspace(-1, 1.3, output.shape[1], device=output.device)).sum(1) * batch[1]


def clipping(make: Callable[[], nn.Module], shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Norms and sums of two chunks and an empty one, with an example that is not finite; a later chunk waits once."""
    model = make()
    inputs = torch.randn(6, *shape) if shape else torch.randint(9, (6, 5))
    weights, found = torch.tensor([0.3, 3.0, 1.0, 2.0, 0.5, float("nan")]), {}
    for where in (CPU, HERE):
        engine = ClippedGradients(copy.deepcopy(model).to(where), patterned_loss, max_grad_norm=1.0, **options)
        for rows in (slice(0, 4), slice(4, 6), slice(0, 0)):
            engine.accumulate(moved((inputs[rows], weights[rows]), where))
        found[where] = dict(engine.sums)
        with Watch() as watch:
            engine.accumulate(moved((inputs[:4], weights[:4]), where))
        waits = {what: count for what, count in watch.synchronisations.items() if "outside" not in what[1]}
        assert sum(waits.values()) <= int(where == HERE), waits
    agree(found[CPU], found[HERE])


def optimizer(make: Callable[..., torch.optim.Optimizer], waits: int, dtype: torch.dtype) -> None:
    """Steps on odd shapes, whose state is on the device, which wait for it that often, and which go on from the CPU's state."""
    made, params = {}, {}
    for where in (CPU, HERE):
        draw = torch.Generator().manual_seed(1)
        shapes = ((7_000,), (64, 3, 3, 3), (10,), (1,), (33, 7))
        params[where] = [nn.Parameter(torch.randn(shape, generator=draw).to(where, dtype)) for shape in shapes]
        made[where] = make(params[where])
        for step in range(11):
            for param in params[where]:
                param.grad = torch.randn(param.shape, generator=draw).to(param)
            with Watch() as watch:
                made[where].step()
            assert step == 0 or sum(watch.synchronisations.values()) <= waits, watch.synchronisations
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    agree(*({str(i): param for i, param in enumerate(params[where])} for where in (CPU, HERE)), tolerance)
    for state in made[HERE].state.values():
        assert all(value.device == HERE for value in state.values() if isinstance(value, Tensor) and value.dim())
    made[HERE].load_state_dict(copy.deepcopy(made[CPU].state_dict()))
    made[HERE].step()


def mechanism(dtype: torch.dtype, secure: bool, bands: int) -> None:
    """The noise of a seed is the CPU's, it is noticed if a sum is not finite, and a step waits for the device once."""
    draw, found = torch.Generator().manual_seed(1), []
    plan = PrivacyPlan(60, 6, 1.3, 9, 1e-2, bands=bands)
    sums = {str(i): torch.randn(size, generator=draw).to(dtype) for i, size in enumerate(((70, 9), (5,), (1,)))}
    for where in (CPU, HERE):
        chain = GaussianMechanism(plan, 0.7, randomness=Randomness.seeded(5, secure=secure))
        for step in range(4):
            here = {name: total.clone() for name, total in moved(sums, where).items()}
            with Watch() as watch:
                means = chain.privatize(here, step=step)
            # The coefficients of bands cross over once.
            assert sum(watch.synchronisations.values()) <= (1 + (step == 0)) * (where == HERE), watch.synchronisations
        found.append(means)
        here["1"][-1] = float("inf")
        with pytest.raises(PrivacyError):
            chain.privatize(here, step=4)
    agree(*found)


def training(kind: str, bands: int = 1) -> None:
    """A run with dropout, evaluation, average and checkpoints, stopped and resumed: the CPU's weights."""
    torch.manual_seed(2)
    images, labels, found = torch.rand(200, 3, 8, 8), torch.randint(4, (200,)), {}
    plan = PrivacyPlan(150, 32, 1.0, 6, 1e-5, bands=bands)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(256, 4))
    network = nn.Sequential(*layers)
    for where in (CPU, HERE):
        train, held_out = (images[:150], labels[:150]), (images[150:], labels[150:])
        if kind == "on the device":
            train, held_out = moved((train, held_out), where)
        data = (TensorDataset(*train), TensorDataset(*held_out)) if kind == "dataset" else (train, held_out)
        with tempfile.TemporaryDirectory() as folder:
            for last in (3, 6):
                model = copy.deepcopy(network).to(where)
                run = PrivateTrainer(
                    model,
                    Method(torch.optim.SGD(model.parameters(), lr=0.1), average=0.9),
                    plan,
                    class_loss,
                    run_dir=Path(folder) / "run",
                    privacy=PrivacySettings(seed=5),
                    performance=PerformanceSettings(physical_batch_size=20),
                    record=RecordSettings(evaluate_every=2, show_progress=False),
                    max_steps=last,
                )
                (run.resume() if last == 6 else run).fit(*data)
        found[where] = dict(model.state_dict())
    if REAL:
        assert all(bool(value.isfinite().all()) for value in found[HERE].values())
    else:
        agree(found[CPU], found[HERE], 1e-3)


def watching() -> None:
    """The watch refuses what a GPU refuses, and counts what the host waits for."""
    here, host, mask = torch.ones(3, device=HERE), torch.ones(3), torch.tensor([True, False, True]).to(HERE)
    mixed = (lambda: here + host, lambda: host.add_(here), lambda: torch.dot(here, host), lambda: host[mask.long()])
    for call in mixed:
        with Watch() as watch, suppress(MixedDevices):
            call()
        assert watch.refusals
        watch.refusals.clear()
    waiting = (
        lambda: here.sum().item(),
        lambda: here.cpu(),
        lambda: here.copy_(host),
        lambda: here[mask],
        torch.cuda.synchronize,
    )
    numbers = (lambda: here + 1, lambda: here + torch.tensor(2.0))
    silent = (*numbers, lambda: here.masked_fill(mask, 0.0), lambda: host.sum().item())
    for calls, expected in ((waiting, 1), (silent, 0)):
        for call in calls:
            with Watch() as watch:
                call()
            assert sum(watch.synchronisations.values()) == expected or REAL, watch.synchronisations


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "watch", watching
    for name, parts in LAYERS.items():
        yield f"clipping: {name}", partial(clipping, *parts)
    for make, waits in OPTIMIZERS.items():
        for dtype in (torch.float32, torch.bfloat16):
            yield f"optimizer: {make.__name__}, {dtype}", partial(optimizer, partial(make, lr=1e-3), waits, dtype)
    for bands in (1, 3):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            yield f"mechanism: {dtype}, {bands} bands", partial(mechanism, dtype, bands == 1, bands)
    for kind in ("tensors", "dataset", "on the device"):
        yield f"training: {kind}", partial(training, kind)
    yield "training: bands", partial(training, "tensors", bands=3)


def main(names: list[str]) -> int:
    failed = False
    for name, case in cases():
        if names and name not in names:
            continue
        error = None
        torch.manual_seed(0)
        try:
            with Watch() as watch:
                case()
            assert not watch.refusals, watch.refusals
        except Exception:
            error, failed = traceback.format_exc(limit=-8), True
        print(json.dumps({"case": name, "error": error}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
