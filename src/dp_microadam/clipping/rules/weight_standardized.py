"""Exact per-example gradients of weight-standardized convolutions.

The layer convolves with κγv, v = (w − μ)/s (see ``layers/weight_standardization.py``). With G the per-example
gradient of an ordinary convolution's weight, n the fan-in, 1 the filter of ones, p the pull of the derivative and k =
κγ/s per channel:

    ∂γ = κ·vᵀG            ∂w = k(G − mean G − p·v(vᵀG))
    ‖∂w‖² = Σ k²[‖G‖² − (1ᵀG)²/n − (2p − p²‖v‖²)(vᵀG)² + 2p(1ᵀv)(1ᵀG)(vᵀG)/n]

The last term is zero for exact arithmetic. It is there for filters whose mean is thousands of times their spread: their v,
as rounded, is not orthogonal to 1, and the norm must be that of what is summed.

∂w is linear in G: the clipped sum of G is projected once. Where gradients are formed, 1ᵀG and vᵀG are read off them.
With the ghost strategy ‖kG‖² is the ordinary norm with δ scaled by k, 1ᵀG = Σₜ δₜ·(sum of the patch at t) and vᵀG = Σₜ δₜzₜ,
where z = conv(a, v) is the output before the gain: the forward pass then applies the gain to z instead of to the
filter, since dividing it out again would fail at γ = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_microadam.clipping.outer_product import OF_SQUARES, Factors, Measured, OuterProductSum, folded, squared_norms
from dp_microadam.clipping.rules.convolution import ConvolutionFactors, ConvolutionRule, convolution_shapes, padded_shape
from dp_microadam.clipping.rules.rule import GradientRows, KeptGradients, LayerCall, RuleCall, UnchangedInput, at_least_float32
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d


class Projection:
    """The derivative of κγv with respect to w and γ at the layer's present parameters."""

    def __init__(self, module: WeightStandardizedConv2d) -> None:
        with torch.no_grad():
            standardized = module.standardized()
        self.fan_in = module.fan_in
        self.unit = module.unit
        self.filters = at_least_float32(standardized.filters.flatten(1))
        self.pull = at_least_float32(standardized.pull)
        gain = torch.ones_like(self.pull) if module.gain is None else at_least_float32(module.gain)
        self.gain = self.unit * gain
        self.slope = self.gain / at_least_float32(standardized.scale)
        lengths = squared_norms(self.filters)
        self.loss_along_filter = 2 * self.pull - self.pull.square() * lengths
        self.tilt = 2 * self.pull * self.filters.double().sum(1).to(self.filters.dtype) / self.fan_in

    @cached_property
    def _probes(self) -> Tensor:
        """1 and v side by side: one product with G yields both 1ᵀG and vᵀG."""
        return torch.stack([torch.ones_like(self.filters), self.filters], dim=1).transpose(1, 2)

    def coordinates(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """1ᵀG and vᵀG, each (examples, channels)."""
        found = torch.bmm(gradients.flatten(2).transpose(0, 1), self._probes)
        return found[..., 0].t(), found[..., 1].t()

    def weight_gradients(self, gradients: Tensor) -> Tensor:
        """∂w from G, (examples, *weight shape)."""
        flat = gradients.flatten(2)
        along_ones, along_filter = self.coordinates(gradients)
        flat = flat - (along_ones / self.fan_in).unsqueeze(2)
        flat -= (along_filter * self.pull).unsqueeze(2) * self.filters
        return flat.mul_(self.slope.unsqueeze(1)).view_as(gradients)

    def squared_norms(self, whole: Tensor, along_ones: Tensor, along_filter: Tensor) -> Tensor:
        """‖∂w‖² from ‖kG‖², 1ᵀG and vᵀG."""
        lost = along_ones.square() / self.fan_in + self.loss_along_filter * along_filter.square()
        lost -= self.tilt * along_ones * along_filter
        return whole - lost @ self.slope.square()


class StandardizedSum(OuterProductSum):
    """Norms and clipped sum of ∂w, with vᵀG of every example as a by-product: the gradient of the gain."""

    def __init__(self, factors: Factors, strategy: str, projection: Projection, ungained: Tensor | None) -> None:
        super().__init__(factors, strategy)
        self._projection = projection
        self._ungained = ungained
        self._along_filter: list[Tensor] = []

    def gain_gradients(self) -> Tensor:
        """∂γ = κ·vᵀG; known once the norms have been taken."""
        return self._projection.unit * torch.cat(self._along_filter)

    def finished(self, gradients: Tensor) -> Tensor:
        return self._projection.weight_gradients(gradients)

    def direct_norms_of(self, gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        lengths = torch.linalg.vector_norm(gradients.flatten(2), dim=2).square()
        whole = lengths @ self._projection.slope.square()
        along_ones, along_filter = self._projection.coordinates(gradients)
        self._along_filter.append(along_filter)
        return self._projection.squared_norms(whole, along_ones, along_filter), OF_SQUARES * whole

    def scaled_deltas(self) -> Tensor:
        return self.factors.deltas * self._projection.slope.view(-1, 1, 1)

    def ghost_norms(self) -> Measured:
        factors, rows = self.factors, self.factors.rows_per_example
        assert isinstance(factors, ConvolutionFactors)
        assert self._ungained is not None
        along_filter = folded((factors.deltas * self._ungained).flatten(2).sum(2), rows)
        self._ungained = None
        self._along_filter.append(along_filter)
        whole = ConvolutionFactors(factors.inputs, self.scaled_deltas(), factors.geometry, rows).ghost()
        norms = self._projection.squared_norms(whole.norms, folded(sums_of_gradients(factors), rows), along_filter)
        least = OF_SQUARES * whole.norms
        return Measured(norms, least if whole.least is None else least.maximum(whole.least))


def sums_of_gradients(factors: ConvolutionFactors) -> Tensor:
    """1ᵀG per example and channel: Σₜ δₜ·(sum of the patch at t), with patches summed by a box filter."""
    geometry = factors.geometry
    images = factors.inputs.unflatten(1, (geometry.groups, -1)).sum(2)
    box = images.new_ones(geometry.groups, 1, *geometry.kernel)
    sums = F.conv2d(images, box, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    deltas = factors.deltas.unflatten(1, (geometry.groups, -1)).flatten(3)
    return (deltas @ sums.flatten(2).unsqueeze(3)).flatten(1)


class StandardizedCall(RuleCall):
    rule: WeightStandardizedRule

    def __init__(self, rule: WeightStandardizedRule, inputs: UnchangedInput | None, ungained: Tensor | None) -> None:
        super().__init__(rule, inputs)
        self._ungained = ungained

    def parts_of(self, inputs: Tensor | None, deltas: Tensor) -> Mapping[str, KeptGradients]:
        rule, ungained, self._ungained = self.rule, self._ungained, None
        parts = rule.parts(None, deltas, self.rows_per_example, {})
        if inputs is not None:
            factors = rule.factors(inputs, deltas, self.rows_per_example)
            strategy = rule.choose(rule.shapes(factors))
            if strategy == "ghost" and ungained is None:  # which was not the choice for one row, at the forward pass
                strategy = "drop"
            weight = StandardizedSum(factors, strategy, rule.projection, ungained)
            weight.squared_norms()  # which also finds the gain's gradients
            if "gain" in rule.trainable:
                parts["gain"] = GradientRows(weight.gain_gradients())
            if "weight" in rule.trainable:
                parts["weight"] = weight
        return parts


class WeightStandardizedRule(ConvolutionRule):
    """Replaces the layer's forward while it is recorded: filters are standardized once for forward and backward pass."""

    module: WeightStandardizedConv2d
    needs_input = frozenset({"weight", "gain"})
    masks_rows = False
    _projection: Projection | None = None
    _ungained: Tensor | None = None

    def install(self) -> None:
        self._projection = Projection(self.module)
        self.module.forward = self._forward  # type: ignore[method-assign]

    def uninstall(self) -> None:
        del self.module.forward
        self._projection = self._ungained = None

    @property
    def projection(self) -> Projection:
        return Projection(self.module) if self._projection is None else self._projection

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        ungained, self._ungained = self._ungained, None
        return StandardizedCall(self, self.kept_input(args, kwargs), ungained)

    def gradients(self, inputs: Tensor | None, deltas: Tensor, rows: int) -> dict[str, Tensor]:
        found = super().gradients(inputs, deltas, rows)
        if inputs is not None:
            projection, of_filters = self.projection, found.pop("weight")
            if "gain" in self.trainable:
                found["gain"] = projection.unit * projection.coordinates(of_filters)[1]
            if "weight" in self.trainable:
                found["weight"] = projection.weight_gradients(of_filters)
        return found

    def _forward(self, input: Tensor) -> Tensor:
        module = self.module
        filters = self.projection.filters.view_as(module.weight).to(module.weight.dtype)
        gain = self.projection.gain.to(module.weight.dtype).view(-1, 1, 1)
        if not self.needs_input.isdisjoint(self.trainable):
            shapes = convolution_shapes(self.geometry, padded_shape(input, self.margins), input.element_size())
            if self.choose(shapes) == "ghost":
                ungained = module._conv_forward(input, filters, None)
                self._ungained = at_least_float32(ungained)
                shift = torch.zeros_like(gain) if module.bias is None else module.bias.view(-1, 1, 1)
                return torch.addcmul(shift, ungained, gain)
        return module._conv_forward(input, filters * gain.unsqueeze(3), module.bias)
