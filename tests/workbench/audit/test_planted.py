"""Planted faults: each is caught by what defends against it, and goes through if that is taken away."""

import os
from pathlib import Path

import numpy as np
import pytest

from dp_microadam.clipping.checks import independence
from dp_microadam.ledger.ledger import LedgerRecord
from dp_microadam.noise import randomness
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.workbench.audit import planted
from dp_microadam.workbench.audit.planted import PLANTED, plant

RANKS, ORDER, CONTRADICTED, SIMILAR, BOUNDED = list(PLANTED)[:5]


@pytest.mark.parametrize("fault", [ORDER, CONTRADICTED, SIMILAR, BOUNDED, *list(PLANTED)[5:]])
def test_what_is_caught_and_what_is_not_is_as_the_list_says(fault):
    """If one of the last is caught the library has become better, and docs/audit.md must say so."""
    reaction = plant(fault)
    assert reaction.caught == reaction.expected, reaction.how


def sessions_not_counted(patch):
    """With bands, a run that was resumed is accounted for as if its examples had kept their numbers."""
    participations, last_step = PrivacyPlan.participations, PrivacyPlan.last_step
    patch.setattr(PrivacyPlan, "participations", lambda self, steps, resumed_at=(): participations(self, steps))
    patch.setattr(PrivacyPlan, "last_step", lambda self, resumed_at=(): last_step(self))
    patch.setattr(LedgerRecord, "epsilon", lambda self: self.plan.epsilon_after(self.steps))


def blind_check(patch):
    patch.setattr(independence, "_differ", lambda *arguments: False)


def bounded_noise(patch):
    """A bit of the words is never set, so that the tails end at 5.9 deviations."""
    original = randomness._normals
    patch.setattr(randomness, "_normals", lambda draw, count: original(lambda n: draw(n) & ~np.uint64(1 << 39), count))


@pytest.mark.parametrize(
    ("remove", "fault"),
    [(sessions_not_counted, ORDER), (blind_check, CONTRADICTED), (blind_check, SIMILAR), (bounded_noise, BOUNDED)],
)
def test_a_fault_goes_through_without_its_defence_and_the_audit_says_so(monkeypatch, remove, fault):
    remove(monkeypatch)
    assert plant(fault).violated


BLIND_RANKS = """
from dp_microadam.training import distributed
distributed.Ranks.require_same = lambda self, what, value: None
distributed.Ranks._agreed = lambda self, tensors, noised=None: list(tensors.values())
"""
"""Processes that neither compare what they train nor who adds which noise."""


@pytest.mark.slow
@pytest.mark.parametrize("blind", [False, True])
def test_ranks_that_do_not_compare_what_they_train_publish_coordinates_without_noise(tmp_path, monkeypatch, blind):
    (tmp_path / "sitecustomize.py").write_text(BLIND_RANKS * blind, encoding="utf-8")
    source = Path(planted.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(source), os.environ.get("PYTHONPATH", "")]))
    reaction = plant(RANKS)
    assert reaction.violated == blind
    assert reaction.how.startswith(
        "without noise: 8 of 16 coordinates" if blind else "refused: the processes of this run differ"
    )
