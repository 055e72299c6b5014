"""GroupNorm in place of BatchNorm, which cannot be trained privately."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer


def replace_batchnorm(model: nn.Module, *, groups: int = 16) -> nn.Module:
    """Swap every BatchNorm of ``model`` for a GroupNorm, in place, and return the model.

    Gain, bias, their ``requires_grad`` flags, device, dtype and mode are carried over; running statistics are not
    used. The number of groups is the largest divisor of the channels that is at most ``groups`` and leaves two
    channels to a group.

    >>> model = replace_batchnorm(nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24)))
    >>> model[1].num_groups
    12
    """
    require_integer("groups", groups, 1)
    if is_batchnorm(model):
        return _group_norm(model, groups)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_batchnorm(child):
                setattr(parent, name, _group_norm(child, groups))
    return model


def is_batchnorm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm)


def _group_norm(norm: nn.Module, groups: int) -> nn.GroupNorm:
    assert isinstance(norm, _BatchNorm)
    channels = norm.num_features
    if channels < 1:
        raise InputError(f"{type(norm).__name__} has no channels yet; run the model once before replace_batchnorm")
    count = max(d for d in range(1, min(groups, channels) + 1) if channels % d == 0 and (d == 1 or channels >= 2 * d))
    replacement = nn.GroupNorm(count, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        replacement.to(norm.weight)
        with torch.no_grad():
            for name, parameter in replacement.named_parameters():
                parameter.copy_(norm.get_parameter(name))
                parameter.requires_grad_(norm.get_parameter(name).requires_grad)
    return replacement.train(norm.training)
