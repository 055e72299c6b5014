"""Everything runs on a CUDA device as on the CPU; with ``DP_MICROADAM_DEVICE=cuda`` on a real one."""

from pathlib import Path

import pytest
from pretend_cuda.families import FAMILIES
from pretend_cuda.start import NoDevice, failures, start

from dp_microadam.clipping.rules.families import _RULES, rule_class

GROUPS = ("clipping", "integrations", "kernels", "launches", "optimizers", "privacy", "training", "transforms")


def test_every_group_of_cases_is_run():
    here = Path(__file__).parent
    tests = "".join(path.read_text("utf-8") for path in here.glob("test_*.py"))
    for path in (here / "cases").glob("*.py"):
        assert f'"{path.stem}"' in tests or "CASES = " not in path.read_text("utf-8"), path.name


def test_every_layer_rule_has_a_case():
    covered = {rule_class(module) for family in FAMILIES for module in family.model().modules()}
    assert set(_RULES.values()) <= covered


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_it_runs_on_the_device_as_on_the_cpu(group):
    try:
        outcomes = start(group, timeout=1500)
    except NoDevice as reason:
        pytest.skip(str(reason))
    assert outcomes
    assert not failures(outcomes)
