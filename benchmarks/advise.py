"""Is the proposal of ``plan --advise`` as good as the best of a grid? Batch sizes over a fixed number of processed examples.

    python benchmarks/advise.py [--data digits table fashion-mnist] [--batches 64 128 256 512 1024] [--examples 128000]
        [--epsilon 3] [--repeats 1] [--set KEY=VALUE] [--data-folder DIR] [--json] [--out FILE]

Every batch size has as many steps as the examples allow, at most 5,000, and automatic bands. The table is 12,000 rows that
scikit-learn's make_classification draws; digits and Fashion-MNIST have the network of the recipes. Accuracies are those on the
test part, of private runs, each drawn anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import make_classification

from dp_microadam.plan.advice import MOST_STEPS
from dp_microadam.workbench.command_line.measuring import add_options, deliver, tell
from dp_microadam.workbench.data.dataset import LabelledData
from dp_microadam.workbench.recipes.advice import with_advice
from dp_microadam.workbench.recipes.assemble import assemble, load_data, model_of, number_of_units, trainable_parameters
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import load_recipe

DATA = ("digits", "table", "fashion-mnist")


def recipe_for(data: str, folder: Path, options: argparse.Namespace) -> Recipe:
    """The recipe of a data set, with the examples that all steps together may process."""
    own = {
        "digits": [],
        "fashion-mnist": ["data=fashion-mnist", f"data_folder={options.data_folder}"],
        "table": ["data=table", f"data_folder={folder / 'table.npz'}", "model=mlp", "data_options.classes=5"],
    }[data]
    setting = [
        "batch_size=64",
        f"steps={max(1, options.examples // 64)}",
        f"epsilon={options.epsilon}",
        "evaluate_every=100000",
    ]
    return load_recipe("demo", [*own, *setting, *options.overrides])


def accuracies(recipe: Recipe, data: LabelledData, repeats: int) -> list[float]:
    """The test accuracies of so many runs, in percent."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            experiment = assemble(recipe, Path(folder) / "run", data=data, show_progress=False)
            experiment.fit()
            found.append(100 * experiment.test_accuracy()[0])
    return found


def compare(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracies over the grid of batch sizes, and the batch size that is proposed."""
    recipe = recipe_for(name, folder, options)
    data = load_data(recipe)
    size = number_of_units(recipe, data)
    _, _, taken = with_advice(recipe, size, trainable_parameters(model_of(recipe, data)))
    sizes = sorted({taken.batch_size, *(batch for batch in options.batches if batch <= size // 2)})
    grid: dict[int, list[float]] = {}
    for batch_size in sizes:
        steps = max(1, min(MOST_STEPS, options.examples // batch_size))
        tell(f"{name}, batches of {batch_size}: {steps} steps, {options.repeats} times")
        grid[batch_size] = accuracies(replace(recipe, batch_size=batch_size, steps=steps), data, options.repeats)
        print(f"{name}, batches of {batch_size}, {steps} steps: {statistics.median(grid[batch_size]):.2f} %", flush=True)
    best = max(grid, key=lambda batch_size: statistics.median(grid[batch_size]))
    behind = statistics.median(grid[best]) - statistics.median(grid[taken.batch_size])
    print(f"{name}: proposed {taken.batch_size}, best {best}; the proposal is {behind:.2f} points behind", flush=True)
    return {"data": name, "proposed": taken.batch_size, "best": best, "behind": behind, "accuracies": grid}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128, 256, 512, 1024])
    parser.add_argument("--examples", type=int, default=128_000, help="processed by all steps of a run together")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--data-folder", default="", help="folder of Fashion-MNIST")
    parser.add_argument("--json", action="store_true", help="print JSON at the end")
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        inputs, labels = make_classification(
            12_000, 30, n_informative=12, n_classes=5, n_clusters_per_class=2, class_sep=1.5, random_state=0
        )
        np.savez(Path(folder) / "table.npz", inputs=inputs.astype(np.float32), label=labels)
        results = [compare(name, Path(folder), options) for name in options.data]
    if options.json:
        print(json.dumps(results))
    deliver(options, "advise", results)


if __name__ == "__main__":
    main()
