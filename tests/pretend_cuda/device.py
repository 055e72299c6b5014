"""The device the battery runs on: a pretend CUDA device in host memory, or the real one that ``DP_MICROADAM_DEVICE`` names.

The pretend device has to be installed before torch is imported, since torch looks for CUDA once. So it lives in processes of
its own, which :mod:`pretend_cuda.test_pretend_cuda` starts.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import SimpleNamespace
from typing import Any

from pretend_cuda import build

COUNT = 2
"""Number of pretend GPUs: with two, what forgets which GPU it was asked for is noticed."""


def real_device() -> str | None:
    """The real device that the battery was asked to run on, such as "cuda", or None for the pretend one."""
    return os.environ.get("DP_MICROADAM_DEVICE")


def install() -> str:
    """Make the device available in this process and return its name.

    Raises:
        build.CannotBuild: if there is no real device and no pretend one can be compiled.
    """
    given = real_device()
    if given is not None:
        return given
    assert "torch" not in sys.modules, "torch looks for CUDA only once, when it is imported"
    os.environ["PRETEND_CUDA_DEVICES"] = str(COUNT)
    loaded = ctypes.CDLL(str(build.library()), mode=ctypes.RTLD_GLOBAL)
    import torch

    _show_to_python(torch, loaded)
    # Not the default device: what says "cuda" where it should say which one is noticed.
    return "cuda:1"


def _show_to_python(torch: Any, loaded: ctypes.CDLL) -> None:
    """What ``torch.cuda`` answers on a build without CUDA, replaced by the pretend device's answers."""
    properties = SimpleNamespace(name="pretend GPU", total_memory=2**34, major=8, minor=0, multi_processor_count=108)
    answers = {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: COUNT,
        "current_device": torch._C._accelerator_getDeviceIndex,
        "set_device": lambda device: torch._C._accelerator_setDeviceIndex(_index(torch, device)),
        "_exchange_device": torch._C._accelerator_exchangeDevice,
        "_maybe_exchange_device": torch._C._accelerator_exchangeDevice,
        "synchronize": lambda device=None: _synchronized(),
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1,  # memory is not counted; benchmarks divide by it
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(torch.cuda.random, name):  # imported there by name
            setattr(torch.cuda.random, name, answer)
    loaded.pretend_cuda_hand_out_defaults(1)
    torch.cuda.default_generators = tuple(torch.Generator(f"cuda:{index}") for index in range(COUNT))
    loaded.pretend_cuda_hand_out_defaults(0)
    storage = torch.UntypedStorage
    storage.cpu = lambda self: _copied(torch, self, torch.device("cpu"))
    storage.clone = lambda self: _copied(torch, self, self.device)
    storage.to = lambda self, *, device, non_blocking=False: _copied(torch, self, torch.device(device))


def _index(torch: Any, device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _copied(torch: Any, storage: Any, device: Any) -> Any:
    """A copy of a storage through tensors: on a build without CUDA storages know the CPU only."""
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return tensor.to(device, copy=True).untyped_storage()


def _synchronized() -> None:
    from pretend_cuda.watch import note_synchronisation

    note_synchronisation("torch.cuda.synchronize")
