"""Pages in a real browser: every section is there, nothing overflows or is cut, on a phone, on a desk and on paper."""

import json
import math
import random
import subprocess

import pytest

pytest.importorskip("matplotlib")

from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.reporting.report import write_report

pytestmark = pytest.mark.browser

QUICK = ["--set", "model=mlp", "--set", "batch_size=64", "--set", "steps=12", "--set", "evaluate_every=4", "--quiet"]
REST = ["learning", "budget", "course", "memory", "diagnostics", "audit", "settings"]
SECTIONS = {"run": ["privacy", "accuracy", "summary", *REST], "several": ["summary", "privacy", "accuracy", *REST]}
SWEEP_SECTIONS = [f"sigma-sweep-{part}" for part in ("about", "results", "figures", "privacy", "details")]
NOISE = "noise multiplier σ"


def write_sweep_files(folder):
    """All kinds of figures, five methods, long names, and cells that are not run."""
    draw = random.Random(1)
    methods = ["DP-Adam", "DP-AdamBC", "Scale-then-privatize", "DP-MicroAdam, scope of a block, 4 bits", "DP-SGD"]
    cells = [{NOISE: noise, "method": method} for noise in (3, 4, 5, 6, 8) for method in methods]
    told = {
        "name": "sigma-sweep", "title": "CIFAR-10 at ε = 8", "question": "Which noise multiplier suits which optimizer?",
        "scale": "cpu", "command": "python -m research reproduce sigma-sweep --set " + "x" * 90, "rows": [NOISE],
        "columns": ["method"], "notes": ["n" * 120], "paper_source": "Table 4 of the paper", "cells": cells,
        "paper": [{"cell": one, "value": 65.0 + index % 7, "spread": 0.17} for index, one in enumerate(cells)],
        "figures": [
            {"kind": "lines", "x": NOISE}, {"kind": "curves", "panel": NOISE}, {"kind": "range", "group": "method"},
            {"kind": "difference", "of": methods[3], "minus": ["DP-Adam", "DP-SGD"], "x": NOISE, "y": "parameters"},
        ],
    }  # fmt: skip
    folder.mkdir()
    (folder / "experiment.json").write_text(json.dumps(told), encoding="utf-8")
    with open(folder / "results.jsonl", "w", encoding="utf-8") as file:
        for one in cells[:-2]:
            for repeat in (1, 2, 3):
                curve = [[30 * t, 1 + math.exp(-t / 20) + draw.gauss(0, 0.02), 0.5] for t in range(1, 61)]
                outcome = {"cell": one, "repeat": repeat, "value": 60 + draw.gauss(0, 3), "epsilon": 7.99, "delta": 1e-5}
                outcome |= {"private": True, "steps": 1800, "parameters": 26010 * (1 + one[NOISE] % 2), "seconds": 301.2}
                file.write(json.dumps(outcome | {"curve": curve, "machine": "two cores", "commit": "abc1234"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a run with an audit, of several runs, and of a sweep."""
    here = tmp_path_factory.mktemp("pages")
    names = ("run", "a-run-with-a-name-that-is-really-quite-long-20261116-1", "unprotected")
    for name, more in zip(
        names,
        (["method=dp-microadam", "ema_decay=0.9", "diagnostics_every=6"], ["seed=1"], ["method=non-private"]),
        strict=True,
    ):
        changes = [part for one in more for part in ("--set", one)]
        assert main(["train", "demo", *QUICK, *changes, "--run-dir", str(here / name)]) == 0
    audit = ["audit", "--canaries", "400", "--repetitions", "100", "--quiet", "--confidence", "0.9999999"]
    assert main([*audit, "--out", str(here / "run")]) == 0
    sweep = write_sweep_files(here / "sweep")
    folders = {"run": [here / "run"], "several": [here / name for name in names], "sweep": [sweep]}
    return {
        kind: write_report(paths, here / f"{kind}.html", files=False)[0].read_text(encoding="utf-8")
        for kind, paths in folders.items()
    }


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["run", "several", "sweep"])
def test_every_section_is_there_and_nothing_overflows(pages, browser, tmp_path, kind, width):
    picture = tmp_path / "page.png"
    seen = browser.look(pages[kind], width, picture=picture)
    assert list(seen["sections"]) == SECTIONS.get(kind, SWEEP_SECTIONS)
    assert min(seen["sections"].values()) > 80
    assert seen["width"] == width
    assert seen["outside"] == []
    assert seen["cut"] == []
    assert seen["smallest_text"] > 8.5  # pixels, in figures
    assert seen["requests"] == 0
    assert size_of_png(picture) == (width, seen["height"])


def size_of_png(path):
    head = path.read_bytes()[:24]
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_pages_follow_light_and_dark(pages, browser):
    light, dark = (brightness(browser.look(pages["run"], 390, dark=dark)["background"]) for dark in (False, True))
    assert light > 240
    assert dark < 40


def brightness(colour):
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3


def test_pages_can_be_printed(pages, browser, tmp_path):
    (tmp_path / "page.html").write_text(pages["run"], encoding="utf-8")
    paper = tmp_path / "page.pdf"
    command = [browser.program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--print-to-pdf={paper}", (tmp_path / "page.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert paper.read_bytes().startswith(b"%PDF")
    assert 2 <= paper.read_bytes().count(b"/Type /Page\n") <= 12
