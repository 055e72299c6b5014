"""docs/report.md says what is so."""

import contextlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from research.experiments.results import Outcome

DOCUMENT = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    with contextlib.chdir(tmp_path):
        exec(code, {})
    assert "Summary(middle=71.2, low=71.2, high=71.2, seeds=1)" in capsys.readouterr().out
    assert (tmp_path / "my-sweep" / "report.html").is_file()
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("field", [field.name for field in fields(Outcome)])
def test_every_field_of_a_result_is_named(field):
    assert f"`{field}`" in DOCUMENT
