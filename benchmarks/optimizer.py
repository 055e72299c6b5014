"""State, scratch memory and time of MicroAdam beside AdamW, on the parameter shapes of four models.

    python benchmarks/optimizer.py [--models wrn-16-4 vit-tiny resnet-50 bert-base] [--optimizers NAME …] [--rounds 15]
        [--threads 2] [--device cuda] [--out FILE]

Times are medians over rounds in which all optimizers take turns, so that a noisy machine disturbs them alike; the ratios, which
are medians of the ratios of each round, are what to read. On the CPU, processor time stands beside wall-clock time: other
processes disturb it least, but threads that wait for each other by spinning count. Every round has other gradients, as every
step of a training has. torchao compiles for minutes first and is left out unless asked for with ``--torchao``. Scratch memory
is the peak of resident memory during one step above what was resident before it, measured in a process of its own per
optimizer; on CUDA it is the peak of the allocator. ``--out`` writes a file that can be sent. Install with
``pip install 'dp-microadam[bench]'``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import add_options, deliver, tell, wall_clock

from dp_microadam import MicroAdam
from dp_microadam.optimizers.tensor_adam import TensorAdam
from dp_microadam.optimizers.threshold_adam import ThresholdAdam

Shapes = list[tuple[int, ...]]
Optimizers = dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]
Times = tuple[list[float], list[float]]
SHIFTS = 1000


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


def resnet_50() -> Shapes:
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for convolution in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes.extend([convolution, convolution[:1], convolution[:1]])
            if block == 0:
                shapes.extend([(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)])
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def bert_base() -> Shapes:
    return transformer(12, 768, [(30_522, 768), (512, 768), (2, 768)], [(768, 768), (768,), (2, 768), (2,)])


MODELS: dict[str, Callable[[], Shapes]] = {
    "wrn-16-4": wrn_16_4,
    "vit-tiny": vit_tiny,
    "resnet-50": resnet_50,
    "bert-base": bert_base,
}


def optimizers(torchao: bool) -> Optimizers:
    """What is compared; torchao's if asked for and installed."""
    known: Optimizers = {
        "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
        "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
        "MicroAdam": lambda params: MicroAdam(params),
        "ThresholdAdam": lambda params: ThresholdAdam(params),
        "TensorAdam": lambda params: TensorAdam(params),
        "MicroAdam, plain torch": lambda params: MicroAdam(params, fused=False),
    }
    if not torchao:
        return known
    try:
        from torchao.optim import AdamW4bit, AdamW8bit
    except ImportError:
        print("torchao is not installed; its 8-bit and 4-bit AdamW are left out", file=sys.stderr)
    else:
        known["torchao AdamW 8-bit"] = lambda params: AdamW8bit(params)
        known["torchao AdamW 4-bit"] = lambda params: AdamW4bit(params)
    return known


def parameters(model: str, device: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(device)) for shape in MODELS[model]()]


class Gradients:
    """Noise of the size of a model and a little more; each round takes its gradients from another place in it."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.noise = torch.randn(sum(param.numel() + 64 for param in params) + SHIFTS * 64, device=params[0].device) * 1e-3

    def give(self, params: list[torch.nn.Parameter], turn: int) -> None:
        start = turn % SHIFTS * 64
        for param in params:
            param.grad = self.noise[start : start + param.numel()].view(param.shape)
            start += -(-param.numel() // 64) * 64  # at the beginning of a cache line, as torch allocates


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors, inside torchao's packed subclasses too."""

    def size(value: object) -> int:
        if not isinstance(value, torch.Tensor):
            return 0
        if hasattr(value, "__tensor_flatten__"):
            return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.numel() * value.element_size()

    return sum(size(value) for state in optimizer.state.values() for value in state.values())


def measure_times(model: str, chosen: Optimizers, rounds: int, device: str) -> tuple[dict[str, Times], dict[str, int]]:
    """Seconds of each round and bytes of state, all optimizers taking turns."""
    params = {name: parameters(model, device) for name in chosen}
    running = {name: make(params[name]) for name, make in chosen.items()}
    gradients = Gradients(next(iter(params.values())))
    times: dict[str, Times] = {name: ([], []) for name in chosen}
    for turn in range(12 + rounds):  # the first twelve compile what compiles, and fill MicroAdam's window
        for name, optimizer in running.items():
            gradients.give(params[name], turn)
            start, processor = wall_clock(device), time.process_time()
            optimizer.step()
            if turn >= 12:
                times[name][1].append(time.process_time() - processor)
                times[name][0].append(wall_clock(device) - start)
    return times, {name: bytes_of_state(optimizer) for name, optimizer in running.items()}


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure_scratch(model: str, name: str, device: str) -> int:
    """Peak memory of one step above the level before it: the allocator's on CUDA, else the resident memory."""
    params = parameters(model, device)
    optimizer, gradients = optimizers(torchao=True)[name](params), Gradients(params)
    for turn in range(12):
        gradients.give(params, turn)
        optimizer.step()
    gradients.give(params, 12)
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        optimizer.step()
        return torch.cuda.max_memory_allocated(device) - held
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    optimizer.step()
    return max(0, resident("VmHWM") - before)


def measure_scratch_apart(model: str, name: str, device: str) -> int | None:
    if device == "cpu" and not os.path.exists("/proc/self/clear_refs"):
        return None
    command = [sys.executable, __file__, "--device", device, "--scratch-of", model, name]
    # Every allocation of some size is then returned on release, so that the peak is the step's own.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def ratio(times: dict[str, Times], name: str, to: str, clock: int) -> float | None:
    """The median over rounds of the time of ``name`` relative to that of ``to`` in the same round."""
    if to not in times:
        return None
    return statistics.median(one / other for one, other in zip(times[name][clock], times[to][clock], strict=True))


def report(model: str, chosen: Optimizers, options: argparse.Namespace) -> dict[str, Any]:
    shapes = MODELS[model]()
    count = sum(torch.Size(shape).numel() for shape in shapes)
    largest = max(torch.Size(shape).numel() for shape in shapes)
    tell(f"{model}: {len(chosen)} optimizers take turns, {options.rounds} rounds")
    times, sizes = measure_times(model, chosen, options.rounds, options.device)
    tell("; ".join(f"{name} {1e3 * statistics.median(wall):.1f} ms" for name, (wall, _) in times.items()))
    rows = []
    for name, (wall, processor) in times.items():
        scratch = None if options.no_scratch else measure_scratch_apart(model, name, options.device)
        rows.append(
            {
                "optimizer": name,
                "milliseconds": statistics.median(wall) * 1e3,
                "fastest_milliseconds": min(wall) * 1e3,
                "processor_milliseconds": statistics.median(processor) * 1e3,
                "ratio_to_adamw_foreach": ratio(times, name, "AdamW foreach", 0),
                "ratio_to_adamw_fused": ratio(times, name, "AdamW fused", 0),
                "processor_ratio_to_adamw_fused": ratio(times, name, "AdamW fused", 1),
                "state_bytes_per_parameter": sizes[name] / count,
                "scratch_in_copies_of_largest_tensor": None if scratch is None else scratch / (4 * largest),
            }
        )
    return {"model": model, "parameters": count, "tensors": len(shapes), "threads": torch.get_num_threads(), "rows": rows}


def show(result: dict[str, Any]) -> None:
    print(
        f"\n{result['model']}: {result['parameters']:,} parameters in {result['tensors']} tensors, {result['threads']} threads"
    )
    columns = ("ms/step", "× foreach", "× fused", "fused, cpu", "bytes/param", "scratch*")
    print(f"{'optimizer':26}" + "".join(f"{column:>12}" for column in columns))
    for row in result["rows"]:
        numbers = [
            row["milliseconds"],
            row["ratio_to_adamw_foreach"],
            row["ratio_to_adamw_fused"],
            row["processor_ratio_to_adamw_fused"],
            row["state_bytes_per_parameter"],
            row["scratch_in_copies_of_largest_tensor"],
        ]
        print(f"{row['optimizer']:26}" + "".join(f"{'' if number is None else f'{number:.2f}':>12}" for number in numbers))
    print("* peak extra memory of a step, in float32 copies of the largest tensor", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", metavar="NAME", help="default: all except plain torch and torchao's")
    parser.add_argument("--torchao", action="store_true", help="torchao's 8-bit and 4-bit AdamW too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="default: what torch uses")
    parser.add_argument("--no-scratch", action="store_true", help="do not measure scratch memory, which takes a process each")
    parser.add_argument("--scratch-of", nargs=2, metavar=("MODEL", "OPTIMIZER"), help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.scratch_of:
        print(measure_scratch(*options.scratch_of, options.device))
        return
    known = optimizers(options.torchao)
    unknown = [name for name in options.optimizers or [] if name not in known]
    if unknown:
        parser.error(f"there is no optimizer {unknown[0]!r}; there are {', '.join(known)}")
    names = options.optimizers or [name for name in known if name != "MicroAdam, plain torch"]
    results = []
    for model in options.models:
        results.append(report(model, {name: known[name] for name in names}, options))
        show(results[-1])
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    deliver(options, "optimizer", {"rounds": options.rounds, "load_average": load, "models": results})


if __name__ == "__main__":
    main()
