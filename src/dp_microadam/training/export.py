"""Writes a trained model as a folder that can be published and deployed.

It has weights, a program, what the program takes and returns, a model card and the privacy statement.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dp_microadam.durable_files import sync_folder, write_text_durably
from dp_microadam.errors import InputError
from dp_microadam.ledger.statement import STATEMENT_NAME, statement_in_words, write_privacy_report
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.model_card import CONTRACT, input_section, model_card
from dp_microadam.training.program import DeployedModel, for_deployment, save_program
from dp_microadam.training.raw_inputs import RawInput, RawTensor
from dp_microadam.training.run_folder import CHECKPOINTS, privacy_of, read_metrics

if TYPE_CHECKING:
    from dp_microadam.training.trainer import PrivateTrainer

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
        output = "probabilities [B, classes]" if self.classes else "the model's outputs"
        return json.dumps({"format": _FORMAT, **asdict(self), "output": output}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Contract:
        """The contract of the export in ``folder``.

        Raises:
            InputError: if there is none.
        """
        try:
            values = json.loads((folder / CONTRACT).read_text(encoding="utf-8"))
            if values.pop("format") != _FORMAT or values["program"] not in (None, PROGRAM):
                raise ValueError("a program elsewhere")
            values.pop("output")
            return cls(**{**values, "classes": tuple(map(str, values["classes"])), "input": dict(values["input"])})
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


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict. Tensors that share memory are written separately, as ``load_state_dict`` expects them."""
    from safetensors.torch import save_file

    save_file({name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}, path)


@dataclass(frozen=True)
class Deployment:
    """How a model is used: what it takes, how that is prepared, and what its outputs are called."""

    raw: RawInput | tuple[Tensor, ...]
    """The raw input; or example tensors that the model takes, with examples along the first dimension."""
    prepare: Callable[[Tensor], Tensor] | None = None
    """What follows: raw inputs to inputs of the model, such as normalization."""
    classes: tuple[str, ...] = ()
    normalization: Mapping[str, Any] = field(default_factory=dict)
    """What ``prepare`` does, as data."""

    @classmethod
    def of(
        cls, raw: RawInput | Tensor | tuple[Tensor, ...], prepare: Callable[[Tensor], Tensor] | None, classes: Sequence[str]
    ) -> Deployment:
        """A deployment as the caller describes it.

        Raises:
            InputError: if ``raw`` has no examples.
        """
        given = (raw,) if isinstance(raw, Tensor) else raw
        if not isinstance(given, RawInput) and not (given and all(isinstance(one, Tensor) and one.dim() for one in given)):
            raise InputError(f"raw is a {type(raw).__name__}; it must be a RawInput, or tensors with examples in dimension 0")
        return cls(given, prepare, tuple(str(name) for name in classes))

    @property
    def readable(self) -> RawInput | None:
        """The raw input if files of it can be read; None for several tensors."""
        if isinstance(self.raw, RawInput):
            return self.raw
        if len(self.raw) > 1:
            return None
        return RawTensor(tuple(self.raw[0].shape[1:]), str(self.raw[0].dtype).removeprefix("torch."))

    @property
    def example(self) -> tuple[Tensor, ...]:
        return (self.raw.example(),) if isinstance(self.raw, RawInput) else tuple(one.detach().cpu() for one in self.raw)

    def description(self) -> dict[str, Any]:
        """The input as JSON."""
        if self.readable is not None:
            return self.readable.description()
        tensors = [{"shape": list(one.shape[1:]), "dtype": str(one.dtype).removeprefix("torch.")} for one in self.example]
        words = " and ".join(f"{one['dtype']} tensor {['B', *one['shape']]}".replace("'", "") for one in tensors)
        return {"kind": "tensors", "tensors": tensors, "in_words": words}

    def deployed(self, model: torch.nn.Module) -> DeployedModel:
        """A copy of the model, with its current weights, that takes raw inputs."""
        module = self.raw.module() if isinstance(self.raw, RawInput) else None
        return DeployedModel(for_deployment(model), module, self.prepare, probabilities=bool(self.classes))


def export_run(
    trainer: PrivateTrainer,
    output: Path,
    deployment: Deployment,
    *,
    name: str,
    metrics: Mapping[str, Any],
    recipe_toml: str = "",
    loading: str = "",
    program: bool = True,
    check: Callable[[Path], str | None] | None = None,
    group_size: int = 1,
) -> str | None:
    """Write weights, program, ``export.json``, model card and privacy statement of a trainer's model into a new folder.

    Averaged weights, if there are any, are those of the program. ``check`` is called with the unfinished folder; what it
    returns is returned. With a ``group_size`` the statement also has ε for a group.

    Raises:
        InputError: if ``output`` exists, or the model cannot be traced.
    """
    average = trainer.average
    contract = Contract(
        name,
        deployment.classes,
        deployment.description(),
        deployment.normalization,
        WEIGHTS if average is None else AVERAGED_WEIGHTS,
        PROGRAM if program else None,
    )
    with new_folder(output) as folder:
        save_weights(trainer.model.state_dict(), folder / WEIGHTS)
        if average is not None:
            save_weights(average.state_dict(), folder / AVERAGED_WEIGHTS)
        if program:
            with nullcontext() if average is None else average.in_place_of(trainer.model):
                deployed = deployment.deployed(trainer.model)
            raw = deployment.raw
            save_program(deployed, deployment.example, folder / PROGRAM, raw.free if isinstance(raw, RawInput) else ())
        write_text_durably(folder / CONTRACT, contract.to_json())
        # Anew from the ledger: what is published must not claim less than was spent.
        trainer.write_privacy(folder, group_size)
        statement = (folder / STATEMENT_NAME).read_text(encoding="utf-8")
        measured = [line for line in trainer.record.metrics() if "diagnostics" in line]
        card = model_card(
            name,
            recipe_toml,
            statement,
            metrics,
            measured[-1] if measured else None,
            loading,
            input_section(contract, deployment.readable),
        )
        write_text_durably(folder / CARD, card)
        return check(folder) if check is not None else None


def export_folder(run_dir: Path, output: Path, group_size: int = 1) -> None:
    """Write weights, model card and privacy statement of a run that was started from Python, without its model.

    Raises:
        InputError: if ``output`` exists, or the run has no ledger.
    """
    _, content, _ = CheckpointFolder(run_dir / CHECKPOINTS).newest()
    report = privacy_of(run_dir, group_size)
    statement = statement_in_words(report)
    with new_folder(output) as folder:
        save_weights(content["model"], folder / WEIGHTS)
        if "average" in content:
            save_weights(content["average"], folder / AVERAGED_WEIGHTS)
        write_privacy_report(folder, report, statement)
        lines = [line for line in read_metrics(run_dir) if "diagnostics" not in line]
        measured = {key: value for key, value in (lines[-1] if lines else {}).items() if "validation" in key}
        write_text_durably(folder / CARD, model_card(run_dir.name, "", statement, {**measured, "steps": content["updates"]}))
