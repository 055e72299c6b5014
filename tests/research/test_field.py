"""The checks of other libraries: what they find of this one, and the table that is made of it."""

import json

import pytest
from research.__main__ import main
from research.commands.field import NAMES, row
from research.field import report
from research.field.report import HOLDS, OURS, REFUSED, USER, Finding, Row, table

QUICK = ("empty", "seeds", "mixing")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES])
def test_this_library_keeps_what_every_row_promises(name):
    """Of the statistical rows, normalization and sampling have false alarms in one of a million runs each."""
    pytest.importorskip("peft" if name == "lora" else "torch")
    assert row(name).checks[OURS]().verdict in (HOLDS, REFUSED)


def test_what_is_found_is_printed_and_kept_beside_what_was_found_elsewhere(tmp_path, capsys, monkeypatch):
    checks = {OURS: lambda: Finding(HOLDS, "0.1"), "Opacus": lambda: Finding(USER, "2")}
    measured = Row("Title", "Promised.", "an issue", checks)
    monkeypatch.setitem(report._MODULES, "Opacus", "not_installed")
    line = {"library": "Opacus", "version": "1", "verdict": "refused", "measured": "5", "commit": "abc1234", "date": "d"}
    (tmp_path / "one.jsonl").write_text(json.dumps(line) + "\n")
    measured.write(tmp_path / "one.jsonl")
    assert "holds: 0.1" in capsys.readouterr().out
    row, _, facts = table({"one": measured}, tmp_path).splitlines()[2:]
    assert row.endswith("| **refused**: 5 | – | – | **holds**: 0.1 |")
    assert "Opacus 1 (abc1234, d)" in facts


def test_an_unknown_row_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["field", "--rows", "noise"])
    assert "invalid choice: 'noise'" in capsys.readouterr().err
