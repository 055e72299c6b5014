"""What a deployed model is given, and how it becomes an example as training saw it.

A data source supplies one :class:`RawInput`. ``export`` writes its description as JSON and traces its module in front of the
model; ``predict`` reads files by it. Normalization is not its business: ``Preparation`` follows, as in
training and evaluation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError


class RawInput(ABC):
    """The raw input of a model: a frozen dataclass whose fields are JSON values."""

    kind: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]
    """How the names of files that can be read end."""

    @property
    def free(self) -> tuple[int, ...]:
        """Dimensions of a batch, beside the first, that may have any length."""
        return ()

    @property
    @abstractmethod
    def in_words(self) -> str:
        """What the program takes, for people."""

    @property
    @abstractmethod
    def file_code(self) -> str:
        """Python code for the model card that reads a file as ``raw``."""

    @abstractmethod
    def module(self) -> nn.Module:
        """The module that turns a batch of raw inputs into examples as the data source has them."""

    @abstractmethod
    def example(self) -> Tensor:
        """Two raw inputs, to trace the program with."""

    @abstractmethod
    def read(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        """The raw inputs in a file, each with its name, as a batch of one.

        Raises:
            InputError: naming the file, if it cannot be used.
        """

    def description(self) -> dict[str, Any]:
        """The input as JSON."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}  # type: ignore[call-overload]
        return {"kind": self.kind, **fields, "in_words": self.in_words}


@dataclass(frozen=True)
class RawTensor(RawInput):
    """A tensor of a fixed shape, which the model takes as it is; in ``.npy`` files."""

    shape: Sequence[int]
    """Of one example."""
    dtype: str

    kind: ClassVar[str] = "tensor"
    endings: ClassVar[tuple[str, ...]] = (".npy",)

    @property
    def in_words(self) -> str:
        return f"{self.dtype} tensor [{', '.join(['B', *map(str, self.shape)])}]"

    @property
    def file_code(self) -> str:
        return 'import numpy\n\nraw = torch.from_numpy(numpy.load("example.npy"))[None]'

    def module(self) -> nn.Module:
        return nn.Identity()

    def example(self) -> Tensor:
        return torch.zeros(2, *self.shape, dtype=getattr(torch, self.dtype))

    def read(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        """One example, or several along the first dimension."""
        try:
            found = torch.from_numpy(np.load(file, allow_pickle=False))
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
        except (ValueError, TypeError, EOFError):
            raise InputError(f"{file} is not an array of numbers; it must be a .npy file") from None
        if tuple(found.shape) == tuple(self.shape):
            yield str(file), found[None].to(getattr(torch, self.dtype))
            return
        if tuple(found.shape[1:]) != tuple(self.shape):
            raise InputError(f"{file} has shape {tuple(found.shape)}; it must be {tuple(self.shape)}, or several of these")
        for row, one in enumerate(found, 1):
            yield f"{file} row {row}", one[None].to(getattr(torch, self.dtype))
