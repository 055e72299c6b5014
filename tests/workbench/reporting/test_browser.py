"""Pages in a real browser: every section is there, nothing overflows or is cut, on a phone, on a desk and on paper."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape

import pytest

pytest.importorskip("matplotlib")

from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.reporting.report import write_report

pytestmark = pytest.mark.browser

QUICK = ["--set", "model=mlp", "--set", "batch_size=64", "--set", "steps=12", "--set", "evaluate_every=4", "--quiet"]
REST = ["learning", "budget", "course", "memory", "audit", "settings"]
SECTIONS = {"run": ["privacy", "accuracy", "summary", *REST], "several": ["summary", "privacy", "accuracy", *REST]}


# The page stands in a frame of the wanted width: windows of a headless browser have a least width, frames have none.
_FRAME = """<!doctype html><html><body style="margin:0"><iframe id="page" style="border:0;width:{width}px;height:{height}px"
srcdoc="{page}"></iframe><pre id="measured" hidden></pre><script>
document.getElementById("page").onload = function () {{
  const inside = this.contentDocument, root = inside.documentElement, seen = {{}};
  for (const section of inside.querySelectorAll("section[id]")) seen[section.id] = section.getBoundingClientRect().height;
  const scrolls = (one) => one.closest(".scroll") !== null;
  const outside = [...inside.body.querySelectorAll("*")].filter(
    (one) => !scrolls(one) && !one.closest("svg") && one.getBoundingClientRect().right > {width} + 0.5
  ).map((one) => one.tagName + "." + one.className + " " + one.textContent.slice(0, 40));
  const cut = [];
  for (const svg of inside.querySelectorAll("svg")) {{
    const box = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {{
      const own = text.getBoundingClientRect();
      if (own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1)
        cut.push(text.textContent);
    }}
  }}
  const least = Math.min(...[...inside.querySelectorAll("svg text")].map((one) => {{
    const svg = one.closest("svg");
    return parseFloat(getComputedStyle(one).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  }}));
  document.getElementById("measured").textContent = JSON.stringify({{
    width: root.scrollWidth, height: root.scrollHeight, sections: seen, outside: outside, cut: cut, smallest_text: least,
    background: getComputedStyle(inside.body).backgroundColor, requests: performance.getEntriesByType("resource").length,
  }});
}};
</script></body></html>"""


@dataclass
class Browser:
    program: str
    folder: object

    def look(self, page, width, *, dark=False, picture=None):
        """What the browser makes of ``page`` (HTML) at this width; with ``picture``, a PNG of all of it."""
        measured = self._measure(page, width, 800, dark)
        if picture is not None:
            self._run(page, width, measured["height"], dark, f"--screenshot={picture}", hidden=True)
        return measured

    def _measure(self, page, width, height, dark):
        shown = self._run(page, width, height, dark, "--dump-dom")
        return json.loads(unescape(re.search(r'<pre id="measured"[^>]*>(.*?)</pre>', shown, re.DOTALL).group(1)))

    def _run(self, page, width, height, dark, *options, hidden=False):
        frame = self.folder / "frame.html"
        frame.write_text(_FRAME.format(width=width, height=height, page=escape(page)), encoding="utf-8")
        command = [
            self.program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000",
            f"--user-data-dir={self.folder / 'profile'}", f"--window-size={max(width, 500) if not hidden else width},{height}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", *options, frame.as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    return Browser(program, tmp_path_factory.mktemp("browser"))


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
