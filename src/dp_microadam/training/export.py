"""Export of weights as safetensors, which PyTorch and other tools can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict. Tensors that share memory are written separately, as ``load_state_dict`` expects them."""
    from safetensors.torch import save_file

    save_file({name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}, path)
