"""State, scratch memory and time of MicroAdam beside AdamW, on the parameter shapes of three models.

    python benchmarks/optimizer.py [--models wrn-16-4 vit-tiny bert-base] [--optimizers NAME …] [--rounds 15] [--json]

Times are medians over rounds in which all optimizers take turns, so that a noisy machine disturbs them alike; the ratios are
what to read; torchao compiles for minutes first. Scratch memory is the peak of resident memory during one step above what was
resident before it, measured in a process of its own per optimizer. Install with ``pip install 'dp-microadam[bench]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from dp_microadam import MicroAdam

Shapes = list[tuple[int, ...]]


def wrn_16_4() -> Shapes:
    """Wide-ResNet-16-4 for 10 classes: weight-standardized convolutions with gain and bias, GroupNorm."""
    shapes: Shapes = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])

    convolution(3, 16, 3)
    width = 16
    for outputs in (64, 128, 256):
        for inputs in (width, outputs):
            shapes.extend([(inputs,), (inputs,), (outputs,), (outputs,)])
            convolution(inputs, outputs, 3)
            convolution(outputs, outputs, 3)
        convolution(width, outputs, 1)
        width = outputs
    return [*shapes, (256,), (256,), (10, 256), (10,)]


def transformer(layers: int, width: int, embeddings: Shapes, head: Shapes) -> Shapes:
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(width, width), (width,)] * 4
    mlp: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return embeddings + [shape for _ in range(layers) for shape in (*norm, *attention, *norm, *mlp)] + norm + head


def vit_tiny() -> Shapes:
    embeddings: Shapes = [(1, 1, 192), (1, 197, 192), (192, 3, 16, 16), (192,)]
    return transformer(12, 192, embeddings, [(10, 192), (10,)])


def bert_base() -> Shapes:
    return transformer(12, 768, [(30_522, 768), (512, 768), (2, 768)], [(768, 768), (768,), (2, 768), (2,)])


MODELS: dict[str, Callable[[], Shapes]] = {"wrn-16-4": wrn_16_4, "vit-tiny": vit_tiny, "bert-base": bert_base}


def optimizers() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    """What is compared; torchao's are left out where it is not installed."""
    known: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
        "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
        "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
        "MicroAdam": lambda params: MicroAdam(params),
        "MicroAdam, stochastic": lambda params: MicroAdam(params, rounding="stochastic"),
        "MicroAdam, plain torch": lambda params: MicroAdam(params, fused=False),
    }
    try:
        from torchao.optim import AdamW4bit, AdamW8bit
    except ImportError:
        print("torchao is not installed; its 8-bit and 4-bit AdamW are left out", file=sys.stderr)
    else:
        known["torchao AdamW 8-bit"] = lambda params: AdamW8bit(params)
        known["torchao AdamW 4-bit"] = lambda params: AdamW4bit(params)
    return known


def parameters(model: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in MODELS[model]()]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors, inside torchao's packed subclasses too."""

    def size(value: object) -> int:
        if not isinstance(value, torch.Tensor):
            return 0
        if hasattr(value, "__tensor_flatten__"):
            return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.numel() * value.element_size()

    return sum(size(value) for state in optimizer.state.values() for value in state.values())


def measure_times(model: str, names: list[str], rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds per step and bytes of state, all optimizers taking turns."""
    running = {}
    for name in names:
        params = parameters(model)
        running[name] = optimizers()[name](params)
        for _ in range(12):  # compiles what compiles, and fills MicroAdam's window
            running[name].step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, optimizer in running.items():
            start = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    sizes = {name: bytes_of_state(optimizer) for name, optimizer in running.items()}
    return {name: statistics.median(values) for name, values in seconds.items()}, sizes


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure_scratch(model: str, name: str) -> int:
    """Peak resident memory of one step above the level before it."""
    optimizer = optimizers()[name](parameters(model))
    for _ in range(12):
        optimizer.step()
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    optimizer.step()
    return max(0, resident("VmHWM") - before)


def measure_scratch_apart(model: str, name: str) -> int | None:
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    command = [sys.executable, __file__, "--scratch-of", model, name]
    # Every allocation of some size is then returned on release, so that the peak is the step's own.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def report(model: str, names: list[str], rounds: int) -> dict[str, object]:
    shapes = MODELS[model]()
    count = sum(torch.Size(shape).numel() for shape in shapes)
    largest = max(torch.Size(shape).numel() for shape in shapes)
    times, sizes = measure_times(model, names, rounds)
    rows = []
    for name in names:
        scratch = measure_scratch_apart(model, name)
        rows.append(
            {
                "optimizer": name,
                "milliseconds": times[name] * 1e3,
                "ratio_to_adamw_foreach": times[name] / times["AdamW foreach"],
                "state_bytes_per_parameter": sizes[name] / count,
                "scratch_in_copies_of_largest_tensor": None if scratch is None else scratch / (4 * largest),
            }
        )
    return {"model": model, "parameters": count, "rows": rows}


def show(result: dict[str, object]) -> None:
    print(f"\n{result['model']}: {result['parameters']:,} parameters, {torch.get_num_threads()} threads")
    print(f"{'optimizer':26}{'ms/step':>10}{'× AdamW':>10}{'bytes/param':>13}{'scratch*':>10}")
    for row in result["rows"]:  # type: ignore[attr-defined]
        scratch = row["scratch_in_copies_of_largest_tensor"]
        print(
            f"{row['optimizer']:26}{row['milliseconds']:10.2f}{row['ratio_to_adamw_foreach']:10.2f}"
            f"{row['state_bytes_per_parameter']:13.3f}{'' if scratch is None else f'{scratch:10.2f}'}"
        )
    print("* peak extra memory of a step, in float32 copies of the largest tensor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=optimizers(), metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scratch-of", nargs=2, metavar=("MODEL", "OPTIMIZER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scratch_of:
        print(measure_scratch(*options.scratch_of))
        return
    results = []
    for model in options.models:
        results.append(report(model, options.optimizers or list(optimizers()), options.rounds))
        if not options.json:
            show(results[-1])
    if options.json:
        machine = {"cpu": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        print(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
