"""What MicroAdam refuses: options out of range, and parameters or gradients that it cannot update."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers import micro_adam_fused as fused_kernels
from dp_microadam.optimizers import micro_adam_triton as device_kernels
from dp_microadam.optimizers.bias import CORRECTIONS, SECOND_MOMENTS
from dp_microadam.optimizers.micro_adam_state import MAX_BLOCK_SIZE
from dp_microadam.optimizers.shards import is_sharded
from dp_microadam.validation import (
    require_in_closed_open,
    require_in_open_closed,
    require_integer,
    require_non_negative,
    require_one_of,
)

GRADIENT_LIMIT = 1e15
"""Larger gradients count as non-finite: the sum of their squares over a tensor could overflow float32."""

_MIN_EPS = 1e-30
"""Smaller values underflow in float32, and coordinates outside the window would divide 0 by 0."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Parameter dtypes that are supported."""


def largest_magnitude_of_each(gradients: list[Tensor]) -> Tensor:
    """The largest magnitude in each gradient; NaN if it contains one."""
    # Of torch's reductions only aminmax reads a tensor once, at memory bandwidth.
    ends = [end for gradient in gradients for end in torch.aminmax(gradient.detach())]
    return torch.stack([end.to(ends[0].device, torch.float32) for end in ends]).view(-1, 2).abs().amax(dim=1)


def uses_kernel(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether a compiled kernel updates this parameter; raises if the group requires it and it cannot."""
    if group["fused"] is False:
        return False
    kernels = device_kernels if param.device.type in device_kernels.DEVICE_TYPES else fused_kernels
    reason = kernels.unsupported_reason(param, group)
    if reason and group["fused"]:
        raise InputError(f"fused is True, but {reason}; use fused=None or fused=False")
    return reason is None


def unusable_reason(param: Tensor, own: Tensor, given: Tensor) -> str | None:
    """Why a parameter cannot be updated with its gradient, to complete a sentence that begins with the parameter; else None."""
    if given.layout is not torch.strided:
        return "has a sparse gradient; MicroAdam takes dense ones"
    if own.layout is not torch.strided or own.dtype not in _DTYPES:
        return f"is {own.layout} and {own.dtype}; MicroAdam takes dense parameters of float16, bfloat16, float32 and float64"
    if is_sharded(param) and getattr(param.grad, "placements", None) != param.placements:  # type: ignore[attr-defined]
        return "and its gradient must be sharded in the same way"
    if given.shape != own.shape or given.device != own.device:
        return (
            f"has a gradient of shape {tuple(given.shape)} on {given.device}; it must have the shape {tuple(own.shape)} and be "
            f"on {own.device}, like the parameter"
        )
    if own.device.type == "meta":
        return "is on the meta device, which holds no values; move the model to a real device first"
    if own.numel() and not (own.data_ptr() and given.data_ptr()):
        return "or its gradient has no storage: it was freed or wraps other tensors; give plain tensors that hold their values"
    if not own.is_contiguous() and any(stride == 0 < size - 1 for size, stride in zip(own.shape, own.stride(), strict=True)):
        return "is an expanded tensor, whose coordinates share memory; use .clone()"
    return None


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is contiguous float32 whose memory holds its actual values."""
    # torch can apply a minus sign lazily, as in ``z.conj().imag``; memory then holds the negated values.
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_neg()


def version_of(tensor: Tensor) -> int:
    """torch's version counter of ``tensor``; -1 for tensors created in inference mode, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def validate_options(options: dict[str, Any]) -> None:
    """Raise an InputError for an option of a parameter group that is out of range."""
    require_non_negative("lr", float(options["lr"]))
    for name, beta in zip(("betas[0]", "betas[1]"), options["betas"], strict=True):
        require_in_closed_open(name, beta, 0.0, 1.0)
    if not _MIN_EPS <= options["eps"] < math.inf:
        raise InputError(f"eps is {options['eps']}; it must be a finite number of at least {_MIN_EPS:g}")
    require_non_negative("weight_decay", options["weight_decay"])
    require_in_open_closed("density", options["density"], 0.0, 1.0)
    require_integer("window", options["window"], 1)
    require_one_of("second_moment", options["second_moment"], SECOND_MOMENTS)
    require_one_of("scope", options["scope"], ("block", "tensor"))
    require_integer("bucket_size", options["bucket_size"], 2)
    if options["bucket_size"] % 2:
        raise InputError(f"bucket_size is {options['bucket_size']}; it must be even, as two codes share a byte")
    require_integer("block_size", options["block_size"], 2, MAX_BLOCK_SIZE)
    if options["block_size"] % options["bucket_size"]:
        raise InputError(
            f"block_size is {options['block_size']}; it must be a multiple of bucket_size, {options['bucket_size']}"
        )
    if options["window_dtype"] not in (torch.bfloat16, torch.float32):
        raise InputError(f"window_dtype is {options['window_dtype']}; it must be torch.bfloat16 or torch.float32")
    require_one_of("bias_correction", options["bias_correction"], CORRECTIONS)
    if options["second_moment"] == "tensor" and options["bias_correction"] != "steady":
        raise InputError(
            f"bias_correction is {options['bias_correction']!r}, which is for second_moment 'coordinate'; set that too, or "
            "leave it out"
        )
    require_one_of("rounding", options["rounding"], ("nearest", "stochastic"))
    if options["seed"] is not None or options["rounding"] == "stochastic":
        require_integer("seed", options["seed"], 0)
