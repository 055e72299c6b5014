"""Brings the features of each example to one norm, so that a head's steps need not know what backbone they come from."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.validation import require_positive

FEATURE_NORM = 4.0
"""The norm of features before a linear head.

The noise of a run with dp-walk moves each of d weights by about 1.5·d^−¼, and so a score by 1.5·d^−¼ times the norm of the
features. At 4 that is about one for heads of hundreds to thousands of weights, a fraction of what scores of different classes
differ by. With a larger norm noise decides; with a smaller one the same steps do not reach such differences.
"""


class FixedNorm(nn.Module):
    """x ↦ norm·x/‖x‖ over the last dimension; zero stays zero. It has no parameters.

    Formal guarantees: each row of the result is a function of that row alone.

    >>> import torch
    >>> FixedNorm(2.0)(torch.tensor([[3.0, 4.0]]))
    tensor([[1.2000, 1.6000]])
    """

    def __init__(self, norm: float = FEATURE_NORM) -> None:
        super().__init__()
        self.norm = require_positive("norm", norm)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm * F.normalize(features, dim=-1)

    def extra_repr(self) -> str:
        return f"norm={self.norm:g}"
