"""A real browser for pages: how wide they are, what they show, and a picture."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape

import pytest

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
