"""Row masks: only some rows of a weight train; the others get neither gradient nor noise and do not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def selected_rows(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows that train, gathered; tensors without a mask as they are."""
    return {name: tensor[masks[name]] if name in masks else tensor for name, tensor in tensors.items()}


def scatter_rows(selected: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`selected_rows`, with zeros in the rows that do not train."""
    whole = dict(selected)
    for name, mask in masks.items():
        if name in selected:
            rows = selected[name]
            whole[name] = rows.new_zeros(len(mask), *rows.shape[1:])
            whole[name][mask] = rows
    return whole


@contextmanager
def freeze_other_rows(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore the rows that do not train after the block, whatever the optimizer did to them.

    A gradient of zero is not enough: weight decay, momentum and a quantized residual change weights too.
    """
    before = {name: model.get_parameter(name).detach()[~mask] for name, mask in masks.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name)[~mask] = before[name]
