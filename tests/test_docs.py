"""What the documents say is true: the tests they name exist, every page is in the navigation, and the site builds."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from dp_microadam.methods.table import METHODS

ROOT = Path(__file__).parents[1]
reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
tests_of = runpy.run_path(str(ROOT / "docs" / "guarantee_tests.py"))
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
NOTES = sorted((ROOT / "research").glob("*.md"))
NAMED = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


@pytest.mark.parametrize("document", [*PAGES, *NOTES], ids=lambda path: path.name)
def test_every_test_a_document_names_exists(document):
    for file, name in NAMED.findall(document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{document.name} names {file}::{name}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *NOTES], ids=lambda path: path.name)
def test_every_link_of_a_page_outside_the_site_leads_somewhere(page):
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, _, place in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if target.startswith("https://"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if place and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in {re.sub(r"[^\w -]", "", one.casefold()).replace(" ", "-") for one in headings}, f"{target}#{place}"


def test_the_site_builds_without_a_warning(tmp_path):
    # Strict by mkdocs.yml: a link, an anchor, a picture or a name of the reference that leads nowhere fails it.
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "Formal guarantees" in shown
    assert ":class:" not in shown
    assert all(f'"{name}"' in shown for name in METHODS), "the table of methods"


def test_every_public_name_is_in_the_reference():
    import dp_microadam

    shown = {name for name, _, _ in reference["ROW"].findall(reference["PAGE"].read_text(encoding="utf-8"))}
    of_the_table = {name.replace("-", "_") for name in METHODS}
    for name in dp_microadam.__all__:
        inside = getattr(getattr(dp_microadam, name), "__all__", None)  # of a module
        assert set(inside or [name]) <= shown | of_the_table | {"__version__"}, name


def test_the_reference_says_what_the_docstrings_say():
    page = reference["PAGE"].read_text(encoding="utf-8")
    assert page == reference["with_current_sentences"](page), "run python docs/reference.py"
    assert ":::" not in page, "directives mean nothing to a reader of the repository"


def test_every_way_to_lose_the_guarantee_has_its_row_and_every_row_its_tests():
    table = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").partition("## Ways to lose")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!way )(.+?) \|", table, re.MULTILINE)
    subjects = re.findall(r"^### (.*)$", table, re.MULTILINE)
    assert rows == [way for subject in subjects for way in tests_of["PROMISES"][subject]]
    for subject, promises in tests_of["PROMISES"].items():
        for promise, tests in promises.items():
            assert tests, f"{subject}: {promise}"
            assert len(set(tests)) == len(tests), promise
    for way in (
        "realised batch size",
        "does not match the clipping norm",
        "does not match the sampling",
        "seeds or counts in logs",
        "neighbouring relation",
        "Empty batches",
        "not finite",
        "Noise per chunk",
        "across examples, such as BatchNorm",
        "Training loss",
        "Predictable randomness",
        "Floating-point",
        "error in accounting",
        "budget overrun",
    ):
        assert sum(way in row for row in rows) == 1, way


def test_the_page_of_tests_is_the_one_that_is_written():
    assert tests_of["PAGE"].read_text(encoding="utf-8") == tests_of["page"](), "run python docs/guarantee_tests.py"
