"""Writes ``guarantee_tests.md``: the tests of promises, from ``guarantee_tests.toml``."""

import tomllib
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
PROMISES: dict[str, dict[str, list[str]]] = tomllib.loads(
    PAGE.with_suffix(".toml").read_text(encoding="utf-8")
)
"""Tests by subject and promise. Rows of the tables in ``guarantees.md`` come first."""

_INTRODUCTION = """# Tests of the guarantees

The tests that stand behind each row of
[Guarantees and their limits](guarantees.md#ways-to-lose-the-guarantee-silently), and behind
what other pages promise. Written by `python docs/guarantee_tests.py` from
`docs/guarantee_tests.toml`.
"""


def page() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for subject, promises in PROMISES.items():
        lines += [f"## {subject}", ""]
        for promise, tests in promises.items():
            lines += [f"**{promise}**", "", *(f"- `{test}`" for test in tests), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
