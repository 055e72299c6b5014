"""Convolution layers with weight standardization, in the two forms used for private training.

With n = fan-in, μ the mean and var the variance of one filter w, the layer convolves with κ·γ·v, v = (w − μ)/s:

- ``form="norm"``: s = √max(n·var, 1e-4), κ = 1, a trainable gain γ per channel. Every filter has norm γ. This is what
  the Wide-ResNets of De et al. (2022, "Unlocking High-Accuracy Differentially Private Image Classification through
  Scale") and of DP-MicroAdam use. The floor avoids a division by zero for constant filters.
- ``form="variance"``: s = √(var + eps), κ = n^−½, no gain by default. This is the form of the normalizer-free
  ResNets of Brock et al. (2021).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dp_microadam.validation import require_non_negative, require_one_of, require_positive

_DEFAULT_EPS = {"norm": 1e-4, "variance": 1e-6}


class Standardized(NamedTuple):
    """Standardized filters v = (w − μ)/s, and the terms of their derivative for each output channel.

    For a gradient G with respect to v, the gradient with respect to w is (G − mean G − pull·v(vᵀG))/s.
    """

    filters: Tensor
    scale: Tensor
    pull: Tensor


class WeightStandardizedConv2d(nn.Conv2d):
    """A ``Conv2d`` with weight standardization; the module docstring defines the two forms.

    >>> layer = WeightStandardizedConv2d(8, 4, kernel_size=3, padding=1)
    >>> filters = layer.effective_weight().flatten(1)
    >>> bool(filters.mean(1).abs().max() < 1e-6), bool((filters.norm(dim=1) - 1).abs().max() < 1e-5)
    (True, True)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        form: str = "norm",
        gain: bool | None = None,
        eps: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, **options)
        self.form = require_one_of("form", form, ("norm", "variance"))
        self.eps = _DEFAULT_EPS[form] if eps is None else eps
        (require_positive if form == "norm" else require_non_negative)("eps", self.eps)
        has_gain = form == "norm" if gain is None else gain
        # The options may include device and dtype, which the gain shares with the filters.
        self.gain = nn.Parameter(torch.ones_like(self.weight[:, 0, 0, 0])) if has_gain else None
        nn.init.normal_(self.weight, std=math.sqrt(1.0 / self.fan_in))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def fan_in(self) -> int:
        return self.weight[0].numel()

    @property
    def unit(self) -> float:
        """The constant factor κ of the module docstring."""
        return 1.0 if self.form == "norm" else self.fan_in**-0.5

    def standardized(self) -> Standardized:
        """Standardized filters without gain and κ, and the terms of their derivative."""
        w = self.weight
        centred = w - w.mean(dim=(1, 2, 3), keepdim=True)
        squares = centred.square().sum(dim=(1, 2, 3), keepdim=True)
        if self.form == "norm":
            floored = squares.clamp(min=self.eps)
            # Where the floor is active, s is a constant and nothing pulls the gradient towards the filter. At equality
            # the derivative of clamp is that of its input.
            scale, pull = floored.sqrt(), (squares >= self.eps).to(w.dtype)
        else:
            scale = (squares / self.fan_in + self.eps).sqrt()
            pull = torch.full_like(squares, 1.0 / self.fan_in)
        return Standardized(centred / scale, scale.flatten(), pull.flatten())

    def effective_weight(self) -> Tensor:
        """The filters the convolution uses: κ·γ·v."""
        filters = self.standardized().filters
        if self.gain is not None:
            filters = filters * (self.unit * self.gain).view(-1, 1, 1, 1)
        elif self.unit != 1.0:
            filters = filters * self.unit
        return filters

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.effective_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form}"
