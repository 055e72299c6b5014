"""Pages in a real browser: every section is there, nothing overflows or is cut, on a phone, on a desk and on paper."""

import subprocess

import pytest

pytest.importorskip("matplotlib")

from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.reporting.report import write_report

pytestmark = pytest.mark.browser

QUICK = ["--set", "model=mlp", "--set", "batch_size=64", "--set", "steps=12", "--set", "evaluate_every=4", "--quiet"]
REST = ["learning", "budget", "course", "memory", "audit", "settings"]
SECTIONS = {"run": ["privacy", "accuracy", "summary", *REST], "several": ["summary", "privacy", "accuracy", *REST]}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a run with an audit, and of several runs."""
    here = tmp_path_factory.mktemp("pages")
    names = ("run", "a-run-with-a-name-that-is-really-quite-long-20261116-1", "unprotected")
    for name, more in zip(
        names,
        (["method=dp-microadam", "ema_decay=0.9"], ["seed=1"], ["method=non-private"]),
        strict=True,
    ):
        changes = [part for one in more for part in ("--set", one)]
        assert main(["train", "demo", *QUICK, *changes, "--run-dir", str(here / name)]) == 0
    audit = ["audit", "--canaries", "400", "--repetitions", "100", "--quiet", "--confidence", "0.9999999"]
    assert main([*audit, "--out", str(here / "run")]) == 0
    folders = {"run": [here / "run"], "several": [here / name for name in names]}
    return {
        kind: write_report(paths, here / f"{kind}.html", files=False)[0].read_text(encoding="utf-8")
        for kind, paths in folders.items()
    }


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["run", "several"])
def test_every_section_is_there_and_nothing_overflows(pages, browser, tmp_path, kind, width):
    picture = tmp_path / "page.png"
    seen = browser.look(pages[kind], width, picture=picture)
    assert list(seen["sections"]) == SECTIONS[kind]
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
