"""``dp-microadam export``: a folder to publish and deploy: weights, program, preprocessing, model card, privacy statement."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer
from dp_microadam.workbench.command_line.arguments import add_group_size, add_run
from dp_microadam.workbench.command_line.running import figures_of, ledger_head, open_run, privacy_line

if TYPE_CHECKING:
    from dp_microadam.training.trainer import RunResult

_SHOWN_CLASSES = 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a run's model for deployment: weights, program, preprocessing, model card and privacy statement",
        description="Write a run's model into a new folder: weights as safetensors; the whole model as a program of "
        "torch.export that takes raw inputs; what it takes and the names of its classes as JSON; a model card; the "
        "privacy statement.",
        epilog="example:\n  dp-microadam export runs/mine --output digits-model",
    )
    add_run(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: RUN/export)")
    add_group_size(parser)
    parser.add_argument("--adapters", action="store_true", help="of a text model trained with LoRA, write the adapters alone")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.ledger.ledger import LEDGER_NAME
    from dp_microadam.training.run_folder import CONFIG, never_trained

    require_integer("group_size", options.group_size, 1)
    output: Path = options.output or options.run_dir / "export"
    if output.exists():
        raise InputError(f"output is {str(output)!r}, which exists already; name a new folder")
    has_ledger, has_recipe = ((options.run_dir / name).is_file() for name in (LEDGER_NAME, CONFIG))
    if has_ledger and not has_recipe and not never_trained(options.run_dir):
        return _export_run_from_python(options.run_dir, output, options.group_size)

    from dp_microadam.training.export import AVERAGED_WEIGHTS, PROGRAM, WEIGHTS, export_run
    from dp_microadam.workbench.command_line.programs import load_program
    from dp_microadam.workbench.recipes.experiment import loading_code
    from dp_microadam.workbench.recipes.texts import export_texts

    experiment = open_run(options.run_dir)
    recipe, data, trainer = experiment.recipe, experiment.data, experiment.trainer
    if options.adapters and not (data.tokens and recipe.model_options.get("lora_rank")):
        raise InputError("--adapters is given, but the run is no text model with LoRA; leave it out to export the whole model")
    result = trainer.peek()
    metrics = _in_words(figures_of(experiment), result)
    if data.tokens:
        export_texts(experiment, output, metrics, adapters_alone=options.adapters, group_size=options.group_size)
        return _conclude(output, result)
    best = WEIGHTS if trainer.average is None else AVERAGED_WEIGHTS
    code = loading_code(recipe, data, best)

    def check(folder: Path) -> str:
        count, largest = experiment.largest_difference(load_program(folder / PROGRAM))
        within = f"within {largest:.1g}" if largest else "to the bit"
        return f"program checked on {count} test examples: its probabilities are those of evaluate, {within}"

    checked = export_run(
        trainer,
        output,
        experiment.deployment(),
        name=recipe.name,
        metrics=metrics,
        recipe_toml=recipe.to_toml(),
        loading=code,
        check=check,
        group_size=options.group_size,
    )
    return _conclude(output, result, checked)


def _conclude(output: Path, result: RunResult, *lines: str | None) -> int:
    print("\n".join([f"exported to {output}", *filter(None, lines)]))
    if (head := ledger_head(result)) is not None:
        print(f"ledger's last hash {head}")
    print(privacy_line(result))
    return 0


def _in_words(test: dict[str, Any], result: RunResult) -> dict[str, Any]:
    """The figures of the model card; of many classes, the recall of the worst ones."""
    found: dict[str, Any] = {"test accuracy": f"{100 * test['test_accuracy']:.2f} % ({test['weights']})"}
    if "majority_accuracy" in test:
        found["accuracy of always naming the most frequent class"] = test["majority_accuracy"]
        known = [(name, recall) for name, recall in test["recall"].items() if recall is not None]
        shown = known if len(known) <= _SHOWN_CLASSES else sorted(known, key=lambda one: one[1])[:_SHOWN_CLASSES]
        found |= {f"recall of {name}": f"{100 * recall:.1f} %" for name, recall in shown}
    found |= {"test_perplexity": test["test_perplexity"]} if "test_perplexity" in test else {}
    found["steps"] = result.updates
    if result.updates < result.steps_done:
        found["steps spent that are not in the weights"] = result.steps_done - result.updates
    return found


def _export_run_from_python(run_dir: Path, output: Path, group_size: int) -> int:
    from dp_microadam.ledger.ledger import read_ledger
    from dp_microadam.training.export import export_folder

    export_folder(run_dir, output, group_size)
    print(f"exported to {output}: weights, model card and privacy statement")
    print(
        "without a program: the run was started from Python, and its model is there: trainer.export(folder, example) writes one"
    )
    print(f"ledger's last hash {read_ledger(run_dir).head}")
    return 0
