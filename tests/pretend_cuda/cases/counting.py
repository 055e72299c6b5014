"""What the watcher refuses and counts: the rules of a real GPU, on operators whose behaviour torch documents."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import torch
from pretend_cuda.cases.comparison import SAME_DRAWS, placed
from pretend_cuda.watch import MixedDevices, Watch
from torch import Tensor, nn


def refusals(device: torch.device) -> None:
    here, host = torch.ones(3, device=device), torch.ones(3)
    other_gpus = [torch.ones(3, device=f"cuda:{i}") for i in range(torch.cuda.device_count()) if i != (device.index or 0)]
    for name, call in {
        "vectors": lambda: here + host,
        "vector of the host is written": lambda: host.add_(here),
        "number of the host is written": lambda: torch.zeros(()).add_(here.sum()),
        "product": lambda: here @ host,
        "number in a product": lambda: torch.addmv(torch.zeros(()), torch.ones(3, 3, device=device), host),
        "indices on a GPU": lambda: host[torch.zeros(1, dtype=torch.long, device=device)],
        "lists": lambda: torch._foreach_add_([here, host], [host, here]),
        **{f"other GPU {tensor.device}": lambda tensor=tensor: here * tensor for tensor in other_gpus},
    }.items():
        with Watch() as watch, suppress(MixedDevices):
            call()
        assert watch.refusals, f"{name} was not refused"
    _ = here + torch.tensor(2.0), here * 2, here[torch.tensor([0, 1])], torch.where(here > 0, here, torch.tensor(0.0))
    torch._foreach_add_([here, host], [here, host])


def synchronisations(device: torch.device) -> None:
    here, mask = torch.ones(4, device=device), torch.tensor([True, False, True, False]).to(device)
    pinned = torch.zeros(4).pin_memory()
    waiting: dict[str, Callable[[], object]] = {
        "item": lambda: here.sum().item(),
        "bool": lambda: bool(here.all()),
        "tolist": lambda: here.tolist(),
        "cpu": lambda: here.cpu(),
        "copy_ from the host": lambda: here.copy_(torch.ones(4)),
        "to the device": lambda: torch.ones(4).to(device),
        "pageable": lambda: torch.ones(4).to(device, non_blocking=True),
        "torch.tensor": lambda: torch.tensor([1.0], device=device),
        "mask": lambda: here[mask],
        "nonzero": lambda: mask.nonzero(),
        "equal": lambda: torch.equal(here, here),
        "allclose": lambda: torch.allclose(here, here),
        "unique": lambda: here.unique(),
        "repeat_interleave": lambda: here.repeat_interleave(mask.long()),
        "synchronize": torch.cuda.synchronize,
    }
    silent: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: (here * 2 + 1).sum(),
        "finite": lambda: here.isfinite().all(),
        "fill by mask": lambda: here.masked_fill(mask, 0.0),
        "set by mask": lambda: here.clone().__setitem__(mask, 0.0),
        "pinned": lambda: pinned.to(device, non_blocking=True),
        "to pinned memory": lambda: here.to("cpu", non_blocking=True),
        "repeat_interleave of known size": lambda: here.repeat_interleave(mask.long(), output_size=2),
        "on the host": lambda: (torch.ones(3).sum().item(), torch.ones(3).nonzero()),
    }
    for name, call in (waiting | silent).items():
        with Watch() as watch:
            call()
        expected = 1 if name in waiting else 0
        assert sum(watch.synchronisations.values()) == expected or not SAME_DRAWS, f"{name}: {watch.synchronisations}"


def launches(device: torch.device) -> None:
    here = torch.ones(4, 4, device=device)
    with Watch() as watch:
        _ = here.view(16), here.t(), here[0], here.expand(2, 4, 4), torch.empty(3, device=device), here.detach(), torch.ones(3)
    assert not watch.launches, watch.launches
    with Watch() as watch:
        _ = here + 1, here @ here, torch.zeros(3, device=device), torch._foreach_mul([here, here], 2.0)
        torch._foreach_mul_([here, here], 2.0)
    assert watch.launches.total() == 5, watch.launches


def lines(device: torch.device) -> None:
    """What is counted is attributed to the line of the project that asked for it."""
    from dp_microadam.optimizers.quantization import dequantize, quantize

    values = torch.rand(2, 128, device=device)
    with Watch() as watch:
        dequantize(*quantize(values + 1))
    files = Counter(line.split(":")[0] for _, line in watch.launches)
    assert files.keys() == {"optimizers/quantization.py", "outside the project"}, files


def round_trips(device: torch.device) -> None:
    """Copies, files and generators stay on their device, as a real one's do."""
    model = nn.Linear(3, 2).to(device)
    placed(copy.deepcopy(model).weight, device, "deep copy")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for place in (None, "cpu"):
        file.seek(0)
        loaded: dict[str, Tensor] = torch.load(file, map_location=place, weights_only=True)
        placed(loaded["weight"], torch.device(place or device), "loaded")
        assert torch.equal(loaded["weight"].cpu(), model.weight.cpu())
    torch.manual_seed(4)
    state = torch.get_rng_state()
    drawn = torch.rand(5, device=device)
    assert torch.equal(state, torch.get_rng_state()), "draws of the device come from its own stream"
    torch.cuda.manual_seed_all(4)
    assert torch.equal(drawn, torch.rand(5, device=device))
    generator = torch.Generator(device).manual_seed(4)
    assert torch.equal(drawn, torch.rand(5, device=device, generator=generator))


CASES = {function.__name__: function for function in (refusals, synchronisations, launches, lines, round_trips)}
