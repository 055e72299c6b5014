"""Helpers shared by the commands that train, resume, evaluate and export runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import DPMicroAdamError, InputError

if TYPE_CHECKING:
    from dp_microadam.training.distributed import Ranks
    from dp_microadam.training.evaluation import ClassCounts
    from dp_microadam.training.trainer import RunResult
    from dp_microadam.workbench.recipes.experiment import Experiment


INTERRUPTED = 130
"""Exit code of an interrupted run; 128 + SIGINT, as shells use it."""


def add_display(parser: argparse.ArgumentParser) -> None:
    """Add the options that control what a run prints."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")
    parser.add_argument(
        "--show-private-metrics",
        action="store_true",
        help="also show loss and accuracy on training batches; these are NOT covered by the privacy guarantee",
    )


def open_run(
    run_dir: Path, show_progress: bool = False, show_private_metrics: bool = False, ranks: Ranks | None = None
) -> Experiment:
    """Rebuild the experiment of a run folder from its ``config.toml``.

    Raises:
        InputError: if ``run_dir`` is not a run folder.
    """
    from dp_microadam.workbench.recipes.recipe import Recipe

    # With several processes, only the main one needs access to the folder.
    recipe = Recipe.from_toml(_config_of(run_dir) if ranks is None else ranks.from_main(lambda: _config_of(run_dir)))

    from dp_microadam.workbench.recipes.assemble import assemble

    return assemble(recipe, run_dir, show_progress=show_progress, show_private_metrics=show_private_metrics, ranks=ranks)


def _config_of(run_dir: Path) -> str:
    from dp_microadam.training.run_folder import CONFIG, never_trained

    config = run_dir / CONFIG
    if not config.is_file() and never_trained(run_dir):
        raise InputError(
            f"run {str(run_dir)!r} was killed before its configuration was written; nothing was trained and no privacy was "
            f"spent: start it again with dp-microadam train RECIPE --run-dir {run_dir}"
        )
    if not config.is_file():
        raise InputError(
            f"run is {str(run_dir)!r}, which has no {CONFIG}: either it is not a run folder, or the run was started from "
            "Python, where it is resumed (trainer.resume(run).fit(data)) and its weights are saved (trainer.export, or "
            "save_model of a Hugging Face Trainer)"
        )
    return config.read_text(encoding="utf-8")


def is_run_from_python(run_dir: Path) -> bool:
    """Whether it is the folder of a run that was started from Python: it has a ledger and checkpoints, but no recipe."""
    from dp_microadam.ledger.ledger import LEDGER_NAME
    from dp_microadam.training.run_folder import CONFIG, never_trained

    return (run_dir / LEDGER_NAME).is_file() and not (run_dir / CONFIG).is_file() and not never_trained(run_dir)


def train(experiment: Experiment, options: argparse.Namespace) -> int:
    """Train, draw the learning curves, print and save the test accuracy; returns the exit code."""
    return finish(experiment, options, experiment.fit())


def finish(experiment: Experiment, options: argparse.Namespace, result: RunResult, **chosen: dict[str, Any]) -> int:
    """Draw the learning curves, print and save the test accuracy; returns the exit code."""
    if experiment.trainer.ranks.main:
        _draw(experiment, options, result)
    counts, weights, language = conclude(experiment, options, result, **chosen)
    if experiment.trainer.ranks.main:
        _save_test_results(experiment, counts, weights, result, language)
    return 0 if result.finished else INTERRUPTED


def conclude(
    experiment: Experiment, options: argparse.Namespace, result: RunResult, chosen: dict[str, Any] | None = None
) -> tuple[ClassCounts, str, dict[str, Any]]:
    """Print run folder, test accuracy and ε. Returns right predictions by class, which weights made them, and language metrics.

    ``chosen`` are the hyperparameters of a run that a search chose.
    """
    if not result.finished and experiment.trainer.ranks.main:
        print("evaluating these weights on the test part; press Ctrl-C to leave that out", file=sys.stderr)
    counts, weights = experiment.test_results()
    accuracy, language = counts.accuracy, language_metrics(experiment)
    final = experiment.final_weights_accuracy() if options.json else None
    if not experiment.trainer.ranks.main:
        return counts, weights, language
    head = ledger_head(result)
    if options.json:
        print(
            json.dumps(
                {
                    "run_dir": str(result.run_dir),
                    "finished": result.finished,
                    "private": result.private,
                    "test_accuracy": accuracy,
                    **language,
                    **({} if final is None else {"final_weights_test_accuracy": final}),
                    "epsilon": result.epsilon,
                    "delta": result.delta,
                    "steps_done": result.steps_done,
                    "updates": result.updates,
                    "ledger_head": head,
                    **result.metrics,
                    **({} if chosen is None else {"chosen": chosen}),
                }
            )
        )
        return counts, weights, language
    print(f"run folder {result.run_dir}")
    if head is not None:
        print(f"ledger's last hash {head}")
    if chosen is not None:
        print(f"chosen: {', '.join(f'{name} = {value}' for name, value in chosen.items())}")
    if not result.finished:
        print(f"stopped after {result.steps_done} steps; go on with: dp-microadam resume {result.run_dir}")
    print(f"evaluated with the {weights}{lost_steps_note(result)}")
    print_language(language)
    print(f"test accuracy {100 * accuracy:.2f} %")
    if accuracy <= counts.majority and not experiment.recipe.predicts_tokens:
        least = f"always naming the most frequent class, which has {100 * counts.majority:.2f} %"
        print(f"no better than {least}", file=sys.stderr)
    print(privacy_line(result))
    return counts, weights, language


def _save_test_results(
    experiment: Experiment, counts: ClassCounts, weights: str, result: RunResult, language: Mapping[str, Any]
) -> None:
    """Write accuracy and recall on the test set into the run folder, for reports."""
    from dp_microadam.training.run_folder import TEST

    experiment.trainer.record.write_json(
        TEST,
        {
            "test_accuracy": counts.accuracy,
            "weights": weights,
            "updates": result.updates,
            "steps_done": result.steps_done,
            **class_figures(experiment, counts),
            **_number_of_examples(experiment, counts),
            **language,
        },
    )


def class_figures(experiment: Experiment, counts: ClassCounts) -> dict[str, Any]:
    """What accuracy is to be compared with, and the recall of each class; nothing for a language model, which has none."""
    if experiment.recipe.predicts_tokens:
        return {}
    recalls = dict(zip(experiment.data.classes, counts.recalls, strict=True))
    return {"majority_accuracy": counts.majority, "recall": recalls}


def _number_of_examples(experiment: Experiment, counts: ClassCounts) -> dict[str, int]:
    """Of users, how many examples they have is not told; a language model counts tokens."""
    if experiment.recipe.unit == "user" or experiment.recipe.predicts_tokens:
        return {}
    return {"test_examples": sum(counts.examples)}


def language_metrics(experiment: Experiment) -> dict[str, Any]:
    """Perplexity and a sample of a language model, after training and before it if it was trained here; else empty."""
    before, after = experiment.language_before, experiment.language_figures()
    return {**({} if after is None else after.as_metrics()), **({} if before is None else before.as_metrics("_before"))}


def print_language(language: Mapping[str, Any]) -> None:
    """Print what :func:`language_metrics` found."""
    if not language:
        return
    for when in ("_before", ""):
        if f"sample{when}" in language:
            print(f"sample {when.removeprefix('_') or 'after'} training: {language[f'sample{when}']}")
    before = language.get("test_perplexity_before")
    print(f"test perplexity {language['test_perplexity']:.2f}{'' if before is None else f' (before training {before:.2f})'}")


def lost_steps_note(result: RunResult) -> str:
    """A note for weights that lack the last recorded steps, after a kill or while another process still trains; or empty."""
    lost = result.steps_done - result.updates
    return f" after {result.updates} steps; {lost} more steps were spent and are not in these weights" if lost else ""


def ledger_head(result: RunResult) -> str | None:
    """The current last hash of the run's ledger, to be stored elsewhere; None for runs without clipping and noise."""
    if result.epsilon is None:
        return None
    from dp_microadam.ledger.ledger import read_ledger

    return read_ledger(result.run_dir).head


def privacy_line(result: RunResult) -> str:
    """The final (ε, δ) of a run in one line, or why it is not private."""
    if result.epsilon is None:
        return "not private: trained without clipping and noise"
    from dp_microadam.ledger.ledger import read_ledger
    from dp_microadam.ledger.statement import round_up

    record = read_ledger(result.run_dir)
    name = record.settings.unit_name
    whom = f" for a {name}" if name else ""
    if record.plan.unit == "user":
        whom = f" for a {name or 'user'} with all their examples"
    line = f"ε = {round_up(result.epsilon)}{whom} at δ = {result.delta:g}"
    return line if result.private else f"not private (fixed seed); the same run without a seed would spend {line}"


def _draw(experiment: Experiment, options: argparse.Namespace, result: RunResult) -> None:
    from dp_microadam.training.run_folder import CURVES
    from dp_microadam.workbench.reporting.run_figures import draw_curves

    metrics = experiment.trainer.record.metrics()
    if not metrics:
        return
    try:
        draw_curves(metrics, result.run_dir / CURVES, title=experiment.recipe.name, private=result.private)
    except DPMicroAdamError as error:
        say(options, f"{CURVES} was not drawn: {error}")


def say(options: argparse.Namespace, text: str) -> None:
    """Print a line for a human reader: on stderr with ``--json``, where stdout carries JSON alone."""
    print(text, file=sys.stderr if options.json else sys.stdout)
