"""``dp-microadam predict``: classes and probabilities of files, by a run or an exported model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.command_line.arguments import add_run
from dp_microadam.workbench.command_line.running import open_run


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "predict",
        help="classes and probabilities of files, by a run or an exported model",
        description="The most likely class of each image file, row of a CSV file, array or text, with its probability. Texts "
        "are lines of a file or of standard input (-), or a column of CSV files and JSON lines. An exported model needs "
        "neither the training data nor the recipe.",
        epilog="examples:\n  dp-microadam predict photos-model photo.jpg scan.png\n"
        "  dp-microadam predict runs/mine rows.csv --json\n  echo 'Free entry!' | dp-microadam predict spam-filter -",
    )
    add_run(parser, "model", help="run folder, or a folder that export has written")
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="image, CSV, .npy or text files, or folders of them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else, with the probability of every class")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run whatever code the program of an exported model holds; only if you trust its author with this machine",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    predict, source, classes = _opened(options.model, options.trust)
    found: list[dict[str, Any]] = []
    unread = 0
    for file in _files(options.files, source.endings):
        try:
            for name, one in source.read(file):
                line = _line(name, predict(one)[0].tolist(), classes)
                found.append(line)
                if not options.json:
                    said = f"{line['class']}\t{line['probability']:.4f}" if classes else f"{line['outputs']}"
                    print(f"{name}\t{said}")
        except InputError as error:
            unread += 1
            print(f"dp-microadam: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
    return 2 if unread else 0


def _line(name: str, outputs: list[float], classes: tuple[str, ...]) -> dict[str, Any]:
    if not classes:
        return {"file": name, "outputs": outputs}
    best = max(range(len(outputs)), key=outputs.__getitem__)
    probabilities = dict(zip(classes, outputs, strict=True))
    return {"file": name, "class": classes[best], "probability": outputs[best], "probabilities": probabilities}


def _opened(folder: Path, trust: bool) -> tuple[Callable[..., Any], Any, tuple[str, ...]]:
    """The function of raw inputs, how files are read for it, and the names of its classes."""
    if not folder.exists():
        raise InputError(f"model is {str(folder)!r}, which does not exist; name a run folder, or one that export has written")

    from dp_microadam.training.export import CONTRACT, Contract

    if (folder / CONTRACT).is_file():
        from dp_microadam.workbench.command_line.programs import load_program
        from dp_microadam.workbench.data.raw import raw_input

        contract = Contract.read(folder)
        if contract.program is None:
            raise InputError(f"{folder} has weights without a program; it must be exported from Python with program=True")
        raw = raw_input(contract.input)
        return load_program(folder / contract.program, trust=trust), raw, contract.classes
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):  # as transformers and peft write
        from dp_microadam.workbench.recipes.texts import TextClassifier

        texts = TextClassifier.of_export(folder)
        return texts, texts, texts.classes
    import torch

    from dp_microadam.workbench.recipes.texts import TextClassifier

    experiment = open_run(folder)
    experiment.trainer.peek()
    if experiment.data.tokens:
        texts = TextClassifier.of_run(experiment)
        return texts, texts, texts.classes
    deployment = experiment.deployment()
    deployed = deployment.deployed(experiment.best_model())
    return torch.no_grad()(deployed), deployment.raw, deployment.classes


def _files(given: list[Path], endings: tuple[str, ...]) -> Iterator[Path]:
    """The files, and of folders those that are told by their names to be such files."""
    for path in given:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("[!.]*") if file.name.lower().endswith(endings) and file.is_file())
            if not inside:
                raise InputError(f"{path} holds no file that ends in {', '.join(endings)}; name others")
            yield from inside
        else:
            yield path
