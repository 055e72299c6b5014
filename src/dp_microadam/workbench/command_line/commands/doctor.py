"""``dp-microadam doctor``: show versions, devices and data sets, and check that clipped gradients are exact on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict
from typing import Any

from dp_microadam.workbench.command_line.arguments import add_json
from dp_microadam.workbench.command_line.tables import print_table

_REQUIRED = ("torch", "numpy", "scipy", "rich", "safetensors", "tomli-w", "argcomplete")
_OPTIONAL = {
    "numba": "fast",
    "cryptography": "secure",
    "matplotlib": "plots",
    "pillow": "images",
    "mlxtend": "demo",
    "transformers": "hugging-face",
    "accelerate": "hugging-face",
    "lightning": "lightning",
    "opacus": "opacus",
}
"""Optional packages, and the extra that installs each."""

INEXACT = 1
"""Exit code if the self-check fails."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="show versions, devices and data sets, and self-check the clipped gradients",
        description="Show installed versions, devices and data sets, then compare the engine's sums of clipped gradients with "
        "per-example gradients on random networks. Exit code 1 if they differ. What --json prints can be sent: it has no names "
        "of hosts, users or folders.",
        epilog="examples:\n  dp-microadam doctor --seconds 10\n  dp-microadam doctor --json > doctor.json",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="duration of the self-check per device (default: 10)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.clipping.self_check import check_exactness
    from dp_microadam.validation import require_positive

    seconds = require_positive("seconds", options.seconds)
    report: dict[str, Any] = {"versions": _versions(), "devices": devices(), "data": _data()}
    if not options.json:
        versions = [(name, version or _how_to_get(name)) for name, version in report["versions"].items()]
        print_table("Versions", ("", ""), versions)
        print_table("Devices", ("", ""), [tuple(device.values()) for device in report["devices"]])
        print_table("Data", ("", ""), list(report["data"].items()))
        print(
            f"comparing sums of clipped gradients with per-example gradients, {seconds:g} seconds on each device …", flush=True
        )
    checks = [check_exactness(seconds, device["device"]) for device in report["devices"]]
    report["self_check"] = [{**asdict(check), "exact": check.exact} for check in checks]
    report["exact"] = all(check.exact for check in checks)
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
        return 0 if report["exact"] else INEXACT
    for check in checks:
        where = f"{check.device}: {check.networks} networks, largest relative deviation {check.deviation:.1e}"
        wrong = (
            f" in {check.worst}: NOT EXACT, do not train on this device; try another build of torch and report this with "
            "dp-microadam doctor --json"
        )
        print(f"{where}: exact" if check.exact else f"{where}{wrong}")
    return 0 if report["exact"] else INEXACT


def _versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    from dp_microadam import __version__

    found: dict[str, str | None] = {"dp-microadam": __version__, "python": platform.python_version()}
    for name in (*_REQUIRED, *_OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _how_to_get(name: str) -> str:
    return f"not installed; pip install 'dp-microadam[{_OPTIONAL[name]}]'" if name in _OPTIONAL else "not installed"


def devices() -> list[dict[str, str]]:
    """The CPU and every GPU."""
    import torch

    found = [{"device": "cpu", "what": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({"device": f"cuda:{index}", "what": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"})
    return found


def _data() -> dict[str, str]:
    """The state of each published data set."""
    from dp_microadam.workbench.data.catalogue import KNOWN_DATA
    from dp_microadam.workbench.data.sources import inspect

    found = [inspect(name) for name in KNOWN_DATA]
    return {one.name: one.state for one in found if one.state != "yours"}
