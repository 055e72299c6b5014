"""``dp-microadam doctor``: show versions, devices and data sets, check that clipped gradients are exact on this machine, and
measure which clipping strategies are fast on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_microadam.workbench.command_line.strategy_times import StrategyTimes

_REQUIRED = ("torch", "numpy", "scipy", "rich", "safetensors", "tomli-w", "argcomplete")
_OPTIONAL = {
    "numba": "fast",
    "triton": "gpu",
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
        "per-example gradients on random networks. Exit code 1 if they differ. On a GPU, and elsewhere with --measure, time "
        "the clipping strategies on typical layers beside the one that is chosen.",
        epilog="examples:\n  dp-microadam doctor --seconds 10\n  dp-microadam doctor --measure --out doctor.json",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="duration of the self-check per device (default: 10)"
    )
    parser.add_argument("--measure", action="store_true", help="time clipping strategies on the CPU too, not only on GPUs")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="physical batch of those timings (default: 64)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write versions, checks and timings to a file that can be sent"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.validation import require_positive

    require_positive("seconds", options.seconds)
    require_positive("batch", options.batch)
    if options.out:
        from dp_microadam.workbench.command_line.measuring import require_new_file

        require_new_file(options.out)
    report: dict[str, Any] = {"versions": _versions(), "devices": _devices(), "data": _data()}
    if not options.json:
        _print_findings(report)
        print(
            f"comparing sums of clipped gradients with per-example gradients for {options.seconds:g} seconds on each device …",
            flush=True,
        )
    report["self_check"] = _self_check(options.seconds)
    report["exact"] = all(check["exact"] for check in report["self_check"])
    if not options.json:
        for check in report["self_check"]:
            print(_verdict(check))
    report["strategies"] = _measure(options)
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    if options.out:
        _write(options.out, report)
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


def _devices() -> list[dict[str, str]]:
    import torch

    found = [{"device": "cpu", "what": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({"device": f"cuda:{index}", "what": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"})
    return found


def _data() -> list[dict[str, str | None]]:
    from dp_microadam.workbench.data.catalogue import KNOWN_DATA
    from dp_microadam.workbench.data.sources import inspect

    found = [inspect(name) for name in KNOWN_DATA]
    return [{"name": one.name, "state": one.state, "place": one.place} for one in found if one.state != "yours"]


def _self_check(seconds: float) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from dp_microadam.clipping.self_check import check_exactness

    checks = [check_exactness(seconds, device["device"]) for device in _devices()]
    return [{**asdict(check), "exact": check.exact} for check in checks]


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Timings of clipping strategies, by device."""
    from dp_microadam.workbench.command_line.strategy_times import measure_strategies, summary

    found: dict[str, Any] = {}
    for device in (one["device"] for one in _devices()):
        if device == "cpu" and not options.measure:
            continue
        if not options.json:
            print(
                f"\n{device}: milliseconds of norms and clipped sum of single layers, batch {options.batch}, by strategy",
                flush=True,
            )
        layers = []
        for times in measure_strategies(device, options.batch):
            layers.append(times)
            if not options.json:
                print(_timing(times), flush=True)
        found[device] = {**summary(layers), "layers": [times.as_dict() for times in layers]}
        if not options.json:
            print(_judgement(device, found[device]))
    return found


def _timing(times: StrategyTimes) -> str:
    each = "  ".join(f"{name} {taken:8.2f}" for name, taken in times.milliseconds.items())
    forming = f"  (formed {' '.join(f'{name} {taken:.2f}' for name, taken in times.forming.items())})" if times.forming else ""
    verdict = "fastest" if times.chosen == times.fastest else f"{times.loss:.2f}× {times.fastest}"
    return f"{times.layer:36} {each}  chosen {times.chosen}: {verdict}{forming}"


def _judgement(device: str, found: dict[str, Any]) -> str:
    return (
        f"{device}: the chosen strategy is the fastest for {100 * found['chosen_fastest']:.0f} % of the layers, and at worst "
        f"takes {found['worst_loss']:.2f} times as long"
    )


def _write(path: Path, report: dict[str, Any]) -> None:
    from dp_microadam.workbench.command_line.measuring import default_device, write_measurements

    kept = ("versions", "devices", "self_check", "exact", "strategies")  # not where data sets are: names of folders are private
    write_measurements(path, "doctor", default_device(), {key: report[key] for key in kept})


def _print_findings(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def how_to_get(name: str) -> str:
        return f"not installed; pip install 'dp-microadam[{_OPTIONAL[name]}]'" if name in _OPTIONAL else "not installed"

    console = Console(highlight=False)
    for title, rows in (
        ("Versions", [(name, version or how_to_get(name)) for name, version in report["versions"].items()]),
        ("Devices", [(one["device"], one["what"]) for one in report["devices"]]),
        ("Data found", [(one["name"], f"{one['state']} {one['place'] or ''}".strip()) for one in report["data"]]),
    ):
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(table)


def _verdict(check: dict[str, Any]) -> str:
    where = f"{check['device']}: {check['networks']} networks, largest relative deviation {check['deviation']:.1e}"
    if check["exact"]:
        return f"{where}: exact"
    return (
        f"{where} in {check['worst']}: NOT EXACT, do not train on this device; try another build of torch and report this with "
        "dp-microadam doctor --json"
    )
