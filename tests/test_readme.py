"""The README's code runs as it stands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from dp_microadam.workbench.command_line.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_examples_on_one_s_own_model_and_in_one_s_own_loop_run(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    epsilon = float(re.fullmatch(r"ε = ([\d.]+) at δ = 1e-05\n", done.stdout).group(1))
    assert 7.9 < epsilon <= 8.0
    for run in ("mine", "loop"):
        assert (tmp_path / "runs" / run / "privacy.txt").read_text().startswith("PRIVATE")


def test_the_plan_in_the_readme_is_the_paper_s(capsys):
    (line,) = re.findall(r"^dp-microadam (plan .*)$", README, flags=re.MULTILINE)
    assert main(shlex.split(line)) == 0
    assert re.search(r"\b2,?480\b", capsys.readouterr().out)
