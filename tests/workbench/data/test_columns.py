"""Declared columns of a table: what each cell becomes, and that checking and training see the same."""

import csv

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data.columns import Columns
from dp_microadam.workbench.data.sources import check
from dp_microadam.workbench.recipes import Recipe

DECLARED = {
    "age": {"kind": "number", "range": [0, 100], "missing": "?"},
    "gain": {"kind": "number", "range": [0, 999], "log": True},
    "work": {"kind": "category", "values": ["office", "field"], "missing": ["?", ""]},
    "town": {"kind": "category", "values": ["a", "b"], "other": True},
    "name": {"kind": "ignored"},
}
OPTIONS = {"label": "outcome", "classes": ["ill", "well"]}


def row(**cells):
    usual = {"age": "50", "gain": "0", "work": "field", "town": "a", "name": "x"}
    return {**usual, **{name: str(cell) for name, cell in cells.items()}}


@pytest.mark.parametrize(
    ("changed", "at", "expected"),
    [
        ({"age": 75}, slice(0, 2), [0.5, 0]),
        ({"age": "?"}, slice(0, 2), [0, 1]),
        ({"age": -3}, slice(0, 2), [-1, 0]),  # clamped
        ({"age": "1e30"}, slice(0, 2), [1, 0]),
        ({"gain": 0}, slice(2, 3), [-1]),
        ({"gain": 9}, slice(2, 3), [2 / 3 - 1]),  # log₁₀ of 10 in [1, 1000]
        ({"work": "office"}, slice(3, 6), [1, 0, 0]),
        ({"work": " field "}, slice(3, 6), [0, 1, 0]),
        ({"work": ""}, slice(3, 6), [0, 0, 1]),
        ({"town": "b"}, slice(6, 9), [0, 1, 0]),
        ({"town": "nowhere"}, slice(6, 9), [0, 0, 1]),
    ],
)
def test_a_cell_becomes_what_is_declared(changed, at, expected):
    columns = Columns.of(DECLARED)
    vector = columns.vector(row(**changed))
    assert len(vector) == columns.width == 9
    assert vector[at] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("column", "given", "message"),
    [
        ("age", 3, r"columns.age is 3; it must be like"),
        ("age", {"range": [0, 1]}, r"columns.age is .*; it must be like"),
        ("age", {"kind": "text"}, "of kind number, category or ignored"),
        ("age", {"kind": "number"}, r"columns.age.range is None; it must be two numbers, the smaller first: public limits"),
        ("age", {"kind": "number", "range": [9, 1]}, r"columns.age.range is \[9, 1\]"),
        ("age", {"kind": "number", "range": [0, float("nan")]}, r"columns.age.range"),
        ("age", {"kind": "number", "range": [0, 9], "log": 1}, r"columns.age.log is 1; it must be true or false"),
        ("age", {"kind": "number", "range": [0, 9], "values": ["a"]}, r"columns.age.values = \['a'\] is unknown; a number"),
        ("work", {"kind": "category"}, r"columns.work.values is None; it must name all values"),
        ("work", {"kind": "category", "values": ["a", "a"]}, "a list of different texts"),
        ("work", {"kind": "category", "values": ["a", True]}, "a list of texts"),
        ("work", {"kind": "category", "values": ["a", "?"], "missing": "?"}, "all values but the missing one"),
        ("name", {"kind": "ignored", "missing": "?"}, r"columns.name.missing = '\?' is unknown"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_by_its_column(column, given, message):
    with pytest.raises(InputError, match=message) as refusal:
        recipe(columns={**DECLARED, column: given})
    assert "\n" not in str(refusal.value)


def recipe(**more):
    given = {"name": "t", "data": "table", "model": "mlp", "epsilon": 3.0, "steps": 2, "batch_size": 4, "data_options": OPTIONS}
    return Recipe(**{**given, "columns": DECLARED, **more})


def test_declarations_survive_in_the_configuration_of_a_run():
    again = Recipe.from_toml(recipe().to_toml())
    assert again == recipe()
    assert list(again.columns) == list(DECLARED)
    assert Columns.of(again.columns).vector(row()) == Columns.of(DECLARED).vector(row())
    with pytest.raises(InputError, match="data is 'digits'; they are for 'table'"):
        data.load("digits", columns=DECLARED)
    with pytest.raises(InputError, match="at least one column must be an input"):
        recipe(columns={"name": {"kind": "ignored"}})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mean": [0.0]}, "data_options.mean is .* but .columns. gives ranges"),
        ({"label": "age"}, "columns.age is declared, but data_options.label is the same column"),
        ({"user_column": "name"}, "columns.name is declared, but data_options.user_column"),
        ({"header": "age"}, "data_options.header is 'age'; it must be a list"),
    ],
)
def test_options_that_contradict_declared_columns_are_refused(tmp_path, more, message):
    (tmp_path / "all.csv").write_text("age\n1\n")
    with pytest.raises(InputError, match=message):
        data.load("table", str(tmp_path / "all.csv"), columns=DECLARED, **{**OPTIONS, **more})


CELLS = {
    "age": ["3", "50.5", "?", "1e9", " 7 ", "x4711", "", "nan", "1_0"],
    "gain": ["0", "12", "-1", "x4711", ""],
    "work": ["office", " field", "?", "", "x4711"],
    "town": ["a", "b", "x4711", ""],
    "name": ["x4711", "", "a,b", 'say "x"', "two\nlines"],
    "outcome": ["ill", "well", " ill", "x4711", ""],
}
GOOD = {name: cells[:2] for name, cells in CELLS.items()} | {"name": CELLS["name"]}


@st.composite
def files(draw):
    """A CSV file that is right, or has a few things wrong: cells, rows, columns, names."""
    names = draw(st.permutations(list(CELLS)))
    rows = [[draw(st.sampled_from(GOOD[name])) for name in names] for _ in range(draw(st.integers(0, 12)))]
    for _ in range(draw(st.integers(0, 2)) if rows else 0):
        at, column = draw(st.integers(0, len(rows) - 1)), draw(st.sampled_from(names))
        rows[at][names.index(column)] = draw(st.sampled_from(CELLS[column]))
    header = list(names)
    change = draw(
        st.sampled_from(["none"] * 8 + ["short row", "long row", "no column", "new column", "same name", "blank", "cr"])
    )
    if change == "short row" and rows:
        rows[-1].pop()
    elif change == "long row" and rows:
        rows[0].append("x4711")
    elif change == "no column":
        header, rows = header[1:], [row[1:] for row in rows]
    elif change == "new column":
        header, rows = [*header, "new"], [[*row, "1"] for row in rows]
    elif change == "same name":
        header[0] = header[1]
    lines = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in (header, *rows)]
    return ("\r\n" if change == "cr" else "\n").join(lines) + ("\n\n" if change == "blank" else "")


@examples(150)
@given(files())
def test_check_and_training_agree_on_every_file_and_tell_no_value(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("table") / "all.csv"
    path.write_text(text, newline="")
    options = {"columns": DECLARED, "validation_fraction": 0.5, **OPTIONS}
    found = check("table", str(path), **options)
    try:
        loaded = data.load("table", str(path), **options)
    except InputError as refusal:
        assert found.problems
        for sentence in (str(refusal), *found.problems):
            assert str(path) in sentence or "must leave at least one in each part" in sentence
            assert "4711" not in sentence.replace(str(path), "")
            assert "\n" not in sentence
        return
    assert not found.problems
    rows = list(csv.DictReader(text.splitlines(keepends=True)))
    expected = sorted((Columns.of(DECLARED).vector(row), OPTIONS["classes"].index(row["outcome"].strip())) for row in rows)
    parts = (loaded.train, loaded.validation, loaded.test)
    actual = sorted((x.tolist(), int(y)) for inputs, labels in parts for x, y in zip(inputs, labels, strict=True))
    assert [label for _, label in actual] == [label for _, label in expected]
    torch.testing.assert_close(torch.tensor([x for x, _ in actual]), torch.tensor([x for x, _ in expected]))
