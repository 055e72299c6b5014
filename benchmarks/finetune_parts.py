"""Which part of a pretrained model to train: all of it, its biases, adapters (LoRA) or its head; accuracy, time and memory.

    python benchmarks/finetune_parts.py cifar10 --pretrained FILE --data DIR [--examples 12000 3000] [--parts head] [--out FILE]
    python benchmarks/finetune_parts.py imdb --pretrained DIR --data DIR

The tasks are those of frozen_features.py. Everything is trained by DP-Adam, each in a process of its own, whose largest
resident set is its memory. The head trains on features that are computed once; `features_seconds` is what that took, or what
finding kept ones took. Rates were not tuned.
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
from frozen_features import DELTA, TASKS, Task, hits
from torch import nn

from dp_microadam import FrozenFeatures, PrivacyPlan, PrivateTrainer, methods
from dp_microadam.apps.experiments.measuring import add_options, deliver, work_clock
from dp_microadam.training.evaluation import evaluate

RATES = {"all": 5e-4, "biases": 2e-3, "lora": 2e-3, "head": 3e-3}
ADAPTED = ["q_proj", "v_proj", "query", "value", "0"]  # ViT, BERT, the made-up network


def choose(model: nn.Module, part: str) -> nn.Module:
    """The model of which only this part trains."""
    if part == "head":
        return model
    if part == "lora":
        from peft import LoraConfig, get_peft_model

        present = [name for name in ADAPTED if any(one.split(".")[-1] == name for one, _ in model.named_modules())]
        head = [name for name, module in model.named_modules() if name and all(p.requires_grad for p in module.parameters())]
        return get_peft_model(model, LoraConfig(r=8, target_modules=present, modules_to_save=[head[-1]]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part == "all" or parameter.requires_grad or name.endswith("bias"))
    return model


def run(task: Task, part: str, epsilon: float, steps: int, batch: int) -> dict[str, Any]:
    """One private run, and what it cost."""
    model, loss, measure, prepare = choose(task.model, part), task.loss, hits, task.prepare
    train, test, begin = task.train, task.test, work_clock("cpu")
    if part == "head":
        features = FrozenFeatures(model, loss, prepare=prepare, physical_batch_size=32)
        train, test = features.of(train, test)
        loss, measure, prepare = features.on(loss), features.on(measure), None
    computed = work_clock("cpu") - begin
    plan = PrivacyPlan.solve(
        dataset_size=task.size, batch_size=batch, delta=DELTA, epsilon=epsilon, steps=steps, accountant="pld"
    )
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model,
            methods.dp_adam(model, lr=RATES[part]),
            plan,
            loss,
            prepare=prepare,
            physical_batch_size=32,
            run_dir=Path(folder) / "run",
            callbacks=[lambda report: times.append(work_clock("cpu"))],
            show_progress=False,
        )
        trainer.fit(train)
    peak = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before the evaluation
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
    parser.add_argument("--parts", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.one:
        torch.manual_seed(0)
        task = TASKS[options.task](options.pretrained, options.data, tuple(options.examples))
        print(json.dumps(run(task, options.parts[0], options.epsilons[0], options.steps, options.batch)))
        return
    results = []
    for part, epsilon, seed in itertools.product(options.parts, options.epsilons, range(options.seeds)):
        print(f"{part} at ε = {epsilon:g}, seed {seed}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, options.task, "--pretrained", options.pretrained, "--data", str(options.data)]
        command += ["--examples", *map(str, options.examples), "--parts", part, "--epsilons", str(epsilon), "--one"]
        command += ["--steps", str(options.steps), "--batch", str(options.batch), "--threads", str(options.threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append({"seed": seed, **json.loads(done.stdout.splitlines()[-1])})
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    deliver(options, "parts of a model", {"task": options.task, "examples": list(options.examples), "runs": results})


if __name__ == "__main__":
    main()
