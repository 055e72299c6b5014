"""Affine parameters of GroupNorm, LayerNorm, InstanceNorm, RMSNorm and fixed BatchNorm: ∂γ = Σₜ δₜx̂ₜ and ∂β = Σₜ δₜ.

They are kept per example. x̂, the normalized input without gain, is computed again rather than divided out of the output,
which fails at γ = 0.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dp_microadam.clipping.outer_product import folded
from dp_microadam.clipping.rules.rule import LayerRule

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


class NormalizationRule(LayerRule):
    """A layer whose output is x̂·γ + β."""

    def gradients(self, inputs: Tensor | None, deltas: Tensor, rows: int) -> dict[str, Tensor]:
        found = {}
        if inputs is not None:
            found["weight"] = folded(self.over_positions(deltas * self.normalized(inputs)), rows)
        if "bias" in self.trainable:
            found["bias"] = folded(self.over_positions(deltas), rows)
        return found

    def normalized(self, inputs: Tensor) -> Tensor:
        """x̂."""
        raise NotImplementedError

    def over_positions(self, values: Tensor) -> Tensor:
        """Sum over everything but the batch and the parameter's own dimensions."""
        raise NotImplementedError


class ChannelNormalizationRule(NormalizationRule):
    """GroupNorm, InstanceNorm and BatchNorm in eval mode: one gain per channel, the second dimension."""

    module: nn.GroupNorm | InstanceNorm | _BatchNorm

    def normalized(self, inputs: Tensor) -> Tensor:
        if isinstance(self.module, nn.GroupNorm):
            return F.group_norm(inputs, self.module.num_groups, eps=self.module.eps)
        mean, variance = self.module.running_mean, self.module.running_var
        own_statistics = self.module.training or mean is None
        return F.instance_norm(inputs, mean, variance, use_input_stats=own_statistics, eps=self.module.eps)

    def over_positions(self, values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:2], -1).sum(2)


class FeatureNormalizationRule(NormalizationRule):
    """LayerNorm and RMSNorm: one gain per element of the last dimensions."""

    module: nn.LayerNorm | nn.RMSNorm

    def normalized(self, inputs: Tensor) -> Tensor:
        shape = list(self.module.normalized_shape)
        if isinstance(self.module, nn.LayerNorm):
            return F.layer_norm(inputs, shape, eps=self.module.eps)
        return F.rms_norm(inputs, shape, eps=self.module.eps)

    def over_positions(self, values: Tensor) -> Tensor:
        return values.reshape(len(values), -1, *self.module.normalized_shape).sum(1)
