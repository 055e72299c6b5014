"""The folder of an exported model: weights, program, preprocessing and class names, model card, privacy statement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dp_microadam.durable_files import sync_folder, write_text_durably
from dp_microadam.errors import InputError

CONTRACT = "export.json"
PROGRAM = "model.pt2"
WEIGHTS, AVERAGED_WEIGHTS = "model.safetensors", "model_ema.safetensors"
CARD = "README.md"
_FORMAT = "dp-microadam export 1"


@dataclass(frozen=True)
class Contract:
    """What an exported model takes and returns, as data: ``export.json``."""

    name: str
    classes: tuple[str, ...]
    """Names of the outputs; empty if the outputs are not probabilities of classes."""
    input: Mapping[str, Any]
    """See :meth:`~dp_microadam.training.raw_inputs.RawInput.description`."""
    normalization: Mapping[str, Any] = field(default_factory=dict)
    weights: str = WEIGHTS
    program: str | None = PROGRAM

    def to_json(self) -> str:
        values = {
            "format": _FORMAT,
            "name": self.name,
            "weights": self.weights,
            "program": self.program,
            "input": dict(self.input),
            "normalization": dict(self.normalization),
            "output": "probabilities [B, classes]" if self.classes else "the model's outputs",
            "classes": list(self.classes),
        }
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Contract:
        """The contract of the export in ``folder``.

        Raises:
            InputError: if there is none.
        """
        try:
            values = json.loads((folder / CONTRACT).read_text(encoding="utf-8"))
            if values["program"] not in (None, PROGRAM):
                raise ValueError("a program elsewhere")
            return cls(
                values["name"],
                tuple(map(str, values["classes"])),
                dict(values["input"]),
                values["normalization"],
                values["weights"],
                values["program"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{folder / CONTRACT} cannot be read; name a folder that dp-microadam export has written"
            ) from None


def normalization_in_words(mean: tuple[float, ...], std: tuple[float, ...], *, pixels: bool) -> dict[str, Any]:
    """The constants by which inputs are normalized, for ``export.json``."""
    scale = 255 if pixels else 1
    formula = "input / 255" if pixels else "input"
    if mean or std:
        formula = f"({formula} - mean) / std"
    return {"formula": formula, "divided_by": scale, "mean": list(mean), "std": list(std)}


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name ``output`` when the block ends, and is removed if it fails.

    Raises:
        InputError: if ``output`` exists.
    """
    if output.exists():
        raise InputError(f"output is {str(output)!r}, which exists already; name a new folder")
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(output)
    sync_folder(output.parent)


def write_contract(contract: Contract, folder: Path) -> None:
    """Write ``export.json``."""
    write_text_durably(folder / CONTRACT, contract.to_json())


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict. Tensors that share memory are written separately, as ``load_state_dict`` expects them."""
    from safetensors.torch import save_file

    save_file({name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}, path)
