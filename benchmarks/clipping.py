"""What private gradients cost, against ordinary ones and against Opacus.

Time is measured interleaved in one process: every round takes one step of every method, and ratios are taken within a
round, so that a busy machine slows all of them alike. Beside wall-clock time stands processor time, which other
processes disturb least; on a GPU it is the host's. Peak memory is measured in a fresh process per method: the growth of the
resident set during a step, or that of the memory allocated on the GPU.

    python benchmarks/clipping.py                                   # the table at physical batch 64
    python benchmarks/clipping.py --batches 16 64 256 --figure docs/images/clipping.png --json
    python benchmarks/clipping.py --models vit-tiny "text encoder" "vit-tiny bitfit" "text bitfit" --batches 32
    python benchmarks/clipping.py --models "text lora" --batches 8 --threads 1 --counted
    python benchmarks/clipping.py --layers                          # is the strategy chosen for a layer the fastest one?
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import add_options, deliver, tell, wall_clock
from strategy_times import measure_strategies
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dp_microadam import ClippedGradients
from dp_microadam.workbench import models


class Logits(nn.Module):
    """A classifier of transformers that returns a tensor; all of it trains, or its biases and head, or adapters and head."""

    def __init__(self, model: nn.Module, trained: str, adapted: Sequence[str]) -> None:
        super().__init__()
        if trained == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=8, target_modules=list(adapted), modules_to_save=["classifier"]))
        elif trained == "bitfit":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith("bias") or name.startswith("classifier"))
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


def vit_tiny(trained: str = "all") -> nn.Module:
    """ViT-Tiny/16 at 224×224, 5.5 million parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    return Logits(ViTForImageClassification(ViTConfig(**shape, num_labels=10)), trained, ("q_proj", "v_proj"))


def text_encoder(trained: str = "all") -> nn.Module:
    """Six layers of BERT, 384 wide, 22.7 million parameters, half of them in the vocabulary."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
    return Logits(BertForSequenceClassification(BertConfig(**shape, num_labels=10)), trained, ("query", "value"))


class MeanLogits(Logits):
    """The logits of a language model, averaged over positions, so that every one has a gradient."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).mean(1)


def language_model() -> nn.Module:
    """Two layers of GPT-2, 128 wide, whose table of 30,000 tokens is also the output layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 30_000, "n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return MeanLogits(GPT2LMHeadModel(GPT2Config(**shape)), "all", ())


def gpt_2() -> nn.Module:
    """GPT-2 in its smallest published size, 124 million parameters, without pretrained weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return MeanLogits(GPT2LMHeadModel(GPT2Config()), "all", ())


# A shape of one dimension stands for that many tokens.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "wrn-16-4 ws": (lambda: models.wide_resnet(16, 4), (3, 32, 32)),
    "wrn-16-4": (lambda: models.wide_resnet(16, 4, weight_standardization=False), (3, 32, 32)),
    "small cnn": (models.small_cnn, (3, 32, 32)),
    "tanh cnn": (models.tanh_cnn, (1, 28, 28)),
    "vit-tiny": (vit_tiny, (3, 224, 224)),
    "text encoder": (text_encoder, (128,)),
    "language model": (language_model, (64,)),
    "gpt-2": (gpt_2, (64,)),
    "vit-tiny bitfit": (lambda: vit_tiny("bitfit"), (3, 224, 224)),
    "text bitfit": (lambda: text_encoder("bitfit"), (128,)),
    "vit-tiny lora": (lambda: vit_tiny("lora"), (3, 224, 224)),
    "text lora": (lambda: text_encoder("lora"), (128,)),
}
CONVOLUTIONAL = ["wrn-16-4 ws", "wrn-16-4", "small cnn", "tanh cnn"]
METHODS = ("non-private", "ours", "opacus hooks", "opacus ghost", "opacus functorch")
MAX_GRAD_NORM = 1.0
MOST_ROUNDS = 13


def per_example_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_step(method: str, model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], None]:
    """One step's gradient by this method, thrown away at the end."""
    if method == "non-private":
        return lambda batch: per_example_loss(model, batch).mean().backward() or model.zero_grad(set_to_none=True)
    if method == "ours":
        engine = ClippedGradients(model, per_example_loss, max_grad_norm=MAX_GRAD_NORM)

        def ours(batch: tuple[Tensor, Tensor]) -> None:
            engine.accumulate(batch)
            engine.reset()

        return ours
    if method == "opacus ghost":
        return _opacus_ghost(model)
    return _opacus_samples(model, functorch=method == "opacus functorch")


def _opacus_samples(model: nn.Module, functorch: bool) -> Callable[[tuple[Tensor, Tensor]], None]:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=functorch)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        per_example_loss(wrapped, batch).sum().backward()
        trainable = [p for p in model.parameters() if p.requires_grad]
        samples = [p.grad_sample for p in trainable]
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples]).norm(dim=0)
        coefficients = (MAX_GRAD_NORM / (norms + 1e-6)).clamp(max=1.0)
        for parameter, sample in zip(trainable, samples, strict=True):
            parameter.summed_grad = torch.einsum("i,i...", coefficients, sample)
            parameter.grad_sample = parameter.grad = None
        for parameter in trainable:
            parameter.summed_grad = None

    return step


def _opacus_ghost(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], None]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=MAX_GRAD_NORM, use_ghost_clipping=True, loss_reduction="sum"
    )

    def step(batch: tuple[Tensor, Tensor]) -> None:
        losses = per_example_loss(wrapped, batch)
        losses.sum().backward(retain_graph=True)
        wrapped.zero_grad(set_to_none=True)
        coefficients = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (coefficients * losses).sum().backward()
        wrapped.enable_hooks()
        wrapped.zero_grad(set_to_none=True)

    return step


def make_batch(shape: tuple[int, ...], size: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, *shape, generator=generator)
    if len(shape) == 1:
        inputs = torch.randint(30_000, (size, *shape), generator=generator)
    return inputs.to(device), torch.randint(10, (size,), generator=generator).to(device)


def build(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().to(device)


def measure_times(name: str, methods: list[str], size: int, rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Medians over rounds of seconds, processor seconds and their ratios to the non-private step of the same round."""
    model = build(name, device)
    batch = make_batch(MODELS[name][1], size, device)
    steps = {method: make_step(method, copy.deepcopy(model)) for method in methods}
    walls: dict[str, list[float]] = {method: [] for method in methods}
    processors: dict[str, list[float]] = {method: [] for method in methods}
    for method in methods:
        steps[method](batch)  # warm-up, in which ours checks independence; independence_check.py measures that
    for number in range(rounds):
        for method in methods:
            wall, processor = wall_clock(device), time.process_time()
            steps[method](batch)
            walls[method].append(wall_clock(device) - wall)
            processors[method].append(time.process_time() - processor)
        if number == 0:
            tell("first round: " + "; ".join(f"{method} {1e3 * walls[method][0]:.0f} ms" for method in methods))

    def ratio(times: dict[str, list[float]], method: str) -> float:
        return statistics.median(a / b for a, b in zip(times[method], times["non-private"], strict=True))

    return {
        method: {
            "seconds": statistics.median(walls[method]),
            "processor_seconds": statistics.median(processors[method]),
            "ratio": ratio(walls, method),
            "processor_ratio": ratio(processors, method),
        }
        for method in methods
    }


def measure_peak_here(name: str, method: str, size: int, device: str) -> float:
    """Bytes by which memory in use grows during a step, in this process: on a GPU what is allocated, else the resident set."""
    step = make_step(method, build(name, device))
    step(make_batch(MODELS[name][1], 2, device))  # libraries are loaded
    batch = make_batch(MODELS[name][1], size, device)
    if torch.device(device).type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        step(batch)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            step(batch)
        return torch.cuda.max_memory_allocated(device) - allocated
    before = memory_status("VmRSS")
    step(batch)  # ours checks independence here, once; its memory is returned
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark afresh
    for _ in range(3):
        step(batch)
    return memory_status("VmHWM") - before


def count_peak_here(name: str, method: str, size: int, device: str) -> float:
    """Most bytes that torch's allocator has given out at once during a step, without the model; the same in every run."""
    step, batch = make_step(method, build(name, device)), make_batch(MODELS[name][1], size, device)
    step(batch)  # ours checks independence here, once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(batch)
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(change.nbytes() for change in sorted(changes, key=lambda event: event.start_ns())))


def memory_status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024.0 * float(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


def measure_peak(name: str, method: str, size: int, options: argparse.Namespace) -> float:
    """The median over fresh processes."""
    command = [sys.executable, __file__, "--peak-of", name, method, str(size), "--threads", str(options.threads)]
    command += ["--device", options.device, *(["--counted"] if options.counted else [])]
    return statistics.median(
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(options.peak_repeats)
    )


def works(name: str, method: str, device: str) -> bool:
    """Whether the method can train this model as it comes; Opacus does not know every module."""
    try:
        make_step(method, build(name, device))(make_batch(MODELS[name][1], 2, device))
    except Exception as error:
        print(f"{name:12} {method} does not work: {str(error).splitlines()[0][:150]}", file=sys.stderr, flush=True)
        return False
    return True


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for name in options.models:
        for size in options.batches:
            tell(f"{name}, batch {size}: time of {len(options.methods)} methods, {options.rounds} rounds")
            methods = [method for method in options.methods if works(name, method, options.device)]
            times = measure_times(name, methods, size, options.rounds, options.device)
            tell("; ".join(f"{method} {times[method]['ratio']:.2f}×" for method in methods) + "; now their memory")
            peaks = {method: measure_peak(name, method, size, options) for method in methods}
            for method in methods:
                row = {"model": name, "batch": size, "method": method, **times[method], "peak_bytes": peaks[method]}
                row["peak_ratio"] = peaks[method] / peaks["non-private"]
                results.append(row)
                show(row)
    return results


def show(row: dict[str, Any]) -> None:
    each = row["batch"]
    print(
        f"{row['model']:12} {each:4d}  {row['method']:17} {1e3 * row['seconds'] / each:8.2f} ms/example "
        f"{row['ratio']:6.2f}×  processor {row['processor_ratio']:6.2f}×  "
        f"{row['peak_bytes'] / each / 1e6:7.2f} MB/example {row['peak_ratio']:6.2f}×",
        file=sys.stderr,
        flush=True,
    )


def measure_layers(size: int, rounds: int, device: str) -> list[dict[str, Any]]:
    """Milliseconds of each strategy on typical layers, and the strategy that is chosen."""
    results = []
    for times in measure_strategies(device, size, rounds):
        results.append(times.as_dict())
        each = "  ".join(f"{name} {taken:8.1f}" for name, taken in times.milliseconds.items())
        print(
            f"{times.layer:36} chosen {times.chosen:6} {each} ms   {times.loss:.2f}× the best strategy allowed",
            file=sys.stderr,
            flush=True,
        )
    return results


def read_results(paths: list[Path]) -> list[dict[str, Any]]:
    """Measurements of earlier runs; of several of the same thing the first counts."""
    found: dict[Any, dict[str, Any]] = {}
    for path in paths:
        for row in json.loads(path.read_text())["results"]:
            found.setdefault((row["model"], row["batch"], row["method"]), row)
    return list(found.values())


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Time and memory over the physical batch, one column per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["model"] for row in results))
    figure, axes = plt.subplots(2, len(names), figsize=(4.2 * len(names), 7), squeeze=False, sharex=True)
    # Ratios within a round survive a machine whose load changes between batch sizes; seconds would not.
    quantities = (
        ("processor time ÷ non-private", lambda row: row["processor_ratio"]),
        ("peak MB per example", lambda row: row["peak_bytes"] / row["batch"] / 1e6),
    )
    for column, name in enumerate(names):
        for line, (label, quantity) in enumerate(quantities):
            axis = axes[line][column]
            for index, method in enumerate(METHODS):
                rows = [row for row in results if row["model"] == name and row["method"] == method]
                rows.sort(key=lambda row: row["batch"])
                if rows:
                    axis.plot(
                        [row["batch"] for row in rows],
                        [quantity(row) for row in rows],
                        marker="o",
                        color=f"C{index}",
                        linewidth=2.5 if method == "ours" else 1.5,
                        label=method,
                    )
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
            axis.set_xticks(sorted({row["batch"] for row in results}))
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.grid(True, which="both", alpha=0.25)
            axis.set_ylabel("" if column else label)
            axis.set_title("" if line else name)
            axis.set_xlabel("physical batch" if line else "")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=CONVOLUTIONAL)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batches", nargs="+", type=int, default=[64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-repeats", type=int, default=3)
    parser.add_argument("--counted", action="store_true", help="count what torch allocates on the CPU, not the resident set")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", action="store_true", help="time the three strategies on single layers instead")
    parser.add_argument("--figure", type=Path, help="where to draw time and memory over the physical batch")
    parser.add_argument("--results", nargs="+", type=Path, help="read what --json printed before instead of measuring")
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON on stdout")
    add_options(parser)
    parser.add_argument("--peak-of", nargs=3, metavar=("MODEL", "METHOD", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds > MOST_ROUNDS:
        parser.error(
            f"--rounds is {options.rounds}; it must be at most {MOST_ROUNDS}, since call 16 repeats the independence check"
        )
    if "non-private" not in options.methods:
        options.methods.insert(0, "non-private")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    if options.peak_of:
        name, method, size = options.peak_of
        peak = count_peak_here if options.counted else measure_peak_here
        print(peak(name, method, int(size), options.device))
        return
    if options.layers:
        results = measure_layers(options.batches[0], options.rounds, options.device)
    elif options.results:
        results = read_results(options.results)
    else:
        results = compare(options)
    if options.figure and not options.layers:
        draw(results, options.figure)
    deliver(options, "clipping, single layers" if options.layers else "clipping", results)
    if options.json:
        print(json.dumps({"threads": options.threads, "torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
