"""Time and peak memory of a whole training step of each method on WRN-16-4, beside Opacus with Adam.

    python benchmarks/method_cost.py [--physical-batch 64] [--batch 4096] [--rounds 5] [--threads 2]
        [--device cuda] [--json] [--out FILE]

A step of the paper's size is batch/physical-batch passes over the network and once noise and optimizer. Both parts are timed
interleaved in one process, every round taking one of each method, and ratios to ordinary training with AdamW are taken
within a round. Peak memory is counted, not sampled: the most bytes that torch's allocator had given out at once during two
steps of one pass, in a fresh process per method, with model, gradients, optimizer, batch and the convolutions' scratch
space in it. It is the same every time; on a GPU ``torch.cuda.max_memory_allocated`` tells it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dp_microadam import ClippedGradients, GaussianMechanism
from dp_microadam.methods.registry import build
from dp_microadam.training.gradients import set_gradients
from dp_microadam.workbench.command_line.measuring import add_options, deliver, tell, wall_clock
from dp_microadam.workbench.models import wide_resnet

Batch = tuple[Tensor, Tensor]
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP-MicroAdam": ("dp-microadam", {}),
    "DP-MicroAdam, whole tensors, dense error": ("dp-microadam", {"scope": "tensor", "quantize": False}),
    "DP-SGD": ("dp-sgd", {}),
    "DP-Adam": ("dp-adam", {}),
    "DP-AdamBC": ("dp-adambc", {}),
    "Scale-then-privatize": ("scale-then-privatize", {}),
    "DP-BiTFiT": ("dp-bitfit", {}),
}
PLAIN, OPACUS = "AdamW, not private", "Opacus with Adam"
METHODS = (PLAIN, *OURS, OPACUS)


@dataclass
class Step:
    """What is done for every chunk, and what once per step."""

    chunk: Callable[[Batch], object]
    finish: Callable[[], object]


def losses(model: torch.nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(method: str, expected_batch: int, device: str) -> Step:
    torch.manual_seed(0)
    model = wide_resnet(16, 4).to(device)
    if method == PLAIN:
        return _plain(model)
    if method == OPACUS:
        return _opacus(model, expected_batch)
    return _ours(model, *OURS[method], expected_batch)


def _plain(model: torch.nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Step(lambda batch: losses(model, batch).mean().backward(), finish)


def _ours(model: torch.nn.Module, name: str, options: dict[str, Any], expected_batch: int) -> Step:
    method = build(name, model, 1e-3, options)
    [phase, *_] = method.phases(_plan(expected_batch))
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(phase.trainable is None or key in phase.trainable)
    engine = ClippedGradients(model, losses, max_grad_norm=1.0)
    mechanism = GaussianMechanism(5.0, engine.sensitivity, expected_batch)
    method.calibrate(mechanism.noise_deviation)
    method.enter(phase)
    steps = iter(range(10**9))

    def chunk(batch: Batch) -> None:
        engine.scale = method.scale()
        engine.accumulate(batch)

    def finish() -> None:
        means = method.receive(mechanism.privatize(engine.sums, step=next(steps)))
        engine.reset()
        set_gradients(model, means)
        method.optimizer.step()
        method.optimizer.zero_grad(set_to_none=True)

    return Step(chunk, finish)


def _plan(batch: int) -> Any:
    from dp_microadam.training.trainer import UnprotectedPlan

    return UnprotectedPlan(45_000, batch, 7227)


def _opacus(model: torch.nn.Module, expected_batch: int) -> Step:
    """Opacus' own wrapper and optimizer, with chunks accumulated as its BatchMemoryManager does."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    warnings.filterwarnings("ignore")
    wrapped = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.Adam(model.parameters()),
        noise_multiplier=5.0,
        max_grad_norm=1.0,
        expected_batch_size=expected_batch,
        loss_reduction="sum",
    )

    def chunk(batch: Batch) -> None:
        losses(wrapped, batch).sum().backward()
        optimizer.clip_and_accumulate()
        for parameter in model.parameters():
            parameter.grad_sample = parameter.grad = None

    def finish() -> None:
        optimizer.add_noise()
        optimizer.scale_grad()
        optimizer.original_optimizer.step()
        for parameter in model.parameters():
            parameter.summed_grad = parameter.grad = None

    return Step(chunk, finish)


def make_batch(size: int, device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(size, 3, 32, 32, generator=generator), torch.randint(10, (size,), generator=generator)
    return images.to(device), labels.to(device)


def measure_times(
    methods: list[str], physical: int, logical: int, rounds: int, device: str, show: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    batch = make_batch(physical, device)
    steps = {method: make(method, logical, device) for method in methods}
    seconds: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    for method in methods:  # independence checks and compilation
        tell(f"{method}: first steps")
        for _ in range(2):
            begin = wall_clock(device)
            steps[method].chunk(batch)
            steps[method].finish()
        show(f"{method:42} about {wall_clock(device) - begin:.2f} s for {physical} examples")
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for method in methods:
            begin = wall_clock(device)
            steps[method].chunk(batch)
            between = wall_clock(device)
            steps[method].finish()
            seconds[method].append((between - begin, wall_clock(device) - between))
    passes = logical / physical
    whole = {method: [passes * chunk + once for chunk, once in taken] for method, taken in seconds.items()}
    return {
        method: {
            "seconds_per_chunk": statistics.median(chunk for chunk, _ in seconds[method]),
            "seconds_once": statistics.median(once for _, once in seconds[method]),
            "seconds_per_step": statistics.median(whole[method]),
            "ratio": statistics.median(a / b for a, b in zip(whole[method], whole[methods[0]], strict=True)),
        }
        for method in methods
    }


def measure_peak_here(method: str, physical: int, device: str) -> float:
    """Most bytes in tensors at once during a step, model, gradients, optimizer and batch included."""
    if torch.device(device).type == "cuda":
        return _peak_on_gpu(method, physical, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step, batch = make(method, physical, device), make_batch(physical, device)
        step.chunk(batch)  # what is done once
        step.finish()
        begin = time.time_ns()
        for _ in range(2):
            step.chunk(batch)
            step.finish()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live, peak = 0, 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        if change.start_ns() >= begin:
            peak = max(peak, live)
    return peak


def _peak_on_gpu(method: str, physical: int, device: str) -> float:
    step, batch = make(method, physical, device), make_batch(physical, device)
    for round_number in range(3):
        if round_number == 1:  # what is done once is done
            torch.cuda.reset_peak_memory_stats(device)
        step.chunk(batch)
        step.finish()
    return torch.cuda.max_memory_allocated(device)


def measure_peak(method: str, options: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--peak-of", method, "--physical-batch", str(options.physical_batch)]
    command += ["--threads", str(options.threads), "--device", options.device]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--physical-batch", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--peaks-only", action="store_true", help="leave the times out")
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        print(measure_peak_here(options.peak_of, options.physical_batch, options.device))
        return
    times: dict[str, dict[str, float]] = {}
    if not options.peaks_only:
        show = tell if options.json else partial(print, flush=True)
        times = measure_times(options.methods, options.physical_batch, options.batch, options.rounds, options.device, show)
    tell("memory of each method, in a process of its own")
    rows = [{"method": m, **times.get(m, {}), "peak_bytes": measure_peak(m, options)} for m in options.methods]
    deliver(options, "method cost", {"batch": options.batch, "physical_batch": options.physical_batch, "methods": rows})
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        taken = ""
        if not options.peaks_only:
            taken = f"{row['seconds_per_step']:7.1f} s per step {row['ratio']:5.2f}×  "
            taken += f"chunk {1e3 * row['seconds_per_chunk']:6.0f} ms  once {1e3 * row['seconds_once']:5.0f} ms  "
        print(f"{row['method']:42} {taken}peak {row['peak_bytes'] / 1e6:6.0f} MB")


if __name__ == "__main__":
    main()
