"""What several processes cost: weak scaling of WRN-16-4 from 1 to 2 processes of one thread each, traffic, and a projection.

    python benchmarks/distributed.py [--batch 64] [--physical-batch 32] [--steps 3] [--rounds 3] [--device cuda] [--json]
        [--out FILE] [--picture PNG]

Weak scaling: each process has the same number of examples per step (``--batch``, all of its part, so that sizes do not vary),
and a step of two processes should take hardly longer than one of one. Whole steps of the real trainer are timed: sampling,
clipping, noise, ledger, reduction, optimizer. Rounds of one and two processes alternate; medians are reported, of the wall
clock and of processor time beside it: on a machine that does other things too, only the second is to be trusted, and it does
not see waiting.

With ``--device cuda`` each process has a GPU of its own; it takes two. Traffic between GPUs does not pass the loopback.

Traffic is what the loopback's own counter says. What every process does beside its examples (noise, optimizer, messages,
ledger) is timed alone; the projection adds it up for more processes than there are here, by the assumptions it prints.
"""

from __future__ import annotations

import argparse
import json
import math
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
from torch import distributed as dist

from dp_microadam import GaussianMechanism, MicroAdam, PrivacyLedger, PrivacyPlan, PrivateTrainer, Randomness
from dp_microadam.ledger.ledger import RunSettings
from dp_microadam.training.distributed import Ranks, TorchRanks, checksum
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.command_line.measuring import add_options, deliver, seconds, tell, wall_clock
from dp_microadam.workbench.models import wide_resnet

ASSUMED = {
    "private images/s of NF-ResNet-50 per GPU": 400.0,
    "useful FLOP/s per GPU for transformers": 120e12,
    "cost of clipping, times a plain step": 1.2,
    "bytes/s between GPUs, each way": 20e9,
    "seconds per hop of a reduction": 10e-6,
    "seconds per hop of a message on the CPU": 100e-6,
    "cores that draw noise, per GPU": 8,
    "bytes/s from CPU to GPU": 20e9,
    "bytes/s of GPU memory": 1.5e12,
}
MODELS = {
    # parameters, expected batch, seconds a GPU needs per example
    "NF-ResNet-50, 25.6 M parameters, batch 16,384": (25.6e6, 16_384, 1 / ASSUMED["private images/s of NF-ResNet-50 per GPU"]),
    "1 B parameters, batch 4096 of 512 tokens": (
        1e9,
        4096,
        ASSUMED["cost of clipping, times a plain step"] * 6 * 1e9 * 512 / ASSUMED["useful FLOP/s per GPU for transformers"],
    ),
}
SIZES = (1, 8, 64, 512)


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
        ranks = TorchRanks()
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
        physical_batch_size=physical_batch,
        run_dir=folder / "run",
        show_progress=False,
        checkpoint_every=10**6,
        callbacks=[lambda report: marks.append((wall_clock(device), time.process_time(), loopback_bytes()))],
        ranks=ranks,
    )
    trainer.fit((images, labels))
    return {"steps": [[b - a for a, b in zip(one, other, strict=True)] for one, other in pairwise(marks)]}


def alone(rounds: int, device: str) -> dict[str, float]:
    """Seconds of what a process does beside its examples, on one thread."""
    torch.manual_seed(0)
    model = wide_resnet(depth=16, width=4).to(device)
    size = sum(param.numel() for param in model.parameters())
    sums = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    mechanism = GaussianMechanism(1.0, 1.0, 64, randomness=Randomness.from_entropy())
    optimizer = MicroAdam(model.parameters())
    plan = PrivacyPlan.solve(dataset_size=1000, batch_size=10, delta=1e-5, noise_multiplier=1.0, steps=10_000)
    settings = RunSettings(private=True, randomness="", sensitivity=1.0)
    step = iter(range(10**6))

    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder, PrivacyLedger.create(folder, plan, settings) as ledger:
        found = {
            "noise, per number": [
                seconds(lambda: mechanism.add_noise(sums, step=next(step)), device) / size for _ in range(rounds)
            ],
            "checksum of weights, per number (every 100th step)": [
                seconds(lambda: [checksum(param) for param in model.parameters()], device) / size for _ in range(rounds)
            ],
            "MicroAdam, per parameter": [seconds(optimizer.step, device) / size for _ in range(rounds)],
            "ledger, per step (wall clock)": [seconds(ledger.record_step, device, wall_clock) for _ in range(rounds)],
        }
    # The least, because other work on the machine can only add.
    return {name: min(values) for name, values in found.items()}


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


def measure(options: argparse.Namespace, by_itself: dict[str, float]) -> dict[str, Any]:
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
        "alone": by_itself,
    }


def project(alone: dict[str, float]) -> dict[str, dict[int, dict[str, float]]]:
    """Seconds of the parts of a step, by model and number of GPUs, from what was measured and ASSUMED."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, (parameters, batch, per_example) in MODELS.items():
        found[name] = {}
        for size in SIZES:
            hops = math.ceil(math.log2(size)) if size > 1 else 0
            # Each process draws the noise of its own slice, on its own cores.
            drawn = parameters / size * alone["noise, per number"] / ASSUMED["cores that draw noise, per GPU"]
            found[name][size] = {
                "forward, backward, clipping": batch / size * per_example,
                "waiting for the largest part": _largest_of(size) * math.sqrt(batch / size) * per_example,
                "noise": drawn + 4 * parameters / size / ASSUMED["bytes/s from CPU to GPU"],
                "reduction": 2 * (size - 1) / size * 4 * parameters / ASSUMED["bytes/s between GPUs, each way"]
                + 2 * (size - 1) * ASSUMED["seconds per hop of a reduction"],
                # About 20 bytes are read and written per parameter: weights, gradient, state, average.
                "optimizer, average": 20 * parameters / ASSUMED["bytes/s of GPU memory"],
                "messages, ledger": alone["ledger, per step (wall clock)"]
                + 5 * 2 * hops * ASSUMED["seconds per hop of a message on the CPU"],
            }
    return found


def _largest_of(size: int) -> float:
    """About how many deviations the largest of ``size`` Poisson samples lies above their mean (Blom 1958)."""
    return statistics.NormalDist().inv_cdf((size - 0.375) / (size + 0.25)) if size > 1 else 0.0


def show(report: dict[str, Any]) -> None:
    print()
    for name, value in report.items():
        print(f"{name}: {value}")
    print(f"traffic over the gradient's size: {report['bytes sent per process and step'] / report['bytes of a gradient']:.2f}")


def show_projection(projected: dict[str, dict[int, dict[str, float]]]) -> None:
    print("projection, assuming " + ", ".join(f"{name} {value:g}" for name, value in ASSUMED.items()))
    for model, sizes in projected.items():
        names = list(next(iter(sizes.values())))
        print(f"\n{model}\n\n| GPUs | " + " | ".join(names) + " | step | efficiency |")
        print("|" + "---|" * (len(names) + 3))
        whole = sum(sizes[1].values())
        for size, parts in sizes.items():
            total = sum(parts.values())
            cells = " | ".join(f"{1000 * seconds:,.0f} ms" for seconds in parts.values())
            print(f"| {size} | {cells} | {1000 * total:,.0f} ms | {100 * whole / size / total:.0f} % |")
        parameters = MODELS[model][0]
        # Weights, clipped sums, noisy gradient and weight average in float32; MicroAdam's state.
        print(
            f"\nper GPU {17 * parameters / 1e9:.1f} GB beside activations, hosts {4 * parameters / 1e9:.1f} GB of noise in all"
        )
        sent = ", ".join(f"{size}: {2 * (size - 1) / size * 4 * parameters / 1e9:.2f}" for size in sizes)
        print(f"GB sent per GPU and step, by GPUs: {sent}", flush=True)


def draw(projected: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(projected), figsize=(10, 3.6))
    for axes, (model, sizes) in zip(panels, projected.items(), strict=True):
        labels = [str(size) for size in sizes]
        bottom = [0.0] * len(labels)
        for part in next(iter(sizes.values())):
            shares = [100 * parts[part] / sum(parts.values()) for parts in sizes.values()]
            axes.bar(labels, shares, bottom=bottom, label=part)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
        for place, parts in enumerate(sizes.values()):
            axes.text(place, 102, f"{sum(parts.values()):.3g} s", ha="center", fontsize=8)
        axes.set_ylim(0, 112)
        axes.set_xlabel("GPUs")
        axes.set_title(model, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of a step (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=6, fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="examples per process and step")
    parser.add_argument("--physical-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path)
    add_options(parser)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(train(options.worker, options.batch, options.physical_batch, options.steps, options.device)))
        return
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error("--device is cuda, but there are fewer than two GPUs; use --device cpu")
    torch.set_num_threads(1)
    tell("noise, optimizer and ledger of one process")
    by_itself = alone(5 * options.rounds, options.device)
    projected = project(by_itself)
    if not options.json:
        show_projection(projected)
    tell(f"now {options.rounds} rounds of one process and of two")
    report = measure(options, by_itself)
    deliver(options, "distributed", {**report, "assumed": ASSUMED, "projected": projected})
    if options.json:
        print(json.dumps({**report, "assumed": ASSUMED, "projected": projected}))
    else:
        show(report)
    if options.picture:
        draw(projected, options.picture)


if __name__ == "__main__":
    main()
