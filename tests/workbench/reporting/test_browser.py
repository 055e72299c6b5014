"""Pages in a real browser: every section is there, nothing overflows or is cut, on a phone, on a desk and on paper."""

import json
import re
import shutil
import subprocess
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
_FRAME = """<!doctype html><html><body style="margin:0"><iframe id="page" style="border:0;width:{width}px;height:800px"
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
    width: root.scrollWidth, sections: seen, outside: outside, cut: cut, smallest_text: least,
    requests: performance.getEntriesByType("resource").length,
  }});
}};
</script></body></html>"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Runs a headless browser on a page (HTML), and returns what it prints."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    folder = tmp_path_factory.mktemp("browser")

    def run(page, *options):
        (folder / "page.html").write_text(page, encoding="utf-8")
        fixed = (
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--disable-gpu",
            "--virtual-time-budget=10000",
            "--window-size=1300,800",
        )
        command = [program, *fixed, f"--user-data-dir={folder / 'profile'}", *options, (folder / "page.html").as_uri()]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    return run


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
def test_every_section_is_there_and_nothing_overflows(pages, browse, kind, width):
    shown = browse(_FRAME.format(width=width, page=escape(pages[kind])), "--dump-dom")
    seen = json.loads(unescape(re.search(r'<pre id="measured"[^>]*>(.*?)</pre>', shown, re.DOTALL).group(1)))
    assert list(seen["sections"]) == SECTIONS[kind]
    assert min(seen["sections"].values()) > 80
    assert seen["width"] == width
    assert seen["outside"] == []
    assert seen["cut"] == []
    assert seen["smallest_text"] > 8.5  # pixels, in figures
    assert seen["requests"] == 0


def test_pages_can_be_printed(pages, browse, tmp_path):
    browse(pages["run"], f"--print-to-pdf={tmp_path / 'page.pdf'}")
    paper = (tmp_path / "page.pdf").read_bytes()
    assert 2 <= paper.count(b"/Type /Page\n") <= 12
