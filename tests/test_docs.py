"""What the documents say about the tests is true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("**/*.md")), ids=lambda path: path.name)
def test_every_test_a_document_names_exists(document):
    for file, name in NAMED.findall(document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{document.name} names {file}::{name}"


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
        assert any(row.startswith(f"| {way}") for row in rows), way
