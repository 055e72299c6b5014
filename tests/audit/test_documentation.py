"""The example in the document runs, and says what it should."""

import re
from pathlib import Path


def test_the_example_of_an_own_pipeline_is_caught(capsys):
    document = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    exec(compile(example, "audit.md", "exec"), {})
    assert "claimed 1.00: violated is True" in capsys.readouterr().out
