"""Planted faults: each is caught by what defends against it, and goes through if that is taken away."""

import os
import sys
from pathlib import Path

import pytest

from dp_microadam.workbench.audit import planted
from dp_microadam.workbench.audit.planted import PLANTED, Outcome, Planted, Reaction, plant_all

NAMES = [one.fault for one in PLANTED]

BLIND_RANKS = """
from dp_microadam.training import distributed
distributed.Ranks.require_same = lambda self, what, value: None
distributed.Ranks._agreed = lambda self, tensors, noised=None: list(tensors.values())
"""
"""Processes that neither compare what they train nor who adds which noise."""


@pytest.mark.parametrize("one", PLANTED, ids=NAMES)
def test_what_is_caught_and_what_is_not_is_as_the_list_says(one):
    """If one of the last is caught the library has become better, and docs/audit.md must say so."""
    (reaction,) = plant_all([one])
    assert reaction.caught == one.expected, reaction.how
    assert not reaction.violated


@pytest.mark.parametrize(
    ("defence", "fault"),
    [
        ("bounded noise", "noise ends early, so that some outputs have one possible neighbour"),
        ("sessions not counted", "a run with bands goes on with its data in another order"),
        ("a blind independence check", "a loss leaves out rows that occur with another label"),
        ("a blind independence check", "a loss leaves out rows that nearly equal another"),
    ],
)
def test_a_fault_goes_through_without_its_defence_and_the_audit_says_so(plant, defence, fault):
    plant(defence)
    (reaction,) = plant_all([one for one in PLANTED if one.fault == fault])
    assert reaction.violated
    assert reaction.verdict == "VIOLATION: it went through"


def test_ranks_that_do_not_compare_what_they_train_publish_coordinates_without_noise(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(BLIND_RANKS, encoding="utf-8")
    source = Path(planted.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(source), os.environ.get("PYTHONPATH", "")]))
    outcome = planted.different_parameters()
    assert not outcome.caught
    assert outcome.how == "8 of 16 coordinates were published without noise"


def test_ranks_that_end_without_a_result_are_an_error_and_not_a_fault_that_was_caught(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the ranks of the audit ended without a result"):
        planted.different_parameters()


def test_a_fault_that_no_audit_sees_is_no_violation():
    assert Reaction("f", expected=False, caught=False, how="").verdict == "not seen, as documented"
    (reaction,) = plant_all([Planted("f", lambda: Outcome(False, "seen"))])
    assert reaction.violated
