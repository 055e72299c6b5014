"""ChaCha20 and its normal numbers: the twin in NumPy against RFC 8439 and OpenSSL, the Triton kernel against the twin."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from thoroughness import examples

from dp_microadam import Randomness
from dp_microadam.noise import chacha, device_noise, randomness

WORKER = Path(__file__).with_name("chacha_worker.py")

_spec = importlib.util.spec_from_file_location("chacha_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def openssl(key, counter, nonce, count):
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, struct.pack("<I", counter) + nonce), mode=None).encryptor()
    return stream.update(bytes(count))


@pytest.mark.parametrize("section", worker.VECTORS)
def test_blocks_are_those_of_rfc_8439(section):
    key, counter, nonce, stream = worker.VECTORS[section]
    number, others = worker.counter_and_nonce(counter, nonce)
    assert chacha.chacha_blocks(key, np.array([number], dtype=np.uint64), tuple(others)).tobytes().hex() == stream


@examples(40)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 5), st.binary(min_size=12, max_size=12))
def test_blocks_are_those_of_openssl(key, counter, nonce):
    number, others = worker.counter_and_nonce(counter, nonce)
    counters = np.uint64(number) + np.arange(4, dtype=np.uint64)
    assert chacha.chacha_blocks(key, counters, tuple(others)).tobytes() == openssl(key, counter, nonce, 4 * 64)


@pytest.mark.parametrize(("count", "lanes"), [(1, 4), (64, 8), (65, 8), (1000, 16)])
def test_every_number_has_its_own_part_of_the_stream(count, lanes):
    """Against Box–Muller on OpenSSL's stream, number by number: lane b of a group makes b, b + lanes, b + 2·lanes, …"""
    key = bytes(range(100, 132))
    found = chacha.chacha_normals(key, count, lanes)
    for place in range(count):
        group, inside = divmod(place, 8 * lanes)
        which, lane = divmod(inside, lanes)
        words = np.frombuffer(openssl(key, group * lanes + lane, bytes(12), 64), dtype="<u8") >> np.uint64(11)
        one, other = (float(word) * 2.0**-53 for word in words[which // 2 * 2 :][:2])
        radius, angle = np.sqrt(-2 * np.log1p(-one)), 2 * np.pi * other
        assert found[place] == pytest.approx(radius * (np.sin(angle) if which % 2 else np.cos(angle)), abs=1e-14)


def test_the_largest_number_lies_beyond_eight_deviations(monkeypatch):
    """Uniforms are multiples of 2⁻⁵³ below 1, so that the radius ends at √(2·53·ln 2) = 8.57."""
    ones = np.full((4, 16), 0xFFFFFFFF, dtype=np.uint32)
    ones[:, 2:4] = 0
    monkeypatch.setattr(chacha, "chacha_blocks", lambda key, counters: ones)
    assert chacha.chacha_normals(bytes(32), 8, 4).max() == pytest.approx(np.sqrt(2 * 53 * np.log(2)))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What the kernels computed in Triton's interpreter."""
    path = tmp_path_factory.mktemp("kernel") / "found.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(WORKER), str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(path, weights_only=False)


@needs_triton
def test_the_kernel_s_blocks_are_those_of_rfc_8439(interpreted):
    for section, (key, counter, nonce, stream) in worker.VECTORS.items():
        assert interpreted[section][:64].hex() == stream, section
        assert interpreted[section] == openssl(key, counter, nonce, 128), section


@needs_triton
def test_the_kernel_s_numbers_are_those_of_the_twin_and_nothing_else_is_written(interpreted):
    for name, (key, count, dtype, lanes) in worker.DRAWS.items():
        expected = torch.from_numpy(chacha.chacha_normals(key, count, lanes)).to(dtype)
        assert torch.equal(interpreted[name][:count], expected), name
        assert interpreted[name][count:].eq(99).all(), name
    assert stats.kstest(interpreted["many"][:100_000].numpy(), "norm").pvalue > 1e-7


KEY_IS_NOT_COMPILED = """
from dp_microadam.noise import chacha_kernel
for kernel in (chacha_kernel.write_blocks, chacha_kernel.write_normals):
    key = [parameter for parameter in kernel.params if parameter.name in chacha_kernel._KEY]
    assert len(key) == 8 and all(parameter.do_not_specialize and not parameter.is_constexpr for parameter in key)
"""


@needs_triton
def test_no_word_of_the_key_enters_the_code_that_triton_compiles_and_stores():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", KEY_IS_NOT_COMPILED], env=environment, check=True)


COMPILED = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dp_microadam.noise.chacha_kernel import write_normals

tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
for capability in (80, 90, 100):
    for dtype in ("fp32", "fp64"):
        signature = {name: "i32" for name in write_normals.arg_names} | {"out": f"*{dtype}", "lanes": "constexpr"}
        source = ASTSource(write_normals, signature=signature, constexprs={"lanes": int(sys.argv[1])})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            said = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        print(json.dumps({key: int(value) for key, value in re.findall(r"(REG|LOCAL|SHARED):([0-9]+)", said.stdout)}))
"""


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_cards_that_are_not_here_and_spills_no_registers(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILED, str(device_noise.LANES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(used) == 6
    for card in used:
        assert card["LOCAL"] == card["SHARED"] == 0
        assert card["REG"] <= 64, "so that 1,024 threads fit on a multiprocessor"


def test_every_draw_on_the_device_has_a_key_of_its_own(monkeypatch):
    """Also beside the draws of the host, and also when a step is repeated."""
    keys = []
    monkeypatch.setattr(randomness, "write_normals", lambda out, key: keys.append(key))
    monkeypatch.setattr(
        randomness, "_statistical_bits", lambda key, count: keys.append(key) or np.zeros(count, dtype=np.uint64)
    )
    for source in (Randomness.from_entropy(), Randomness.from_entropy()):
        for step in (0, 0, 1):
            source.fill_normals_on_device(torch.empty(4), "noise", step)
            source.fill_normals_on_device(torch.empty(4), "other", step)
            source.normals("noise", step, 4)
    assert len(set(keys)) == len(keys) == 18
    assert {len(key) for key in keys} == {32}


def test_a_device_on_which_nothing_can_be_drawn_is_told_by_a_reason(monkeypatch):
    device_noise.unsupported_reason.cache_clear()
    assert "must be a CUDA device" in device_noise.unsupported_reason(torch.device("cpu"))
    monkeypatch.setattr(device_noise, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "Triton is not installed" in device_noise.unsupported_reason(torch.device("cuda"))
    device_noise.unsupported_reason.cache_clear()


@pytest.mark.parametrize(
    ("difference", "reason"), [(0.0, None), (1e-9, "not those of the reference"), (float("nan"), "not those of the reference")]
)
def test_a_kernel_that_does_not_draw_what_its_twin_does_is_not_used(monkeypatch, difference, reason):
    """As if it were a card on which the compiler errs: the check compares all it draws."""

    def write(out, key):
        out.copy_(torch.from_numpy(chacha.chacha_normals(key, len(out), device_noise.LANES)))
        out[-1] += difference

    class Pretended:
        type = "cuda"

        def __str__(self):
            return "cuda:7"

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: empty(count, dtype=dtype))
    monkeypatch.setattr(device_noise, "find_spec", lambda name: name)
    monkeypatch.setattr(device_noise, "write_normals", write)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = device_noise.unsupported_reason(Pretended())
    assert (found is None) if reason is None else (reason in found)
    assert len(warned) == (reason is not None)
