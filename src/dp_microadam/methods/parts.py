"""Groups of parameters that fine-tuning methods treat differently: head, biases, normalization, weight matrices."""

from __future__ import annotations

from torch import nn

from dp_microadam.errors import InputError


def head_of(model: nn.Module, head: str | None) -> frozenset[str]:
    """Names of the head's trainable parameters: of the module called ``head``, or of the one with the last parameter.

    >>> sorted(head_of(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)), None))
    ['2.bias', '2.weight']
    """
    names = trainable_names(model)
    if not names:
        raise InputError("model has no trainable parameter; call requires_grad_(True) on those to be trained")
    owner = names[-1].rpartition(".")[0] if head is None else head
    members = frozenset(name for name in names if name.startswith(f"{owner}.") or not owner)
    if not members:
        raise InputError(f"head is {head!r}; it must name a module of the model that has trainable parameters")
    return members


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that require gradients, in the model's order."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def biases_of(model: nn.Module) -> frozenset[str]:
    """Names of trainable biases, including those of normalization layers."""
    return frozenset(name for name in trainable_names(model) if name.endswith("bias"))


def vectors_of(model: nn.Module) -> frozenset[str]:
    """Names of trainable parameters with fewer than two dimensions: biases, and the weights of normalization layers."""
    return frozenset(name for name in trainable_names(model) if model.get_parameter(name).dim() < 2)


def weights_of(model: nn.Module) -> frozenset[str]:
    """Names of trainable weights with rows: one row per linear output, convolution channel or embedding entry."""
    return frozenset(
        name for name in trainable_names(model) if model.get_parameter(name).dim() >= 2 and name.endswith("weight")
    )
