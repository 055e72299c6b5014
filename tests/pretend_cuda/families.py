"""One small network for every family of layers and every strategy of the clipping engine, with synthetic data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.row_norms import ClippedRowNorms
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.training.evaluation import over_views
from dp_microadam.workbench.data.augmentation import Augmentation

Loss = Callable[[nn.Module, Any], Tensor]
Options = Callable[[nn.Module], Mapping[str, Any]]


def patterned_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with a different output gradient at every position, times each example's weight."""
    inputs, weights = batch
    output = model(inputs)
    pattern = torch.linspace(-1, 1.3, output[0].numel(), dtype=output.dtype, device=output.device).view_as(output[0])
    return (output.sin() * pattern + 0.1 * output).flatten(1).sum(1) * weights


@dataclass(frozen=True)
class Family:
    """A network, the options of the engine, and ``inputs``, a function of the number of examples."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    loss: Loss = patterned_loss
    options: Options = field(default=lambda model: {})
    engine: type[ClippedGradients] = ClippedGradients


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cells = kind(3, 5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.cells(inputs)[0]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.attention(inputs, inputs, inputs, need_weights=False)[0])


class _Tied(nn.Module):
    """A language model with tied input and output embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5)
        self.middle = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(torch.tanh(self.middle(self.words(inputs))), self.words.weight)


class _Repeated(nn.Module):
    """A network that applies one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(3):
            inputs = torch.tanh(self.layer(inputs))
        return inputs


class _Bare(nn.Module):
    """A network with bare parameters: class token, position embeddings, temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(4, 4))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(inputs), -1, -1), inputs], dim=1) + self.positions
        return torch.tanh(rows * self.temperature)


def _images(count: int) -> Tensor:
    return torch.randn(count, 4, 7, 7)


def _colours(count: int) -> Tensor:
    return torch.rand(count, 3, 7, 7)


def _rows(count: int) -> Tensor:
    return torch.randn(count, 6)


def _words(count: int) -> Tensor:
    return torch.randint(9, (count, 5))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def _views(count: int) -> Tensor:
    """Three random augmented views of each image, as in training."""
    views, _ = Augmentation(crop_padding=2, flip=True, multiplicity=3)((_colours(count), torch.zeros(count)))
    return views


def _small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(100, 3))


def _scaled(model: nn.Module) -> Mapping[str, Any]:
    return {"scale": {name: 0.2 + torch.rand_like(p) for name, p in model.named_parameters()}}


def _masked(model: nn.Module) -> Mapping[str, Any]:
    return {"row_masks": {name: torch.arange(len(p)) % 2 == 0 for name, p in model.named_parameters()}}


FAMILIES = (
    Family("linear with bias", _mlp, _rows),
    Family("linear on sequences", lambda: nn.Linear(6, 4), lambda count: torch.randn(count, 5, 6)),
    Family(
        "convolution",
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2, groups=2)),
        _images,
    ),
    Family("convolution in one dimension", lambda: nn.Conv1d(4, 3, 3), lambda count: torch.randn(count, 4, 9)),
    Family("transposed convolution", lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), _images),
    Family("weight-standardized convolution", lambda: WeightStandardizedConv2d(4, 6, 3, gain=True), _images),
    Family("group normalization", lambda: nn.GroupNorm(2, 4), _images),
    Family("instance normalization", lambda: nn.InstanceNorm2d(4, affine=True), _images),
    Family("layer and RMS normalization", lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6)), _rows),
    Family("embedding", lambda: nn.Embedding(9, 5, padding_idx=2), _words),
    Family("embedding bag", lambda: nn.EmbeddingBag(9, 5, mode="mean"), _words),
    Family("LSTM", lambda: _Recurrent(nn.LSTM), lambda count: torch.randn(count, 4, 3)),
    Family("GRU", lambda: _Recurrent(nn.GRU), lambda count: torch.randn(count, 4, 3)),
    Family("attention", _Attention, lambda count: torch.randn(count, 5, 8)),
    Family("tied weights", _Tied, _words),
    Family("layer used three times", _Repeated, lambda count: torch.randn(count, 5)),
    Family("parameters without a layer", _Bare, lambda count: torch.randn(count, 3, 4)),
    Family("ghost norms", _mlp, lambda count: torch.randn(count, 5, 6), options=lambda model: {"strategy": "ghost"}),
    Family("kept gradients", _mlp, lambda count: torch.randn(count, 5, 6), options=lambda model: {"strategy": "keep"}),
    Family("per-layer clipping", _small_network, _colours, options=lambda model: {"clipping": "per-layer"}),
    Family("scaled gradients", _mlp, _rows, options=_scaled),
    Family("row masks", _mlp, _rows, options=_masked),
    Family("augmented views", _small_network, _views, loss=over_views(patterned_loss, (3, 7, 7))),
    Family("row norms", _mlp, _rows, engine=ClippedRowNorms),
)  # fmt: skip
