"""Which part of a pretrained model to train: all of it, its biases, adapters (LoRA) or its head; accuracy, time and memory.

    python -m research.measurements.finetune_parts cifar10 --pretrained FILE --data DIR [--examples 12000 3000] [--parts head]
        [--out FILE]
    python -m research.measurements.finetune_parts imdb --pretrained DIR --data DIR

The tasks are those of tasks.py. DP-Walk trains a head, biases and adapters at
its default distance, all weights at 0.5 (docs/choosing.md says why), each part in a process of its own, whose largest resident
set is its memory. Times are processor time. The head trains on features that are computed once; `features_seconds` is what that
took, or what finding kept ones took. The head gets features of a fixed norm, whatever trains, and the average of the weights is
evaluated. `--tokens` and `--resolution` make texts shorter and images smaller.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from dp_microadam import PerformanceSettings, PrivacyPlan, PrivateTrainer, RecordSettings, methods
from dp_microadam.plan.learning_rate import ADAPTER_DISTANCE, DISTANCE
from dp_microadam.training.evaluation import evaluate
from dp_microadam.training.frozen_features import FrozenFeatures
from research.measurements.tasks import TASKS, Task, hits
from research.measuring import add_options, deliver, tell, work_clock

DELTA = 1e-5
DISTANCES = {"all": 0.5, "biases": DISTANCE, "lora": ADAPTER_DISTANCE, "head": DISTANCE}


def task_of(options: argparse.Namespace, part: str) -> Task:
    """The task with the model of which this part trains, and texts or images of the size that was asked for."""
    sizes = {name: getattr(options, name) for name in ("tokens", "resolution") if getattr(options, name) is not None}
    return TASKS[options.task](options.pretrained, options.data, tuple(options.examples), part, **sizes)


def run(task: Task, part: str, epsilon: float, options: argparse.Namespace) -> dict[str, Any]:
    """One private run, and what it cost."""
    model, loss, prepare = task.model, task.loss, task.prepare
    measure: Any = hits
    train, test, begin = task.train, task.test, work_clock("cpu")
    if part == "head":
        features = FrozenFeatures(model, task.head, loss, prepare=prepare, physical_batch_size=32)
        train, test = features.of(train, test)
        loss, measure, prepare = features.on(loss), features.on(measure), None
    computed = work_clock("cpu") - begin
    plan = PrivacyPlan.solve(
        dataset_size=task.size, batch_size=options.batch, delta=DELTA, epsilon=epsilon, steps=options.steps
    )
    times: list[float] = []

    def note(_: Any) -> None:
        times.append(work_clock("cpu"))
        if len(times) == 2:
            tell(f"{part}, ε = {epsilon:g}: {times[1] - times[0]:.1f} s of processor per step, {options.steps} steps")

    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model,
            methods.dp_walk(model, distance=options.distance or DISTANCES[part]),
            plan,
            loss,
            prepare=prepare,
            run_dir=Path(folder) / "run",
            callbacks=[note],
            performance=PerformanceSettings(physical_batch_size=32),
            record=RecordSettings(show_progress=False),
        )
        trainer.fit(train)
    peak = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before the evaluation
    assert trainer.average is not None, "dp-walk keeps one"
    with trainer.average.in_place_of(model):
        found = evaluate(model, test, {"accuracy": measure}, prepare=prepare or (lambda rows: rows), batch_size=64)
    return {
        "part": part,
        "epsilon": epsilon,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "accuracy": found["accuracy"],
        "features_seconds": computed,
        "seconds_per_step": (times[-1] - times[0]) / max(1, len(times) - 1),
        "peak_bytes": peak,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--pretrained", default="")
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--examples", nargs=2, type=int, default=(12_000, 3_000), metavar=("TRAIN", "TEST"))
    parser.add_argument("--parts", nargs="+", choices=DISTANCES, default=list(DISTANCES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="one run with each of these seeds")
    parser.add_argument("--distance", type=float, help="that the noise walks, in place of each part's own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--resolution", type=int)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.one:
        for epsilon, seed in itertools.product(options.epsilons, options.seed):
            torch.manual_seed(seed)
            found = run(task_of(options, options.parts[0]), options.parts[0], epsilon, options)
            print(json.dumps({"seed": seed, **found}), flush=True)
        return
    results = []
    for part in options.parts:
        print(part, file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "research.measurements.finetune_parts", *sys.argv[1:], "--one", "--parts", part]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                results.append(json.loads(line))
                print(line, end="", file=sys.stderr, flush=True)
        if process.returncode:
            sys.exit(process.returncode)
    names = ("task", "examples", "steps", "batch", "tokens", "resolution", "distance")
    settings = {name: getattr(options, name) for name in names}
    deliver(options, "parts of a model", {**settings, "runs": results})


if __name__ == "__main__":
    main()
