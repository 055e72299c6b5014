"""Brings numbers of a device to the host together: each read by itself makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, with their shapes and types; one copy from the device, whatever their number.

    For real numbers of at most double precision, which go through double unharmed.
    """
    tensors = [tensor.detach() for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors
    joined = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    pieces = joined.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape).to(tensor.dtype) for piece, tensor in zip(pieces, tensors, strict=True)]
