"""What several processes cost: weak scaling of WRN-16-4 from 1 to 2 processes of one thread each, and traffic.

    python benchmarks/distributed.py [--batch 64] [--physical-batch 32] [--steps 3] [--rounds 3] [--device cuda] [--json]
        [--out FILE]

Weak scaling: each process has the same number of examples per step (``--batch``, all of its part, so that sizes do not vary),
and a step of two processes should take hardly longer than one of one. Whole steps of the real trainer are timed: sampling,
clipping, noise, ledger, reduction, optimizer. Rounds of one and two processes alternate; medians are reported, of the wall
clock and of processor time beside it: on a machine that does other things too, only the second is to be trusted, and it does
not see waiting.

With ``--device cuda`` each process has a GPU of its own; it takes two. Traffic between GPUs does not pass the loopback.

Traffic is what the loopback's own counter says.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measuring import add_options, deliver, tell, wall_clock
from torch import distributed as dist

from dp_microadam import MicroAdam, PerformanceSettings, PrivacyPlan, PrivateTrainer, RecordSettings
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.models import wide_resnet


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    raise SystemExit("no loopback interface")


def train(folder: Path, batch: int, physical_batch: int, steps: int, device: str) -> dict[str, Any]:
    """Train for ``steps`` after one that does not count; seconds, processor seconds and loopback bytes of each."""
    ranks: Ranks = Ranks()
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        ranks = Ranks.of_torch()
    torch.manual_seed(0)
    count = batch * ranks.world_size
    images, labels = torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))
    plan = PrivacyPlan.solve(dataset_size=count, batch_size=count, delta=1e-5, noise_multiplier=5.0, steps=steps + 1)
    model = wide_resnet(depth=16, width=4).to(device)
    marks: list[tuple[float, float, int]] = []
    trainer = PrivateTrainer(
        model,
        MicroAdam(model.parameters()),
        plan,
        class_loss,
        run_dir=folder / "run",
        callbacks=[lambda report: marks.append((wall_clock(device), time.process_time(), loopback_bytes()))],
        ranks=ranks,
        performance=PerformanceSettings(physical_batch_size=physical_batch),
        record=RecordSettings(show_progress=False, checkpoint_every=10**6),
    )
    trainer.fit((images, labels))
    return {"steps": [[b - a for a, b in zip(one, other, strict=True)] for one, other in pairwise(marks)]}


def run_group(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        arguments = [
            f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("batch", "physical-batch", "steps", "device")
        ]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments, "--worker", folder],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
        ]
        answers = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("a process failed")
        return [json.loads(answer) for answer in answers]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    times: dict[int, list[list[float]]] = {1: [], 2: []}
    processor: dict[int, list[float]] = {1: [], 2: []}
    traffic = []
    for number in range(options.rounds):
        for size in (1, 2):
            answers = run_group(size, options)
            times[size].append([step[0] for step in answers[0]["steps"]])
            processor[size] += [step[1] for answer in answers for step in answer["steps"]]
            traffic += [step[2] / size for step in answers[0]["steps"]] if size == 2 else []
            shown = [f"{step[0]:.2f} ({step[1]:.2f})" for answer in answers for step in answer["steps"]]
            tell(f"round {number + 1}, {size}: {', '.join(shown)} s of wall clock (processor)")
    wall = {size: statistics.median(second for run in runs for second in run) for size, runs in times.items()}
    used = {size: statistics.median(values) for size, values in processor.items()}
    gradient = 4 * sum(param.numel() for param in wide_resnet(depth=16, width=4).parameters())
    return {
        "batch per process": options.batch,
        "load average": os.getloadavg()[0],
        "wall seconds per step": wall,
        "efficiency by the wall clock": wall[1] / wall[2],
        "processor seconds per step and process": used,
        "efficiency by processor time": used[1] / used[2],
        "bytes sent per process and step": statistics.median(traffic),
        "bytes of a gradient": gradient,
    }


def show(report: dict[str, Any]) -> None:
    print()
    for name, value in report.items():
        print(f"{name}: {value}")
    print(f"traffic over the gradient's size: {report['bytes sent per process and step'] / report['bytes of a gradient']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="examples per process and step")
    parser.add_argument("--physical-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(train(options.worker, options.batch, options.physical_batch, options.steps, options.device)))
        return
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error("--device is cuda, but there are fewer than two GPUs; use --device cpu")
    torch.set_num_threads(1)
    report = measure(options)
    deliver(options, "distributed", report)
    if options.json:
        print(json.dumps(report))
    else:
        show(report)


if __name__ == "__main__":
    main()
