"""Compiles the Triton kernel for norms for a card that is not here, and prints what it uses: ``norms_compiled.py 90 bf16``.

A process of its own, since Triton's interpreter, which other tests switch on, compiles nothing.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dp_microadam.clipping import norms_triton


def compiled(capability: int, kind: str) -> triton.compiler.CompiledKernel:
    kernel = norms_triton.tile_squares
    constants = {name: getattr(norms_triton, name) for name in ("POSITIONS", "INPUTS", "OUTPUTS")}
    constants["TENSOR_CORES"] = kind == "bf16"
    pointers = {"a": f"*{kind}", "d": f"*{kind}", "out": "*fp32"}
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": norms_triton.WARPS})


def resources(kernel: triton.compiler.CompiledKernel) -> dict[str, int]:
    """Registers, stack and spilled bytes, as the assembler says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown.stdout)}


if __name__ == "__main__":
    found = compiled(int(sys.argv[1]), sys.argv[2])
    ptx = found.asm["ptx"]
    print(
        json.dumps({**resources(found), "shared": found.metadata.shared, "tensor_cores": "mma" in ptx, "tf32": "tf32" in ptx})
    )
