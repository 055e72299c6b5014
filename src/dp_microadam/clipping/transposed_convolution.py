"""Transposed convolutions: the adjoint of a convolution, so that input and output gradient trade places.

⟨δ, convᵀ(a; w)⟩ = ⟨conv(δ; w), a⟩: the weight's gradient is that of an ordinary convolution whose image is δ and whose
output gradient is a.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dp_microadam.clipping.convolution import ConvolutionFactors, ConvolutionRule


class TransposedConvolutionRule(ConvolutionRule):
    def factors(self, inputs: Tensor, deltas: Tensor) -> ConvolutionFactors:
        # Output padding of a stride or more leaves room for further positions of the convolution, where nothing came from.
        more = [side for p, s in zip(self.module.output_padding, self.module.stride, strict=True) for side in (p // s, 0)][::-1]
        return ConvolutionFactors(deltas, F.pad(inputs, more) if any(more) else inputs, self.layout.geometry)
