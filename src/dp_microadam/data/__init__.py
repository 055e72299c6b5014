"""Data sets as uint8 tensors in memory, one file per source format."""

from dp_microadam.data.dataset import ImageData, normalize
from dp_microadam.data.sources import KNOWN_DATA, load

__all__ = ["KNOWN_DATA", "ImageData", "load", "normalize"]
