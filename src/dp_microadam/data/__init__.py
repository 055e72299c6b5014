"""Data sets by name, one module per file format, with preprocessing and augmentation of batches.

Public names are imported on first use: the catalogue of data sets and downloads work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dp_microadam.data.catalogue import KNOWN_DATA

_HOMES = {
    "Augmentation": "dp_microadam.data.augmentation",
    "LabelledData": "dp_microadam.data.dataset",
    "Preparation": "dp_microadam.data.preparation",
    "load": "dp_microadam.data.sources",
}

__all__ = ["KNOWN_DATA", "Augmentation", "LabelledData", "Preparation", "load"]

if TYPE_CHECKING:
    from dp_microadam.data.augmentation import Augmentation
    from dp_microadam.data.dataset import LabelledData
    from dp_microadam.data.preparation import Preparation
    from dp_microadam.data.sources import load


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dp_microadam.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
