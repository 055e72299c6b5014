"""Runs on the command line: opened again from their folder, and what is printed and kept of them at the end; tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.command_line.arguments import add_json

if TYPE_CHECKING:
    from dp_microadam.training.distributed import Ranks
    from dp_microadam.training.trainer import RunResult
    from dp_microadam.workbench.recipes.experiment import Experiment


INTERRUPTED = 130
"""Exit code of an interrupted run; 128 + SIGINT, as shells use it."""


def add_display(parser: argparse.ArgumentParser) -> None:
    """Add the options that control what a run prints."""
    add_json(parser)
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
    from dp_microadam.workbench.recipes import Recipe

    # With several processes, only the main one needs access to the folder.
    recipe = Recipe.from_toml(_config_of(run_dir) if ranks is None else ranks.from_main(lambda: _config_of(run_dir)))

    from dp_microadam.workbench.recipes.assemble import assemble

    return assemble(recipe, run_dir, show_progress=show_progress, show_private_metrics=show_private_metrics, ranks=ranks)


def _config_of(run_dir: Path) -> str:
    from dp_microadam.training.run_folder import CONFIG, never_trained

    config = run_dir / CONFIG
    if config.is_file():
        return config.read_text(encoding="utf-8")
    if never_trained(run_dir):
        raise InputError(
            f"run {str(run_dir)!r} was killed before its configuration was written; nothing was trained and no privacy was "
            f"spent: start it again with dp-microadam train RECIPE --run-dir {run_dir}"
        )
    raise InputError(
        f"run is {str(run_dir)!r}, which has no {CONFIG}: either it is not a run folder, or the run was started from "
        "Python, where it is resumed (trainer.resume(run).fit(data)) and its weights are saved (trainer.export, or "
        "save_model of a Hugging Face Trainer)"
    )


def finish(
    experiment: Experiment, options: argparse.Namespace, result: RunResult, chosen: Mapping[str, Any] | None = None
) -> int:
    """Evaluate a run, keep and print its figures, and write its report; returns the exit code.

    ``chosen`` are the hyperparameters of a run that a search chose.
    """
    main = experiment.trainer.ranks.main
    if main and not result.finished:
        print("evaluating these weights on the test part; press Ctrl-C to leave that out", file=sys.stderr)
    test = figures_of(experiment)
    final = experiment.final_weights_accuracy() if options.json else None
    if main:
        from dp_microadam.training.run_folder import TEST
        from dp_microadam.workbench.reporting.report import REPORT, write_report

        steps = {"updates": result.updates, "steps_done": result.steps_done}
        experiment.trainer.record.write_json(TEST, {**test, **steps})
        write_report([result.run_dir], result.run_dir / REPORT, files=False)
        ended = {"run_dir": str(result.run_dir), "finished": result.finished}
        further = {"final_weights_test_accuracy": final, "chosen": chosen and dict(chosen)}
        more = {name: value for name, value in further.items() if value is not None}
        say_figures(options, result, test, {**ended, **result.metrics, **more})
    return 0 if result.finished else INTERRUPTED


def figures_of(experiment: Experiment) -> dict[str, Any]:
    """What the test part says: accuracy, what to compare it with, the recall of each class; perplexity of a language model.

    Of users, how many examples they have is not told.
    """
    counts, weights = experiment.test_results()
    recipe, perplexity = experiment.recipe, experiment.perplexity()
    found: dict[str, Any] = {"test_accuracy": counts.accuracy, "weights": weights}
    if perplexity is not None:
        before = experiment.perplexity_before
        return {**found, "test_perplexity": perplexity, **({} if before is None else {"test_perplexity_before": before})}
    found["majority_accuracy"] = counts.majority
    found["recall"] = dict(zip(experiment.data.classes, counts.recalls, strict=True))
    return found if recipe.unit == "user" else {**found, "test_examples": sum(counts.examples)}


def say_figures(
    options: argparse.Namespace, result: RunResult, test: Mapping[str, Any], run: Mapping[str, Any] | None = None
) -> None:
    """Print the figures of a run, and of one that was just trained where it and its report are and how it goes on."""
    head = ledger_head(result)
    if options.json:
        spent = {"private": result.private, "epsilon": result.epsilon, "delta": result.delta, "ledger_head": head}
        steps = {"steps_done": result.steps_done, "updates": result.updates}
        print(json.dumps({**(run or {}), **test, **spent, **steps}, ensure_ascii=False))
        return
    if run is not None:
        print(f"run folder {result.run_dir}")
        if head is not None:
            print(f"ledger's last hash {head}")
        if "chosen" in run:
            print(f"chosen: {', '.join(f'{name} = {value}' for name, value in run['chosen'].items())}")
        if not result.finished:
            print(f"stopped after {result.steps_done} steps; go on with: dp-microadam resume {result.run_dir}")
    after = f" after {result.updates} steps" if run is None else ""
    print(f"evaluated with the {test['weights']}{lost_steps_note(result) or after}")
    if "test_perplexity" in test:
        before = test.get("test_perplexity_before")
        print(f"test perplexity {test['test_perplexity']:.2f}{'' if before is None else f' (before training {before:.2f})'}")
    print(f"test accuracy {100 * test['test_accuracy']:.2f} %")
    majority = test.get("majority_accuracy", -1)
    if test["test_accuracy"] <= majority:
        least = f"always naming the most frequent class, which has {100 * majority:.2f} %"
        print(f"no better than {least}", file=sys.stderr)
    print(privacy_line(result))
    if run is not None and (report := result.run_dir / "report.html").is_file():
        print(f"report {report}")


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


def say(options: argparse.Namespace, text: str) -> None:
    """Print a line for a human reader: on stderr with ``--json``, where stdout carries JSON alone."""
    print(text, file=sys.stderr if options.json else sys.stdout)


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *notes: str) -> None:
    """A table and the lines below it. Without names in the ``header`` all columns are on the left, else all but the first are
    on the right."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(header))
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number and name else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(escape(note), soft_wrap=True)
