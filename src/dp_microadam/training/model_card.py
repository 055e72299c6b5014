"""The model card that goes with exported weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dp_microadam.training.raw_inputs import RawInput

if TYPE_CHECKING:
    from dp_microadam.training.export import Contract

CONTRACT = "export.json"
_SHOWN_CLASSES = 100
DIAGNOSTICS_NOTE = "Computed from privatized gradients alone, at no privacy cost."


def model_card(
    name: str,
    recipe_toml: str,
    statement: str,
    metrics: Mapping[str, Any],
    diagnostics: Mapping[str, Any] | None = None,
    loading: str = "",
    inputs: str = "",
) -> str:
    """A model card in Markdown: privacy statement, metrics, how to use the model, training recipe, how to load the weights.

    ``statement`` is the privacy statement of the run; it comes first and in full. ``metrics`` become a table, in which numbers
    under keys with "accuracy" are percentages. ``diagnostics``, a line of the run's metrics that contains diagnostics,
    becomes a table with a column per parameter group. ``loading`` is Python code that builds the model and
    loads the weights; ``inputs`` says what the model takes and returns, see :func:`input_section`.
    ``recipe_toml`` is empty for a run that was started from Python. The recipe's ``data_folder`` is left out, since it
    describes the machine and not the model.

    >>> card = model_card("demo", 'name = "demo"', "This model is (8, 1e-05)-private.", {"test_accuracy": 0.9312})
    >>> print("\\n".join(card.splitlines()[:5]))
    # demo
    <BLANKLINE>
    ## Privacy
    <BLANKLINE>
    This model is (8, 1e-05)-private.
    >>> "| test accuracy | 93.12 % |" in card
    True
    """
    sections = [
        f"# {_escaped(name)}",
        f"## Privacy\n\n{_without_html(statement.strip())}",
        f"## Evaluation\n\n{_table(metrics)}" if metrics else "",
        f"## Optimizer diagnostics\n\n{diagnostics_table(diagnostics)}" if diagnostics else "",
        f"## Inputs and outputs\n\n{inputs}" if inputs else "",
        f"## Training\n\n{_how_it_was_trained(recipe_toml)}:\n\n{_code('toml', _without_folder(recipe_toml))}"
        if recipe_toml
        else "",
        f"## Loading the weights\n\n{_how_to_load(loading)}" + (f"\n\n{_code('python', loading)}" if loading else ""),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def input_section(contract: Contract, raw: RawInput | None) -> str:
    """What an exported model takes and returns, in words and as code that needs torch and what reads a file.

    ``raw`` is None for inputs of which there are no files.
    """
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
        ]
        if raw is not None:
            lines += ["", "The same from the command line: `dp-microadam predict . FILE…`, with this folder for the dot."]
    return "\n".join(lines)


def _program_code(contract: Contract, raw: RawInput | None) -> str:
    reading, given = (raw.file_code, "raw") if raw is not None else ("raw = ...  # the tensors described above", "*raw")
    code = (
        f"import json\n\nimport torch\n{reading}\n\n"
        f'program = torch.export.load("{contract.program}").module()\n'
        f"with torch.no_grad():\n    outputs = program({given})\n"
    )
    if not contract.classes:
        return code + "print(outputs)"
    return code + (
        f'classes = json.load(open("{CONTRACT}", encoding="utf-8"))["classes"]\n'
        "print(classes[int(outputs[0].argmax())], float(outputs[0].max()))"
    )


def diagnostics_table(record: Mapping[str, Any]) -> str:
    """The diagnostics of one step (:mod:`dp_microadam.training.diagnostics`) as a Markdown table.

    >>> print(diagnostics_table({"step": 50, "diagnostics": [{"group": 0, "overlap": 0.25, "condition_holds": False}]}))
    | step 50 | group 0 |
    |---|---|
    | overlap | 0.25 |
    | condition holds | no |
    <BLANKLINE>
    Computed from privatized gradients alone, at no privacy cost.
    """
    header, rows = diagnostics_rows(record)
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join([*lines, "", DIAGNOSTICS_NOTE])


def diagnostics_rows(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of that table: a column per parameter group."""
    groups: Sequence[Mapping[str, Any]] = record["diagnostics"]
    header = [f"step {record['step']}", *(f"group {group['group']}" for group in groups)]
    keys = [key for key in groups[0] if key != "group"]
    return header, [[key.replace("_", " "), *(_figure(group[key]) for group in groups)] for key in keys]


def _figure(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(metrics: Mapping[str, Any]) -> str:
    rows = [f"| {_escaped(key.replace('_', ' '))} | {_escaped(_shown(key, value))} |" for key, value in metrics.items()]
    return "\n".join(
        [
            "| measure | value |",
            "|---|---|",
            *rows,
            "",
            "Measured on examples that were not used for training; these examples are not covered by the privacy guarantee.",
        ]
    )


def _shown(key: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{100 * value:.2f} %" if "accuracy" in key else f"{value:.4g}"
    return str(value)


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


def _without_folder(recipe_toml: str) -> str:
    return "\n".join(line for line in recipe_toml.strip().splitlines() if not line.startswith("data_folder"))


def _code(language: str, text: str) -> str:
    # A fence longer than any inside the text cannot be closed by it.
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
