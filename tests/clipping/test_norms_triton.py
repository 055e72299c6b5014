"""The Triton kernel for norms: right in Triton's interpreter, and compiled for cards that are not here."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from thoroughness import THOROUGH
from torch import nn

from dp_microadam.clipping.linear import LinearFactors, LinearRule
from dp_microadam.clipping.precision import has_tensor_cores, kernels_run_on

triton = pytest.importorskip("triton")


def test_in_the_interpreter():
    path = Path(__file__).with_name("norms_in_interpreter.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    command += ["-m", ""] if THOROUGH else []
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parents[2])
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{7 if THOROUGH else 6} passed" in done.stdout


def test_without_a_gpu_the_kernel_is_never_chosen():
    """Nor imported: a device of this type may be the CPU in disguise."""
    assert not kernels_run_on(torch.device("cpu"))
    if torch.version.cuda is None:
        assert not has_tensor_cores(torch.device("cuda"))
    rule = LinearRule("", nn.Linear(64, 64), ("weight",))
    assert rule.choose(LinearFactors(torch.empty(1, 64, 64), torch.empty(1, 64, 64))) != "tile"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_it_compiles_for_real_cards_without_spilling_registers(capability, kind):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dp_microadam.clipping import norms_triton

    if not hasattr(norms_triton.tile_squares, "src"):
        pytest.skip("Triton's interpreter is on")
    constants = {name: getattr(norms_triton, name) for name in ("POSITIONS", "INPUTS", "OUTPUTS")}
    constants["TENSOR_CORES"] = kind == "bf16"
    signature = {"a": f"*{kind}", "d": f"*{kind}", "out": "*fp32"}
    signature |= {name: "i32" for name in norms_triton.tile_squares.arg_names if name not in {**signature, **constants}}
    source = ASTSource(
        fn=norms_triton.tile_squares,
        signature={name: signature.get(name, "constexpr") for name in norms_triton.tile_squares.arg_names},
        constexprs=constants,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": norms_triton.WARPS})
    used = resources(compiled)
    print(capability, kind, used, compiled.metadata.shared)
    assert used["LOCAL"] == 0
    assert used["REG"] <= 255
    assert compiled.metadata.shared <= 48 * 1024  # what every card has without asking
    assert ("mma" in compiled.asm["ptx"]) == (kind == "bf16")  # tensor cores for bfloat16 alone
    assert "tf32" not in compiled.asm["ptx"]


def resources(compiled) -> dict[str, int]:
    """Registers, stack and spilled bytes, as the assembler says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown.stdout)}
