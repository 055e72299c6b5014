"""What the package promises before any of its parts is used."""

import subprocess
import sys
import time

import pytest
from hypothesis import settings
from thoroughness import THOROUGH, examples

import dp_microadam


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


HELP = "from dp_microadam.workbench.command_line.cli import main; main(['--help'])"


@pytest.mark.parametrize("code", ["import dp_microadam", HELP])
def test_importing_the_package_and_help_do_not_import_torch(code):
    done = run("-c", f"import sys\ntry: {code}\nfinally: print('torch' in sys.modules)")
    assert done.stdout.strip().endswith("False")


def test_help_answers_quickly():
    # The promise is under a second on a quiet machine; importing torch alone would take two. The best of three keeps a
    # busy machine from failing it.
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        assert run("-m", "dp_microadam", "--help").returncode == 0
        durations.append(time.perf_counter() - start)
    assert min(durations) < 1.5


def test_every_public_name_can_be_imported():
    for name in dp_microadam.__all__:
        assert getattr(dp_microadam, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'MicroAdamant'"):
        _ = dp_microadam.MicroAdamant


def test_an_unknown_command_exits_with_code_2():
    done = run("-m", "dp_microadam", "no-such-command")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_make_test_runs_the_same_examples_of_property_tests_every_time():
    """What one person sees pass, another does; ``make test-all`` searches."""
    assert settings().derandomize != THOROUGH
    assert examples(10).derandomize != THOROUGH
