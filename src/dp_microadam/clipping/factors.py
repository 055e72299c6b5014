"""What callers multiply gradients by before they are clipped: factors of all coordinates, or which rows are trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError


def checked_scale(scale: Mapping[str, Tensor], trainable: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Factors by parameter name, each of the parameter's shape, on its device and in float32 or wider."""
    return {name: _checked("scale", name, values, trainable, rows=False) for name, values in scale.items()}


def checked_row_masks(masks: Mapping[str, Tensor], trainable: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Ones for rows that are trained and zeros for others, by parameter name."""
    found = {name: _checked("row_masks", name, values, trainable, rows=True) for name, values in masks.items()}
    return {name: (values != 0).to(values.dtype) for name, values in found.items()}


def _checked(what: str, name: str, values: Tensor, trainable: Mapping[str, nn.Parameter], *, rows: bool) -> Tensor:
    if name not in trainable:
        raise InputError(
            f"{what} names {name!r}, which is not a trainable parameter of the model; name one of model.named_parameters()"
        )
    parameter = trainable[name]
    shape = parameter.shape[:1] if rows else parameter.shape
    if values.shape != shape:
        raise InputError(f"{what}[{name!r}] has shape {tuple(values.shape)}; it must have shape {tuple(shape)}")
    values = values.detach().to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"{what}[{name!r}] holds values that are not finite; all values must be finite")
    return values
