"""A trained model as one program for deployment, traced by ``torch.export``: raw input in, probabilities out.

The file needs torch alone to run: neither this library nor the model's source.
"""

from __future__ import annotations

import copy
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dp_microadam.errors import DPMicroAdamError, InputError

_TOLERANCE = 1e-4
"""Largest difference between the outputs of a program and of the model that it was traced from."""


class RawInput(ABC):
    """What a deployed model is given, and how it becomes an example as training saw it: a dataclass whose fields are JSON."""

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
        """What turns a batch of raw inputs into examples as the data source has them; normalization follows."""

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
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # type: ignore[call-overload]
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


class DeployedModel(nn.Module):
    """Raw inputs, prepared as for evaluation, through the model; ``probabilities`` adds a softmax over its outputs."""

    def __init__(
        self,
        model: nn.Module,
        raw: nn.Module | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        *,
        probabilities: bool = True,
    ) -> None:
        super().__init__()
        self.raw = raw
        self.prepare = prepare
        self.model = model
        self.probabilities = probabilities

    def forward(self, inputs: Tensor) -> Any:
        if self.raw is not None:
            inputs = self.raw(inputs)
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        outputs = self.model(inputs)
        return outputs.softmax(dim=1) if self.probabilities else outputs


def for_deployment(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in evaluation mode."""
    return copy.deepcopy(model).cpu().eval()


def save_program(deployed: DeployedModel, example: Tensor, path: Path, free: tuple[int, ...] = ()) -> None:
    """Trace a model with an example batch and write the program, which then takes batches of any size.

    ``free`` are other dimensions of the input that may have any length. The file is read back, and must give what the model
    gives.

    Formal guarantees: no value of the example is in the file.

    Raises:
        InputError: if the model cannot be traced.
        DPMicroAdamError: if the program gives something else than the model.
    """
    if len(example) == 1:  # which would be taken for a constant
        example = torch.cat([example, example])
    shapes = (dict.fromkeys((0, *free), torch.export.Dim.DYNAMIC),)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        try:
            program = torch.export.export(deployed, (example,), dynamic_shapes=shapes)
            program.example_inputs = None  # which would be saved beside the graph
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)  # names folders of this machine
            torch.export.save(program, path)
        except Exception as error:  # it raises almost anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"the model cannot be traced by torch.export ({reason}); leave the program out, or change the model"
            ) from error
        given, wanted = torch.export.load(path).module()(example), deployed(example)
    if not torch.allclose(given, wanted, rtol=0, atol=_TOLERANCE):
        raise DPMicroAdamError(f"the traced program in {path} gives other outputs than the model; leave the program out")
