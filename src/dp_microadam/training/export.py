"""Writes a trained model as a folder that can be published and deployed.

It has weights, a program, what the program takes and returns, a model card and the privacy statement.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dp_microadam.durable_files import sync_folder, write_text_durably
from dp_microadam.errors import InputError
from dp_microadam.ledger.statement import STATEMENT_NAME, statement_in_words, write_privacy_report
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.program import DeployedModel, RawInput, for_deployment, save_program
from dp_microadam.training.run_folder import CHECKPOINTS, privacy_of, read_metrics

if TYPE_CHECKING:
    from dp_microadam.training.trainer import PrivateTrainer

CONTRACT, CARD, PROGRAM = "export.json", "README.md", "model.pt2"
WEIGHTS, AVERAGED_WEIGHTS = "model.safetensors", "model_ema.safetensors"
_FORMAT = "dp-microadam export 1"
_SHOWN_CLASSES = 100


@dataclass(frozen=True)
class Contract:
    """What an exported model takes and returns, as data: ``export.json``."""

    name: str
    classes: tuple[str, ...]
    """Names of the outputs; empty if the outputs are not probabilities of classes."""
    input: Mapping[str, Any]
    """See :meth:`~dp_microadam.training.program.RawInput.description`."""
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
    formula = "input / 255" if pixels else "input"
    if mean or std:
        formula = f"({formula} - mean) / std"
    return {"formula": formula, "divided_by": 255 if pixels else 1, "mean": list(mean), "std": list(std)}


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

    raw: RawInput
    prepare: Callable[[Tensor], Tensor] | None = None
    """What follows: raw inputs to inputs of the model, such as normalization."""
    classes: tuple[str, ...] = ()
    normalization: Mapping[str, Any] = field(default_factory=dict)
    """What ``prepare`` does, as data."""

    def deployed(self, model: torch.nn.Module) -> DeployedModel:
        """A copy of the model, with its current weights, that takes raw inputs."""
        return DeployedModel(for_deployment(model), self.raw.module(), self.prepare, probabilities=bool(self.classes))


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
        deployment.raw.description(),
        deployment.normalization,
        WEIGHTS if average is None else AVERAGED_WEIGHTS,
        PROGRAM if program else None,
    )
    with new_folder(output) as folder:
        with trainer.method.last_weights(trainer.model):
            save_weights(trainer.model.state_dict(), folder / WEIGHTS)
        with trainer.method.averaged(trainer.model):
            if average is not None:  # of trained parameters alone; the file has the frozen ones and the buffers too
                save_weights(trainer.model.state_dict(), folder / AVERAGED_WEIGHTS)
            deployed = deployment.deployed(trainer.model) if program else None
        if deployed is not None:
            save_program(deployed, deployment.raw.example(), folder / PROGRAM, deployment.raw.free)
        write_text_durably(folder / CONTRACT, contract.to_json())
        # Anew from the ledger: what is published must not claim less than was spent.
        trainer.step.write_privacy(folder, group_size)
        statement = (folder / STATEMENT_NAME).read_text(encoding="utf-8")
        inputs = input_section(contract, deployment.raw)
        write_text_durably(folder / CARD, model_card(name, recipe_toml, statement, metrics, loading, inputs))
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
        if (average := content["method"]["average"]) is not None:
            for name, value in average.items():  # in place, so that a shared parameter is averaged under all its names
                content["model"][name].copy_(value)
            save_weights(content["model"], folder / AVERAGED_WEIGHTS)
        write_privacy_report(folder, report, statement)
        lines = read_metrics(run_dir)
        measured = {key: value for key, value in (lines[-1] if lines else {}).items() if "validation" in key}
        write_text_durably(folder / CARD, model_card(run_dir.name, "", statement, {**measured, "steps": content["updates"]}))


def model_card(
    name: str, recipe_toml: str, statement: str, metrics: Mapping[str, Any], loading: str = "", inputs: str = ""
) -> str:
    """A model card in Markdown: privacy statement, metrics, how to use the model, training recipe, how to load the weights.

    ``statement``, the privacy statement of the run, comes first and in full. Numbers under keys with "accuracy" are shown as
    percentages. ``recipe_toml`` is empty for a run that was started from Python; its ``data_folder`` is left out, since it
    describes the machine. ``loading`` is Python code that builds the model and loads the weights; ``inputs`` says what the
    model takes and returns, see :func:`input_section`.

    >>> card = model_card("demo", 'name = "demo"', "This model is (8, 1e-05)-private.", {"test_accuracy": 0.9312})
    >>> "| test accuracy | 93.12 % |" in card
    True
    """
    recipe = "\n".join(line for line in recipe_toml.strip().splitlines() if not line.startswith("data_folder"))
    sections = [f"# {_escaped(name)}", f"## Privacy\n\n{_without_html(statement.strip())}"]
    if metrics:
        sections.append(f"## Evaluation\n\n{_table(metrics)}")
    if inputs:
        sections.append(f"## Inputs and outputs\n\n{inputs}")
    if recipe:
        sections.append(f"## Training\n\n{_how_it_was_trained(recipe)}:\n\n{_code('toml', recipe)}")
    sections.append(f"## Loading the weights\n\n{_how_to_load(loading)}")
    if loading:
        sections.append(_code("python", loading))
    return "\n\n".join(sections) + "\n"


def input_section(contract: Contract, raw: RawInput) -> str:
    """What an exported model takes and returns, in words and as code that needs torch and what reads a file."""
    constants = contract.normalization
    lines = [f"`{CONTRACT}` has all of this as data.", "", f"- Input: {_without_html(contract.input['in_words'])}."]
    if constants:
        numbers = "".join(f", {key} = {constants[key]}" for key in ("mean", "std") if constants[key])
        inside = " inside the program; do it yourself only if you use the weights alone" if contract.program else ""
        lines.append(f"- Normalization: {constants['formula']}{numbers}{inside}.")
    if contract.classes:
        more = ", …" if len(contract.classes) > _SHOWN_CLASSES else ""
        shown = ", ".join(map(_escaped, contract.classes[:_SHOWN_CLASSES])) + more
        lines.append(f"- Output: the probability of each of {len(contract.classes)} classes, in this order: {shown}.")
    if contract.program is not None:
        lines += [
            "",
            f"`{contract.program}` is the whole model as a program of `torch.export`. It takes this input, prepares it as in "
            "training and returns the output, on the CPU, and needs torch alone. torch runs whatever code such a file holds, "
            "so load it only if you trust its author; `dp-microadam predict` runs operators of networks and nothing else:",
            "",
            _code("python", _program_code(contract, raw)),
            "",
            "The same from the command line: `dp-microadam predict . FILE…`, with this folder for the dot.",
        ]
    return "\n".join(lines)


def _program_code(contract: Contract, raw: RawInput) -> str:
    code = (
        f"import json\n\nimport torch\n{raw.file_code}\n\n"
        f'program = torch.export.load("{contract.program}").module()\n'
        f"with torch.no_grad():\n    outputs = program(raw)\n"
    )
    if not contract.classes:
        return code + "print(outputs)"
    return code + (
        f'classes = json.load(open("{CONTRACT}", encoding="utf-8"))["classes"]\n'
        "print(classes[int(outputs[0].argmax())], float(outputs[0].max()))"
    )


def _table(metrics: Mapping[str, Any]) -> str:
    lines = ["| measure | value |", "|---|---|"]
    for key, value in metrics.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        if isinstance(value, float) and "accuracy" in key:
            shown = f"{100 * value:.2f} %"
        lines.append(f"| {_escaped(key.replace('_', ' '))} | {_escaped(shown)} |")
    said = "Measured on examples that were not used for training; these examples are not covered by the privacy guarantee."
    return "\n".join([*lines, "", said])


def _escaped(text: str) -> str:
    """A name as text of one line, in which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_~\[\]<>|#&])", r"\\\1", " ".join(text.split()))


def _without_html(text: str) -> str:
    """Text of several lines with names in it: no tags, no links and no code, and line breaks as they are."""
    return re.sub(r"([\\`\[\]<])", r"\\\1", text)


def _how_it_was_trained(recipe_toml: str) -> str:
    if re.search(r"^\[tune\]", recipe_toml, re.MULTILINE) is None:
        return "`dp-microadam train` with this recipe"
    return (
        "`dp-microadam tune`: the best of a random number of runs, chosen by a score on held-out examples; ε covers the "
        "choice. The recipe, with the values that were chosen"
    )


def _how_to_load(loading: str) -> str:
    if "from_pretrained" in loading:
        return "This folder is one of Hugging Face's `transformers`; run this in it."
    return (
        "The weights are safetensors files; `safetensors.torch.load_file` reads one as a state dict for `load_state_dict` of "
        "the same PyTorch model."
    )


def _code(language: str, text: str) -> str:
    # A fence longer than any inside the text cannot be closed by it.
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
