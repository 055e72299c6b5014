"""Registers, spills and memory traffic of MicroAdam's Triton kernels, compiled for GPUs that need not be there.

    python benchmarks/kernel_resources.py [--targets 80 90 100] [--variants default …] [--traffic] [--json FILE]

Every kernel is compiled ahead of time for every target and variant; cuobjdump and nvdisasm, which come with Triton, read the
result. Spills are instructions that access local memory. Bytes that the assembly requests are found by compiling a kernel
for twice as many coordinates: the widths of the additional loads and stores, times threads, by additional coordinates. Lanes
that ask for the same bound of a bucket each count there.

``--traffic`` runs a step in Triton's interpreter, takes down every load and store that is not masked, and counts distinct bytes
and distinct sectors of 32 bytes per kernel: what reaches memory if a cache keeps what one launch uses twice. It needs a minute.
Install with ``pip install 'dp-microadam[gpu,fast]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

TARGETS = (80, 90, 100)

ADAMW_BYTES = 28
"""Per parameter: AdamW reads parameter, gradient and two moments and writes all but the gradient, four bytes each."""

ANALYTICAL_BYTES = 5.5
"""Per parameter: MicroAdam reads the gradient once and reads and writes 4.5-bit residuals; the window and the weights in it
are a tenth of the coordinates."""


def variants() -> dict[str, dict[str, Any]]:
    """Options of the kernels by variant; what is not named is the default."""
    import triton.language as tl

    return {
        "default": {},
        "stochastic": {"STOCHASTIC": True},
        "float32 window": {"WIDE": True},
        "bfloat16": {"DTYPE": tl.bfloat16, "GRADIENT_DTYPE": tl.bfloat16},
        "float32 residual": {"ERROR": 2},
        "channels last": {"STRIDED": True, "GRADIENT_STRIDED": True},
    }


def compiled(name: str, target: int, **changes: Any) -> Any:
    """A kernel for a target, with the shapes and options that ``micro_adam_triton`` uses for a large parameter list."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dp_microadam.optimizers import micro_adam_triton as host
    from dp_microadam.optimizers import micro_adam_triton_blocks, micro_adam_triton_window

    kernel, warps, arguments = {
        "find_thresholds": (
            micro_adam_triton_blocks.find_thresholds,
            host.THRESHOLD_WARPS,
            {"thresholds": "*i32", "refused": "*i32", "tick": "i32", "limit": "fp32"},
        ),
        "store_blocks": (
            micro_adam_triton_blocks.store_blocks,
            host.STORE_WARPS,
            {"settings": "*fp64", "thresholds": "*i32"},
        ),
        "apply_window": (
            micro_adam_triton_window.apply_window,
            host.WINDOW_WARPS,
            {"settings": "*fp64", "moments": "*fp32", "count": "i32"},
        ),
    }[name]
    known = {
        "WINDOW": 10,
        "BUCKET": 128,
        "HALF": 64,
        "MANY": 256,
        "FEW": 16,
        "AT_ONCE": 4,
        "LONGEST": 32_768,
        "ENTRIES": 512,
        "ERROR": 1,
        "STOCHASTIC": False,
        "WIDE": False,
        "DTYPE": tl.float32,
        "GRADIENT_DTYPE": tl.float32,
        "STRIDED": False,
        "GRADIENT_STRIDED": False,
        **changes,
    }
    constants = {argument: known[argument] for argument in kernel.arg_names if argument in known}
    signature = {"blocks": "*i64", "params": "*i64", "now": "*i64", **arguments}
    source = ASTSource(fn=kernel, signature={**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps, **host._EXACT})


def assembly_of(kernel: Any) -> tuple[str, list[str]]:
    """What cuobjdump says about a compiled kernel, and its instructions."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, text = (
            subprocess.run([tools / command, *options, file.name], capture_output=True, text=True, check=True).stdout
            for command, options in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", []))
        )
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][^;]*);", text, re.MULTILINE)
    return usage, [instruction.strip() for instruction in found]


def resources(kernel: Any) -> dict[str, int]:
    """Registers per thread, spills, shared memory and instructions of a compiled kernel."""
    usage, instructions = assembly_of(kernel)

    def count(*names: str) -> int:
        return sum(instruction.startswith(names) for instruction in instructions)

    numbers = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    inexact = re.findall(r"\bfma\.|\.ftz|\.approx|div\.full", kernel.asm["ptx"])
    return {
        "registers": int(numbers["REG"]),
        "spills": count("LDL", "STL"),
        "stack": int(numbers["STACK"]),
        "shared": kernel.metadata.shared,
        "instructions": len(instructions),
        "loads": count("LDG"),
        "stores": count("STG"),
        "barriers": count("BAR"),
        "inexact": len(inexact),
    }


def requested(kernel: Any) -> dict[str, int]:
    """Bytes that one thread loads from and stores to global memory if every instruction runs once."""
    found = {"loads": 0, "stores": 0}
    for instruction in assembly_of(kernel)[1]:
        name = instruction.split()[0]
        if name.startswith(("LDG", "STG")):
            width = re.search(r"\.(U8|S8|U16|S16|64|128)\b", name)
            size = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[width[1]] if width else 4
            found["loads" if name.startswith("LDG") else "stores"] += size
    return found


def requested_per_coordinate(target: int) -> dict[str, dict[str, float]]:
    """Bytes per coordinate that the assembly requests, by kernel; see above. Counts stores of what is selected for all."""
    from dp_microadam.optimizers import micro_adam_triton as host

    found = {}
    for name, small, large, coordinates, warps in (
        ("find_thresholds", {"MANY": 128}, {"MANY": 256}, 128 * 128, host.THRESHOLD_WARPS),
        ("store_blocks", {"AT_ONCE": 4}, {"AT_ONCE": 8}, 4 * 128, host.STORE_WARPS),
    ):
        one, two = requested(compiled(name, target, **small)), requested(compiled(name, target, **large))
        found[name] = {kind: (two[kind] - one[kind]) * 32 * warps / coordinates for kind in one}
    return found


def traffic(coordinates: int = 65_536) -> dict[str, dict[str, float]]:
    """Distinct bytes and sectors of 32 bytes that each kernel reads and writes per parameter, with a full window.

    Scratch memory is left out: it belongs to a program, not to a parameter, and stays in the L2 cache.
    """
    import numpy as np
    import torch
    from triton.runtime import interpreter

    from dp_microadam import MicroAdam
    from dp_microadam.optimizers import micro_adam_triton as host
    from dp_microadam.optimizers import micro_adam_triton_blocks, micro_adam_triton_window

    touched: dict[str, dict[str, list[Any]]] = {}
    running: dict[str, list[Any]] = {"read": [], "written": []}

    def watch(name: str, kind: str) -> None:
        original = getattr(interpreter.InterpreterBuilder, name)

        def watched(self: Any, pointers: Any, *given: Any) -> Any:
            mask = given[0] if kind == "read" else given[1]
            addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
            size = pointers.get_element_ty().primitive_bitwidth // 8
            running[kind].append((addresses[np.broadcast_to(mask.data, addresses.shape)].reshape(-1), size))
            return original(self, pointers, *given)

        setattr(interpreter.InterpreterBuilder, name, watched)

    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(coordinates))
    optimizer = MicroAdam([weights], density=0.01, window=10, second_moment="coordinate", fused=True)
    for _ in range(12):
        weights.grad = torch.randn(coordinates)
        optimizer.step()
    host.DEVICE_TYPES = frozenset({"cpu"})
    watch("create_masked_load", "read")
    watch("create_masked_store", "written")
    kernels = (
        micro_adam_triton_blocks.find_thresholds,
        micro_adam_triton_blocks.store_blocks,
        micro_adam_triton_window.apply_window,
    )
    for kernel in kernels:

        def begin(*_: Any, name: str = kernel.__name__, **__: Any) -> None:
            touched[name] = {"read": [], "written": []}
            running.update(touched[name])

        kernel.add_pre_run_hook(begin)
    optimizer.step()
    scratch = optimizer._device_steps._moments[weights.device]
    low, high = scratch.data_ptr(), scratch.data_ptr() + scratch.nbytes

    def per_parameter(accesses: list[Any], unit: int) -> float:
        every = [
            np.unique((addresses[(addresses < low) | (addresses >= high)][:, None] + np.arange(size, dtype=np.uint64)) // unit)
            for addresses, size in accesses
            if len(addresses)
        ]
        return len(np.unique(np.concatenate(every))) * unit / coordinates

    return {
        name: {
            f"{kind} {unit_name}": round(per_parameter(accesses, unit), 3)
            for kind, accesses in kinds.items()
            for unit_name, unit in (("bytes", 1), ("sectors", 32))
        }
        for name, kinds in touched.items()
    }


def measurements(targets: list[int], chosen: list[str]) -> Iterator[dict[str, Any]]:
    """One row per kernel, target and variant; variants that are the same code as the default are left out."""
    for target in targets:
        for name in ("find_thresholds", "store_blocks", "apply_window"):
            seen = []
            for variant in chosen:
                kernel = compiled(name, target, **variants()[variant])
                if kernel.asm["ptx"] not in seen:
                    seen.append(kernel.asm["ptx"])
                    yield {"target": f"sm_{target}", "kernel": name, "variant": variant, **resources(kernel)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--variants", nargs="+", default=None)
    parser.add_argument("--traffic", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":  # started below: Triton decides when it is imported
        print(json.dumps(traffic()))
        return
    print(f"compiling for {', '.join(f'sm_{target}' for target in options.targets)}", file=sys.stderr, flush=True)
    rows = []
    for row in measurements(options.targets, options.variants or list(variants())):
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {"command": f"python {' '.join(sys.argv)}", "commit": commit, "date": str(date.today()), "kernels": rows}
    if options.traffic:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
        report["bytes per parameter"] = {
            "AdamW, analytical": ADAMW_BYTES,
            "MicroAdam, analytical": ANALYTICAL_BYTES,
            "requested by the assembly": {f"sm_{target}": requested_per_coordinate(target) for target in options.targets},
            "distinct": json.loads(done.stdout),
        }
        print(json.dumps(report["bytes per parameter"], indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
