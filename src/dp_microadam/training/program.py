"""A trained model as one program for deployment: raw input in, probabilities out, traced by ``torch.export``.

A file of ``torch.export`` needs torch alone to run: neither this library nor the model's source. ONNX would need two more
packages to write and a third to run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.training.aten_program import AtenProgram

_TOLERANCE = 1e-4
"""Largest difference between the outputs of a program and of the model that it was traced from."""


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

    def forward(self, *inputs: Tensor) -> Any:
        if self.raw is not None:
            inputs = (self.raw(*inputs),)
        if self.prepare is not None:
            inputs = (self.prepare(*inputs),)
        outputs = self.model(*inputs)
        return outputs.softmax(dim=1) if self.probabilities else outputs


def for_deployment(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in evaluation mode."""
    return copy.deepcopy(model).cpu().eval()


def save_program(deployed: DeployedModel, example: tuple[Tensor, ...], path: Path, free: tuple[int, ...] = ()) -> None:
    """Trace a model with an example batch and write the program, which then takes batches of any size.

    ``free`` are other dimensions of the inputs that may have any length. The file is read back, and must give what the model
    gives.

    Formal guarantees: no value of the example is in the file; people take a batch of their training data.

    Raises:
        InputError: if the model cannot be traced.
        DPMicroAdamError: if the program gives something else than the model.
    """
    # A length of one would be taken for a constant.
    example = tuple(torch.cat([one, one]) if len(one) == 1 else one for one in example)
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(dict.fromkeys((0, *free), dynamic) for _ in example)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        try:
            program = torch.export.export(deployed, example, dynamic_shapes=(shapes,))
            program.example_inputs = None  # which would be saved beside the graph
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)  # names folders of this machine
            torch.export.save(program, path)
        except Exception as error:  # it raises almost anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"the model cannot be traced by torch.export ({reason}); leave the program out, or change the model"
            ) from error
        given, wanted = load_program(path, trust=True)(*example), deployed(*example)
    if not torch.allclose(given, wanted, rtol=0, atol=_TOLERANCE):
        raise DPMicroAdamError(f"the traced program in {path} gives other outputs than the model; leave the program out")


def load_program(path: Path, *, trust: bool = False) -> Callable[..., Any]:
    """The program in a file, as a function of raw inputs.

    With ``trust`` it is loaded by ``torch.export.load``, which runs whatever code the file holds; without, only operators that
    networks are made of are run (``aten_program.py``), and a file that needs more is refused.

    Raises:
        InputError: if it cannot be read.
    """
    if not trust:
        return AtenProgram(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.load(path).module()
        except Exception as error:
            raise InputError(
                f"{path} is not a program of torch.export that this torch reads ({type(error).__name__}); "
                "export it again with this version of torch"
            ) from None
    return torch.no_grad()(program)
