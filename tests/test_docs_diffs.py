"""The worked examples of the architecture page: its diffs apply to the sources as they are, and what it runs on them passes.

`make test` applies them and checks style and syntax; `make test-all` also runs the page's commands on the patched tree.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for line in re.findall(r"^(?:pytest|dp-microadam) .*$", PAGE, re.MULTILINE)]


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """A copy of the project with all diffs of the page."""
    tree = tmp_path_factory.mktemp("patched")
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    for number, diff in enumerate(DIFFS):
        (tree / f"{number}.diff").write_text(diff, encoding="utf-8")
        subprocess.run(["git", "apply", f"{number}.diff"], cwd=tree, check=True)
    return tree


def run(tree: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_an_optimizer_a_layer_and_a_dataset():
    added = [re.search(r"^\+\+\+ b/src/dp_microadam/([\w/]+)/\w+\.py\n@@ -0,0", diff, re.MULTILINE)[1] for diff in DIFFS]
    assert added == ["optimizers", "workbench/data"]
    assert "`examples/custom_layer.py`" in PAGE
    assert (ROOT / "examples" / "custom_layer.py").is_file()


def test_an_addition_touches_two_files_of_the_sources():
    for diff in DIFFS:
        assert len(re.findall(r"^\+\+\+ b/src/", diff, re.MULTILINE)) == 2


@pytest.mark.slow
def test_the_tests_of_the_page_pass_on_the_patched_tree(patched):
    # One run of all files together: starting three would take three times as long.
    tests = [words[1:] for words in COMMANDS if words[0] == "pytest"]
    files = [word for words in tests for word in words if word.endswith(".py")]
    chosen = " or ".join(words[words.index("-k") + 1] for words in tests)
    said = [int(count) for count in re.findall(r"^(\d+) passed$", PAGE, re.MULTILINE)]
    report = run(patched, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files, "-k", chosen)
    assert re.search(rf"^{sum(said)} passed", report, re.MULTILINE), report


@pytest.mark.slow
def test_the_new_dataset_trains_with_the_command_of_the_page(patched):
    (words,) = (words[1:] for words in COMMANDS if words[0] == "dp-microadam")
    (said,) = re.findall(r"^ε = .* at δ = .*$", PAGE, re.MULTILINE)
    assert said in run(patched, "-m", "dp_microadam", *words, "--quiet")


def test_the_patched_files_are_clean(patched):
    files = sorted({name for diff in DIFFS for name in re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)})
    run(patched, "-m", "ruff", "check", "--quiet", *files)
    run(patched, "-m", "ruff", "format", "--check", "--quiet", *files)
