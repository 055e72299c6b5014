"""Maximum pooling in the memory layout in which PyTorch vectorises it."""

from __future__ import annotations

from torch import Tensor, nn


class ChannelsLastMaxPool2d(nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d` with the channels of a pixel side by side in memory.

    On a CPU, PyTorch's kernel for that layout takes several channels at a time, that for rows of pixels one number at a
    time: for the 26,010-parameter network it was the largest part of a step. Convolutions that follow keep the layout.
    Dimensions are moved instead of asking for ``torch.channels_last``, because ``torch.func.vmap`` knows no memory formats.
    """

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.movedim(-3, -1).contiguous().movedim(-1, -3))
