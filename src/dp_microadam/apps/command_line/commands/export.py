"""``dp-microadam export``: weights that plain PyTorch loads, with a model card and the privacy statement."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dp_microadam.apps.command_line.commands.running import language_metrics, ledger_head, open_run, privacy_line
from dp_microadam.apps.command_line.completers import complete_with, run_folders
from dp_microadam.durable_files import sync_folder, write_text_durably
from dp_microadam.errors import InputError

if TYPE_CHECKING:
    from dp_microadam.apps.recipes.assemble import Experiment


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a run's weights as safetensors, with a model card and the privacy statement",
        description="Write a run's weights as safetensors, with a model card that says how to load them and the privacy "
        "statement.",
        epilog="example:\n  dp-microadam export runs/mine --output digits-model",
    )
    complete_with(run_folders, parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder"))
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: RUN/export)")
    parser.add_argument("--adapters", action="store_true", help="of a model trained with LoRA, write the adapters alone")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.apps.reporting.model_card import loading_code, model_card
    from dp_microadam.privacy.statement import STATEMENT_NAME
    from dp_microadam.training.export import save_weights

    output: Path = options.output or options.run_dir / "export"
    if output.exists():
        raise InputError(f"output is {str(output)!r}, which exists already; name a new folder")
    experiment = open_run(options.run_dir)
    if options.adapters and not experiment.recipe.model_options.get("lora_rank"):
        raise InputError("--adapters is given, but the run was trained without LoRA; leave it out to export the whole model")
    result = experiment.trainer.peek()
    accuracy, weights = experiment.test_accuracy()
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    code = _save_text_model(experiment, unfinished, adapters_alone=options.adapters)
    if code is None:
        save_weights(experiment.model.state_dict(), unfinished / "model.safetensors")
        if experiment.trainer.average is not None:
            save_weights(experiment.trainer.average.state_dict(), unfinished / "model_ema.safetensors")
    # Anew from the ledger: what is published must not claim less than was spent.
    experiment.trainer.write_privacy(unfinished)
    statement = (unfinished / STATEMENT_NAME).read_text(encoding="utf-8")
    metrics = {"test accuracy": f"{100 * accuracy:.2f} % ({weights})", **language_metrics(experiment), "steps": result.updates}
    if result.updates < result.steps_done:
        metrics["steps spent that are not in the weights"] = result.steps_done - result.updates
    measured = [line for line in experiment.trainer.record.metrics() if "diagnostics" in line]
    diagnostics = measured[-1] if measured else None
    recipe, data = experiment.recipe, experiment.data
    best = "model.safetensors" if experiment.trainer.average is None else "model_ema.safetensors"
    code = code or loading_code(
        recipe.model, recipe.model_options, data.num_classes, data.example_shape, best, (data.mean, data.std)
    )
    card = model_card(recipe.name, recipe.to_toml(), statement, metrics, diagnostics, code)
    write_text_durably(unfinished / "README.md", card)
    unfinished.rename(output)
    sync_folder(output.parent)
    print(f"exported to {output}")
    if (head := ledger_head(result)) is not None:
        print(f"ledger's last hash {head}")
    print(privacy_line(result))
    return 0


def _save_text_model(experiment: Experiment, folder: Path, *, adapters_alone: bool) -> str | None:
    """Write a text model the way ``transformers`` does, and return the code that loads it; None for other models."""
    from dp_microadam.apps.recipes.texts import class_names_of, encoder_of
    from dp_microadam.models.hugging_face import TextModel
    from dp_microadam.models.text_export import save_text_model, text_loading_code

    recipe, model = experiment.recipe, experiment.model
    if not isinstance(model, TextModel):
        return None
    encoder = encoder_of(recipe)
    with experiment.best_weights():
        save_text_model(model, encoder, folder, classes=class_names_of(recipe), adapters_alone=adapters_alone)
    kind = "AutoModelForCausalLM" if recipe.predicts_tokens else "AutoModelForSequenceClassification"
    return text_loading_code(kind, recipe.model_options["pretrained"], encoder.max_length, adapters_alone=adapters_alone)
