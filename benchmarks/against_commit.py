"""Processor time of clipping and of a whole private step, beside another commit: ``python benchmarks/against_commit.py REV``.

Both trees run in fresh processes that alternate, so that a busy machine disturbs both alike; medians are reported. The C
library is told to keep freed memory: whether it hands it back after a pass depends on what a process allocated before, and
2,000 page faults more or less per pass are 3 to 10 % of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000"}

MEASURED = """
import json, tempfile, time
import torch
from torch import nn
from dp_microadam import ClippedGradients, MicroAdam, PrivacyPlan, PrivateTrainer
from dp_microadam.workbench import models

torch.set_num_threads(1)
torch.manual_seed(0)
found = {}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def clipped(name, model, shape, size, repetitions):
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    batch = torch.rand(size, *shape), torch.randint(0, 10, (size,))
    seconds = []
    for _ in range(repetitions):
        begun = time.thread_time()
        engine.accumulate(batch)
        engine.reset()
        seconds.append(time.thread_time() - begun)
    found[f"clipped gradients, {name}, batch {size}"] = sorted(seconds)[repetitions // 2]


clipped("784-128-10", nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.Tanh(), nn.Linear(128, 10)), (1, 28, 28), 64, 40)
clipped("WRN-10-1", models.wide_resnet(depth=10, width=1), (3, 32, 32), 16, 12)
model, marks = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10)), []
PrivateTrainer(
    model, MicroAdam(model.parameters()), PrivacyPlan(2000, 64, 1.0, 200, 1e-5), loss, run_dir=tempfile.mkdtemp() + "/run",
    show_progress=False, checkpoint_every=1000, checkpoint_minutes=100.0,
    callbacks=[lambda report: marks.append(time.process_time())],
).fit((torch.rand(2000, 1, 28, 28), torch.randint(0, 10, (2000,))))
steps = sorted(after - before for before, after in zip(marks[20:], marks[21:]))
found["whole step, 784-64-10, batch 64"] = steps[len(steps) // 2]
print(json.dumps(found))
"""


def measure(tree: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", **KEEP_MEMORY}
    done = subprocess.run([sys.executable, "-c", MEASURED], env=environment, capture_output=True, text=True, check=True)
    values: dict[str, float] = json.loads(done.stdout)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="the commit to compare with, such as HEAD~1")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", before, options.revision], cwd=ROOT, check=True)
        try:
            rounds = []
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
                rounds.append((measure(before), measure(ROOT)))
                if number == 0:
                    show(rounds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    show(rounds)


def show(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    print(f"median of {len(rounds)} rounds" if len(rounds) > 1 else "one round", flush=True)
    for name in rounds[0][0]:
        old, new = (statistics.median(pair[side][name] for pair in rounds) for side in (0, 1))
        print(f"{name:42} {1e3 * old:8.2f} ms before  {1e3 * new:8.2f} ms now  {new / old:.2f}×")


if __name__ == "__main__":
    main()
