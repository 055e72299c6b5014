"""``dp-microadam doctor``: show versions and devices, and check that clipped gradients are exact on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

from dp_microadam.workbench.command_line.arguments import add_json
from dp_microadam.workbench.command_line.running import print_table

_PACKAGES = (
    *("torch", "numpy", "scipy", "rich", "safetensors", "jinja2", "tomli-w", "argcomplete", "numba", "cryptography"),
    *("matplotlib", "pillow", "mlxtend", "transformers", "accelerate", "peft", "lightning", "opacus"),
)

INEXACT = 1
"""Exit code if the self-check fails."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="show versions and devices, and self-check the clipped gradients",
        description="Show installed versions and devices, then compare the engine's norms and sums of clipped gradients with "
        "autograd's on each device. Exit code 1 if they differ. What --json prints can be sent: it has no names of hosts, "
        "users or folders.",
        epilog="example:\n  dp-microadam doctor --json > doctor.json",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    report: dict[str, Any] = {"versions": _versions(), "devices": devices()}
    if not options.json:
        print_table("Versions", ("", ""), [(name, found or "not installed") for name, found in report["versions"].items()])
        print_table("Devices", ("", ""), [tuple(device.values()) for device in report["devices"]])
    report["self_check"] = {device["device"]: self_check(device["device"]) for device in report["devices"]}
    report["exact"] = not any(report["self_check"].values())
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for device, wrong in report["self_check"].items():
            advice = "do not train on this device; try another build of torch and report this with dp-microadam doctor --json"
            print(f"{device}: clipped gradients are " + (f"NOT EXACT, {advice}: {wrong}" if wrong else "exact"))
    return 0 if report["exact"] else INEXACT


def self_check(device: str) -> str | None:
    """What is wrong with clipped gradients on a device, by every strategy; None if they are those of autograd."""
    import torch
    from torch import nn

    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.errors import InputError, PrivacyError
    from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), WeightStandardizedConv2d(8, 8, 3, stride=2)]
    attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(*convolutions, nn.Flatten(2), attention, nn.Flatten(), nn.Linear(128, 3)).to(device)
    for strategy in ("ghost", "keep", "drop"):
        engine = ClippedGradients(model, lambda model, x: model(x).sin().sum(1), max_grad_norm=1.0, strategy=strategy)
        try:
            engine.check_independence(torch.rand(3, 3, 10, 10, device=device))
        except (InputError, PrivacyError) as error:
            return f"{strategy}: {error}"
    return None


def _versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    from dp_microadam import __version__

    found: dict[str, str | None] = {"dp-microadam": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[dict[str, str]]:
    """The CPU and every GPU."""
    import torch

    found = [{"device": "cpu", "what": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({"device": f"cuda:{index}", "what": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"})
    return found
