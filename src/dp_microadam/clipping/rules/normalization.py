"""Affine parameters of GroupNorm, LayerNorm, InstanceNorm, RMSNorm and fixed BatchNorm: ∂γ = Σₜ δₜx̂ₜ and ∂β = Σₜ δₜ.

They are kept per example. x̂, the normalized input without gain, is computed again rather than divided out of the output,
which fails at γ = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dp_microadam.clipping.rules.rule import (
    GradientRows,
    LayerCall,
    LayerRule,
    PartsCall,
    UnchangedInput,
    at_least_float32,
    folded,
)

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


class NormalizationCall(PartsCall):
    def __init__(self, rule: NormalizationRule, inputs: UnchangedInput | None) -> None:
        super().__init__()
        self._rule = rule
        self._inputs = inputs

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        deltas = at_least_float32(output_gradient)
        gradients = self._rule.gradients(None if self._inputs is None else self._inputs.read(), deltas)
        self.parts = {key: GradientRows(folded(rows, self.rows_per_example)) for key, rows in gradients.items()}
        del self._inputs
        return self.norms_of_parts()

    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        rows = self.rows(examples)
        inputs = None if self._inputs is None else self._inputs.read()[rows]
        gradients = self._rule.gradients(inputs, at_least_float32(output_gradient)[rows])
        return {key: folded(values, self.rows_per_example) for key, values in gradients.items()}


class NormalizationRule(LayerRule):
    """A layer whose output is x̂·γ + β."""

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        return NormalizationCall(self, self.kept_input(args, kwargs, {"weight"}))

    def gradients(self, inputs: Tensor | None, deltas: Tensor) -> dict[str, Tensor]:
        """Per-example gradients of the trainable ones of γ and β."""
        found = {}
        if inputs is not None:
            found["weight"] = self.over_positions(deltas * self.normalized(inputs))
        if "bias" in self.trainable:
            found["bias"] = self.over_positions(deltas)
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
        shape = self.module.normalized_shape
        return values.reshape(len(values), -1, *shape).sum(1)
