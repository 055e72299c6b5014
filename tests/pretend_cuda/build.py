"""Compiles the pretend CUDA device when it is first needed, and keeps the result for every later process."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


class CannotBuild(Exception):
    """Why there is no pretend device on this machine, in a sentence."""


def library() -> Path:
    """The compiled device for the installed torch. One process compiles, others wait for it.

    Raises:
        CannotBuild: if torch was built with CUDA, a compiler is missing, or it fails.
    """
    version, found = importlib.metadata.version("torch"), importlib.util.find_spec("torch")  # torch must not be imported yet
    torch = Path(str(found and found.origin)).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild(f"torch {version} brings the real CUDA; the pretend device needs a build for the CPU only")
    program = next((path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None)
    if program is None:
        raise CannotBuild("the pretend CUDA device needs a C++ compiler: g++ or clang++, or one named by CXX")
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dp-microadam-tests"
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{version} {program}\n".encode() + SOURCE.read_bytes()).hexdigest()[:24]
    target = folder / f"pretend_cuda-{key}.so"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(program, torch, target)
    return target


def _compile(program: str, torch: Path, target: Path) -> None:
    half = target.with_suffix(f".{os.getpid()}")
    include, lib = torch / "include", torch / "lib"
    command = [program, "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    command += [f"-L{lib}", f"-Wl,-rpath,{lib}", str(SOURCE), "-o", str(half), "-lc10", "-ltorch_cpu", "-ltorch"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        half.unlink(missing_ok=True)
        raise CannotBuild(f"{program} could not compile the pretend CUDA device:\n{done.stderr[-4000:]}")
    half.rename(target)
