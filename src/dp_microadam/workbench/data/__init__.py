"""Data sets by name, one module per family of file formats, with preprocessing and augmentation of batches.

Public names are imported on first use: the catalogue of data sets and downloads work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dp_microadam.workbench.data.catalogue import KNOWN_DATA

_HOMES = {"Augmentation": "augmentation", "LabelledData": "dataset", "Preparation": "dataset", "load": "sources"}

__all__ = ["KNOWN_DATA", "Augmentation", "LabelledData", "Preparation", "load"]

if TYPE_CHECKING:
    from dp_microadam.workbench.data.augmentation import Augmentation
    from dp_microadam.workbench.data.dataset import LabelledData, Preparation
    from dp_microadam.workbench.data.sources import load


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
