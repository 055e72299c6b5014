"""Compares what a device computed with what the CPU did."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pretend_cuda.device import real_device
from torch import Tensor
from torch.utils._pytree import tree_map

TOLERANCE = 1e-5 if real_device() is None else 1e-3
"""Of differences, relative to the norm. The pretend device has the CPU's kernels, in which layouts may change roundings."""

SAME_DRAWS = real_device() is None
"""Whether the device draws the CPU's random numbers when it is seeded alike."""


def moved(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on the device."""
    return tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, tree)


def agree(
    expected: Tensor, found: Tensor, device: torch.device, what: str, tolerance: float = TOLERANCE, size: float = 1e-6
) -> None:
    """``found`` is on the device and equals the CPU's value up to rounding; what is not finite is so in both.

    Differences are relative to the norm, or to ``size`` if that is larger.
    """
    placed(found, device, what)
    tolerance = max(tolerance, TOLERANCE) if tolerance and real_device() else tolerance
    expected, found = expected.detach().double(), found.detach().cpu().double()
    assert expected.shape == found.shape, f"{what} has shape {tuple(found.shape)}, on the CPU {tuple(expected.shape)}"
    assert torch.equal(expected.isfinite(), found.isfinite()), f"{what} is finite elsewhere than on the CPU"
    one, other = expected.nan_to_num(0, 0, 0), found.nan_to_num(0, 0, 0)
    off = float((one - other).norm())
    assert off <= tolerance * max(float(one.norm()), size), f"{what} is off by {off} of {float(one.norm())}"


def all_agree(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], device: torch.device, what: str, **options: Any
) -> None:
    assert expected.keys() == found.keys(), f"{what}: {expected.keys() ^ found.keys()}"
    # A part that is nearly zero is a small difference of large numbers.
    whole = sum(float(value.detach().double().nan_to_num(0, 0, 0).square().sum()) for value in expected.values()) ** 0.5
    for name, value in expected.items():
        agree(value, found[name], device, f"{what} {name}", size=0.01 * whole, **options)


def placed(tensor: Tensor, device: torch.device, what: str) -> None:
    index = device.index if device.index is not None else 0
    assert tensor.device.type == device.type, f"{what} is on {tensor.device}"
    assert device.type == "cpu" or tensor.device.index == index, f"{what} is on {tensor.device}"


def existing(path: str) -> ModuleType:
    """A module of the tests, for its tables of cases."""
    file = Path(__file__).parents[2] / path
    spec = importlib.util.spec_from_file_location("existing_" + path.removesuffix(".py").replace("/", "_"), file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
