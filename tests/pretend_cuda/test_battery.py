"""Everything runs on a CUDA device as on the CPU; with ``DP_MICROADAM_DEVICE=cuda`` on a real one."""

from pathlib import Path

import pytest
from pretend_cuda.start import NoDevice, failures, start

from dp_microadam.apps.audit.layer_families import FAMILIES
from dp_microadam.clipping.families import _RULES, rule_class

GROUPS = ("clipping", "integrations", "optimizers", "privacy", "training", "transforms")


def test_every_group_of_cases_is_run():
    written = {path.stem for path in Path(__file__).with_name("cases").glob("*.py") if "CASES = " in path.read_text("utf-8")}
    assert written == {*GROUPS, "counting"}


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
