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
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
NOTES = sorted((ROOT / "research").glob("*.md"))
NAMED = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


@pytest.mark.parametrize("document", [*PAGES, *NOTES], ids=lambda path: path.name)
def test_every_test_a_document_names_exists(document):
    for file, name in NAMED.findall(document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{document.name} names {file}::{name}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^ *- (?:[^#:\n]+: )?(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


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


def test_no_document_holds_the_marks_of_a_merge():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        assert not re.search(r"^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE), page.name


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


def test_every_way_to_lose_the_guarantee_has_its_row():
    table = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8").partition("## Ways to lose")[2]
    rows = [line.casefold() for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    for way in (
        "division by the realised batch",
        "sensitivity not aligned with noise",
        "accounting that does not match sampling",
        "private metadata made public",
        "unclear neighbouring relation",
        "empty batches",
        "non-finite gradients",
        "gradient accumulation",
        "operations across examples",
        "auxiliary outputs",
        "predictable randomness",
        "floating-point noise",
        "numerical error in accounting",
    ):
        assert sum(row.startswith(f"| {way}") for row in rows) == 1, way
    assert len({row.split("|")[1] for row in rows}) == len(rows), "each way has one row"
    assert len({row.split("|")[3] for row in rows}) == len(rows), "no two rows have the same tests"
