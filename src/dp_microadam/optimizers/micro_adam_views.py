"""Readable views of MicroAdam's packed state: the residual, the window and v̂, of one parameter's local shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dp_microadam.optimizers.bias import scales
from dp_microadam.optimizers.micro_adam_state import StateFormat
from dp_microadam.optimizers.micro_adam_update import add_residual, moments_from_window


def decoded_residual(group: dict[str, Any], own: Tensor, state: dict[str, Any]) -> Tensor | None:
    """The residual of error feedback, flat and in float32; None without error feedback."""
    if not ("error" in state or "codes" in state):
        return None
    found = torch.zeros(own.numel(), device=own.device)
    add_residual(found, 0, state, group["bucket_size"])
    return found


def selected(group: dict[str, Any], own: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The coordinates and float32 values in the window, one row per step, newest first."""
    step = int(state["step"])
    slots = [(step - 1 - age) % group["window"] for age in range(min(step, group["window"]))]
    coordinates = state["indices"][slots].long()
    for segment in StateFormat.of(group).layout(own.numel()).segments:
        if segment.start + segment.rows > 1:  # else a single block, which begins at 0
            starts = torch.arange(segment.rows, device=own.device).mul_(segment.length).add_(segment.start)
            kept = slice(segment.window_start, segment.window_start + segment.rows * segment.kept)
            coordinates[:, kept].view(len(slots), segment.rows, segment.kept).add_(starts.unsqueeze(1))
    return coordinates, state["values"][slots].float()


def dense_second_moment(group: dict[str, Any], own: Tensor, state: dict[str, Any]) -> Tensor:
    """v̂ of the last step in float32: of the whole tensor, or zero for coordinates not in the window."""
    step = int(state["step"])
    if "second_moment" in state:
        return torch.full_like(own, float(state["second_moment"]) / (1 - group["betas"][1] ** step), dtype=torch.float32)
    found, factors = torch.empty(own.numel(), device=own.device), scales(step, group, None)
    for segment in StateFormat.of(group).layout(own.numel()).segments:
        kept = slice(segment.window_start, segment.window_start + segment.rows * segment.kept)
        indices = state["indices"][:, kept].view(-1, segment.rows, segment.kept)
        values = state["values"][:, kept].view(-1, segment.rows, segment.kept)
        _, second = moments_from_window(indices, values, segment.length, step, group, factors)
        found[segment.start : segment.start + second.numel()] = second.view(-1)
    return found.view_as(own)
