"""The Triton kernel for norms: right in Triton's interpreter, and compiled for cards that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from thoroughness import THOROUGH
from torch import nn

from dp_microadam.clipping.linear import LinearFactors, LinearRule
from dp_microadam.clipping.precision import has_tensor_cores, kernels_run_on

pytest.importorskip("triton")


@pytest.mark.slow
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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("norms_compiled.py")
    command = [sys.executable, str(script), str(capability), kind]
    used = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    print(capability, kind, used)
    assert used["LOCAL"] == 0
    assert used["REG"] <= 128  # two blocks of 256 threads fit a multiprocessor
    assert used["shared"] <= 48 * 1024  # what every card has without asking
    assert used["tensor_cores"] == (kind == "bf16")
    assert not used["tf32"]
