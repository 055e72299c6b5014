"""Transposed convolutions: the adjoint of a convolution, so that input and output gradient trade places.

⟨δ, convᵀ(a; w)⟩ = ⟨conv(δ; w), a⟩: the weight's gradient is that of an ordinary convolution whose image is δ and whose
output gradient is a.
"""

from __future__ import annotations

from torch import Tensor

from dp_microadam.clipping.convolution import ConvolutionFactors, ConvolutionRule


class TransposedConvolutionRule(ConvolutionRule):
    def factors(self, inputs: Tensor, deltas: Tensor) -> ConvolutionFactors:
        return ConvolutionFactors(deltas, inputs, self.layout.geometry)
