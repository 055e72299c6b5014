"""Every family of layers and every strategy of the clipping engine gives the CPU's norms and sums on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dp_microadam.training.gradients import UnclippedGradients
from pretend_cuda.cases.comparison import SAME_DRAWS, agree, all_agree, existing, moved, placed
from pretend_cuda.families import FAMILIES, Family, patterned_loss
from pretend_cuda.watch import Watch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dp_microadam import ClippedGradients, replace_batchnorm
from dp_microadam.clipping.batches import select
from dp_microadam.clipping.self_check import check_exactness
from dp_microadam.errors import InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.training.evaluation import weighted_class_loss
from dp_microadam.workbench import models

CPU = torch.device("cpu")
WEIGHTS = torch.tensor([0.3, 3.0, 1.0, 2.0, 0.5, float("nan")])
"""Of six examples; the last one's gradient is not a number."""

CHUNKS = (torch.arange(4), torch.arange(4, 6), torch.arange(0))
"""Two chunks and an empty one."""

GUARANTEES = existing("clipping/test_guarantees.py")


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def sums_agree(
    device: torch.device,
    model: nn.Module,
    chunks: list[Any],
    loss: Callable,
    options: Callable[[nn.Module], Mapping[str, Any]] = lambda model: {},
    engine: type[ClippedGradients] = ClippedGradients,
    bound: float = 1.0,
    compare: bool = True,
) -> None:
    """Norms and sums over all chunks, with the engine's own checks of model and clip before the first."""
    found = {}
    given = options(model)
    for where in (CPU, device):
        twin = copy.deepcopy(model).to(where)
        with engine(twin, loss, max_grad_norm=bound, **given) as gradients:
            norms = []
            for number, chunk in enumerate(moved(chunks, where)):
                torch.manual_seed(number)
                norms.append(gradients.accumulate(chunk))
                placed(norms[-1], where, "norms")
            found[where] = torch.cat(norms), dict(gradients.sums)
    for name, total in found[device][1].items():
        placed(total, device, name)
        assert bool(total.isfinite().all()), name
    if compare:
        agree(found[CPU][0], found[device][0], device, "norms")
        all_agree(found[CPU][1], found[device][1], device, "sum of")


def family(one: Family, device: torch.device) -> None:
    model, whole = randomized(one.model()), (one.inputs(len(WEIGHTS)), WEIGHTS)
    sums_agree(device, model, [select(whole, rows) for rows in CHUNKS], one.loss, one.options, one.engine)


def adversarial(layer: str, strategy: str, device: torch.device) -> None:
    """Gradients whose norms are hard to take in float32: the exceptions that strategies make for them."""
    build, inputs, outputs = GUARANTEES.LAYERS[layer]
    chunks = [GUARANTEES.adversarial(kind, inputs, outputs) for kind in ("cancelling", "mixed", "one tiny position")]
    sums_agree(device, build(), chunks, GUARANTEES.linear_loss, lambda _: {"strategy": strategy}, compare=SAME_DRAWS)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network(build: Callable[[], nn.Module], inputs: Callable[[], Tensor], device: torch.device, **options: Any) -> None:
    labels = torch.randint(3, (5,))
    model = build()
    sums_agree(device, model, [(inputs(), labels)] * 2, cross_entropy, lambda _: options)


class Bags(nn.Module):
    """Bags of words of unequal length, given by their offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(20, 5, mode="mean"), nn.Linear(5, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.bags(words.flatten(), torch.arange(0, words.numel(), words.shape[1], device=words.device)))


class Transformer(nn.Module):
    """Tied embeddings, a class token, positions, dropout and attention."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30, 16, padding_idx=0), nn.Parameter(torch.randn(1, 7, 16))
        self.token, self.scale = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.ones(16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 30)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(words), -1, -1), self.words(words) + self.positions], 1)
        return self.head(self.layer(rows)[:, 0] * self.scale)


class Sometimes(nn.Module):
    """Its only layer is left out when ``on`` is off, so that no parameter has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(8, 4), True

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) if self.on else inputs[:, :4] * 1.0


class RepeatedRows(nn.Module):
    """A parameter that is repeated for every example, and rows of examples folded into one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Parameter(torch.randn(3, 4)), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.rows.repeat(len(inputs), 1).view(len(inputs), 3, 4).sum(1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(checkpoint(lambda rows: torch.tanh(self.first(rows)), inputs, use_reentrant=False))


class Views(nn.Module):
    """Takes several views of each example as rows of a batch, and averages over them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.standardized = nn.Conv2d(3, 4, 3), WeightStandardizedConv2d(4, 4, 3)
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, views: Tensor) -> Tensor:
        rows = self.norm(self.standardized(self.convolution(views.flatten(0, 1)))).mean((2, 3))
        return self.out(rows).unflatten(0, (-1, views.shape[1])).mean(1)


def views(strategy: str, device: torch.device) -> None:
    """One of the examples has pixels that are not numbers, so that all its rows are taken out."""
    images = torch.randn(5, 3, 3, 7, 7)
    images[1] = float("nan")
    sums_agree(device, Views(), [(images, torch.randint(3, (5,)))], cross_entropy, lambda _: {"strategy": strategy})


def dropout(device: torch.device) -> None:
    words = torch.randint(30, (5, 7))
    sums_agree(device, Transformer(), [(words, torch.randint(30, (5,)))], cross_entropy, compare=SAME_DRAWS)


class Odd(Tensor):
    """A buffer of a class of its own, which is compared alone."""


class Counting(nn.Module):
    """Keeps a running sum of its inputs in a buffer, or in another buffer than before; has one on the CPU and an odd one."""

    def __init__(self, replaced: bool, dtype: torch.dtype, host_first: bool, device: torch.device) -> None:
        super().__init__()
        self.layer, self.replaced, self.on = nn.Linear(8, 4, device=device), replaced, False
        buffers = {"on_the_host": torch.zeros(2), "seen": torch.zeros(3, dtype=dtype, device=device)}
        for name, buffer in buffers.items() if host_first else reversed(buffers.items()):
            self.register_buffer(name, buffer)
        self.register_buffer("odd", torch.zeros(3, device=device).as_subclass(Odd))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.on and self.replaced:
            self.seen = self.seen + 1
        elif self.on:
            self.seen += 1
        return self.layer(inputs)


def state_that_changes(device: torch.device) -> None:
    """A model that begins to change its own buffers is refused, and its buffers are put back."""
    batch = moved((torch.randn(5, 8), torch.zeros(5, dtype=torch.long)), device)
    for replaced, dtype, first in ((False, torch.float32, False), (True, torch.float32, True), (False, torch.int64, True)):
        model = Counting(replaced, dtype, first, device)
        engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
        engine.accumulate(batch)
        model.on = True
        with pytest.raises(InputError, match="buffer 'seen' changes"):
            engine.accumulate(batch)
        placed(model.seen, device, "the buffer")
        assert not bool(model.seen.any())


def waits_once(build: Callable[[], nn.Module], inputs: Callable[[], Tensor], device: torch.device) -> None:
    """A chunk after the first waits for the device once, whatever parameters the network has."""
    engine = ClippedGradients(build().to(device), cross_entropy, max_grad_norm=1.0)
    batch = moved((inputs(), torch.randint(3, (5,))), device)
    engine.accumulate(batch)
    with Watch() as watch:
        engine.accumulate(batch)
    assert watch.synchronisations.total() == 1, watch.synchronisations


def users(device: torch.device) -> None:
    """Users with two examples each, by weights that are still on the host, and their check against autograd."""
    model, found = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), {}
    batch, weights = (torch.randn(6, 8), torch.randint(3, (6,))), torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]])
    for where in (CPU, device):
        engine = ClippedGradients(copy.deepcopy(model).to(where), cross_entropy, max_grad_norm=0.3)
        engine.check_independence(moved(batch, where), rows_per_unit=[2])
        found[where] = engine.accumulate(moved(batch, where), weights), dict(engine.sums)
    agree(found[CPU][0], found[device][0], device, "norms of users")
    all_agree(found[CPU][1], found[device][1], device, "sum of")


def users_without_privacy(device: torch.device) -> None:
    """The same users in training without privacy, whose gradients are not clipped."""
    model, found = nn.Linear(8, 3), {}
    batch, weights = (torch.randn(6, 8), torch.randint(3, (6,))), torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]])
    for where in (CPU, device):
        engine = UnclippedGradients(copy.deepcopy(model).to(where), cross_entropy)
        engine.accumulate(moved(batch, where), weights)
        found[where] = dict(engine.sums)
    all_agree(found[CPU], found[device], device, "sum of")


def class_weights(device: torch.device) -> None:
    """Losses that are weighted by class wait for the device in the first batch only."""
    loss, found = weighted_class_loss((0.5, 2.0, 1.0)), {}
    inputs, labels = torch.randn(5, 8), torch.randint(3, (5,))
    model = nn.Linear(8, 3)
    for where in (CPU, device):
        twin, batch = copy.deepcopy(model).to(where), moved((inputs, labels), where)
        loss(twin, batch)
        with Watch() as watch:
            found[where] = loss(twin, batch)
        assert not watch.synchronisations, watch.synchronisations
    agree(found[CPU], found[device], device, "weighted losses")


def without_gradients(device: torch.device) -> None:
    model = Sometimes().to(device)
    batch = torch.randn(5, 8, device=device), torch.zeros(5, dtype=torch.long, device=device)
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    engine.accumulate(batch)
    model.on = False
    placed(engine.accumulate(batch), device, "norms without gradients")
    engine.reset()
    placed(engine.accumulate(moved((torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)), device)), device, "norms of nobody")


def without_batchnorm(device: torch.device) -> None:
    model = replace_batchnorm(
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(800, 3)).to(device)
    )
    for name, parameter in model.named_parameters():
        placed(parameter, device, name)
    batch = torch.randn(3, 3, 7, 7), torch.randint(3, (3,))
    ClippedGradients(model, cross_entropy, max_grad_norm=1.0).accumulate(moved(batch, device))


def self_check(device: torch.device) -> None:
    """What ``dp-microadam doctor`` runs on every device it finds."""
    found = check_exactness(0.0, device)
    assert found.exact, found
    assert found.networks == 4, found


def several_calls(device: torch.device) -> None:
    """A larger batch than before is checked at its size."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).to(device)
    engine = ClippedGradients(model, patterned_loss, max_grad_norm=1.0)
    for _ in range(2):
        engine.accumulate(moved((torch.randn(3, 6), torch.ones(3)), device))
    engine.accumulate(moved((torch.randn(40, 6), torch.ones(40)), device))


def with_tf32(device: torch.device) -> None:
    """The engine takes a sound network with torch's defaults, under which cuDNN may round to TF32 at some batch sizes only."""
    torch.backends.cudnn.allow_tf32 = True
    try:
        batch = torch.randn(40, 3, 12, 12), torch.randint(3, (40,))
        model = models.wide_resnet(10, 1).to(device)
        ClippedGradients(model, cross_entropy, max_grad_norm=1.0).accumulate(moved(batch, device))
    finally:
        torch.backends.cudnn.allow_tf32 = False


NETWORKS: dict[str, Callable[[torch.device], None]] = {
    "bags by offsets": partial(network, Bags, lambda: torch.randint(20, (5, 4))),
    "transformer without dropout": partial(network, partial(Transformer, 0.0), lambda: torch.randint(30, (5, 7))),
    "transformer": dropout,
    "repeated rows": partial(network, RepeatedRows, lambda: torch.randn(5, 8)),
    "repeated rows, waits": partial(waits_once, RepeatedRows, lambda: torch.randn(5, 8)),
    "transformer, waits": partial(waits_once, partial(Transformer, 0.0), lambda: torch.randint(30, (5, 7))),
    "checkpointed": partial(network, Checkpointed, lambda: torch.randn(5, 8)),
    "wide ResNet": partial(network, lambda: models.wide_resnet(10, 1), lambda: torch.randn(5, 3, 12, 12)),
    "wide ResNet per layer": partial(
        network, lambda: models.wide_resnet(10, 1), lambda: torch.randn(5, 3, 12, 12), clipping="per-layer"
    ),
    "convolution in three dimensions": partial(
        network, lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Flatten(), nn.Linear(24, 3)), lambda: torch.randn(5, 2, 3, 3, 3)
    ),
    "circular padding": partial(
        network,
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding="same", padding_mode="circular"), nn.Flatten(), nn.Linear(40, 3)),
        lambda: torch.randn(5, 3, 10),
    ),
    "channels last": partial(
        network,
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(100, 3)).to(memory_format=torch.channels_last),
        lambda: torch.randn(5, 3, 7, 7).to(memory_format=torch.channels_last),
    ),
    "standardized, dropped": partial(
        network,
        lambda: nn.Sequential(WeightStandardizedConv2d(3, 4, 3), nn.Flatten(), nn.Linear(100, 3)),
        lambda: torch.randn(5, 3, 7, 7),
        strategy="drop",
    ),
    **{f"views, {strategy}": partial(views, strategy) for strategy in ("ghost", "keep", "drop")},
    "no gradients": without_gradients,
    "users": users,
    "users without privacy": users_without_privacy,
    "class weights": class_weights,
    "state that changes": state_that_changes,
    "batch normalization replaced": without_batchnorm,
    "self-check": self_check,
    "several calls": several_calls,
    **({} if SAME_DRAWS else {"TF32 allowed": with_tf32}),
}

CASES = {
    **{one.name: partial(family, one) for one in FAMILIES},
    **{
        f"{layer}, {strategy}": partial(adversarial, layer, strategy)
        for layer in ("linear on sequences", "convolution", "norm form")
        for strategy in ("ghost", "keep", "drop")
    },
    **NETWORKS,
}
