"""``dp-microadam evaluate`` and ``export``: what a run's weights are worth, and the weights themselves."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from dp_microadam.commands.train import open_run, privacy_line
from dp_microadam.errors import InputError


def add_arguments(subparsers: Any) -> None:
    evaluate = subparsers.add_parser("evaluate", help="accuracy of a run's newest weights on the test set")
    evaluate.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    evaluate.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    evaluate.set_defaults(run=run_evaluate)
    export = subparsers.add_parser(
        "export", help="write a run's weights as safetensors, with a model card and the privacy statement"
    )
    export.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    export.add_argument("--output", type=Path, help="folder to write (default: RUN/export)")
    export.set_defaults(run=run_export)


def run_evaluate(options: argparse.Namespace) -> int:
    experiment = open_run(options.run_dir)
    result = experiment.trainer.peek()
    accuracy, weights = experiment.test_accuracy()
    if options.json:
        values = {"test_accuracy": accuracy, "weights": weights, "steps_done": result.steps_done}
        print(json.dumps({**values, "private": result.private, "epsilon": result.epsilon, "delta": result.delta}))
        return 0
    print(f"evaluated with the {weights} after {result.steps_done} steps")
    print(f"test accuracy {100 * accuracy:.2f} %")
    print(privacy_line(result))
    return 0


def run_export(options: argparse.Namespace) -> int:
    from dp_microadam.reporting.model_card import model_card
    from dp_microadam.training.export import save_weights
    from dp_microadam.training.run_folder import PRIVACY, STATEMENT

    output: Path = options.output or options.run_dir / "export"
    if output.exists():
        raise InputError(f"output is {str(output)!r}, which exists already; name a new folder")
    experiment = open_run(options.run_dir)
    result = experiment.trainer.peek()
    accuracy, weights = experiment.test_accuracy()
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_weights(experiment.model.state_dict(), unfinished / "model.safetensors")
    if experiment.trainer.average is not None:
        save_weights(experiment.trainer.average.state_dict(), unfinished / "model_ema.safetensors")
    statement = (options.run_dir / STATEMENT).read_text(encoding="utf-8")
    metrics = {"test accuracy": f"{100 * accuracy:.2f} % ({weights})", "steps": result.steps_done}
    card = model_card(experiment.recipe.name, experiment.recipe.to_toml(), statement, metrics)
    (unfinished / "README.md").write_text(card, encoding="utf-8")
    shutil.copyfile(options.run_dir / PRIVACY, unfinished / PRIVACY)
    unfinished.rename(output)
    print(f"exported to {output}")
    print(privacy_line(result))
    return 0
