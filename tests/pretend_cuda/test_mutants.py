"""The battery can fail: it notices each tensor that is left on the wrong device, one at a time."""

import ast

import pytest
from pretend_cuda.mutants import EQUIVALENT, all_mutants, cases_for, failing_without_mutants, noticed_by, outcomes_of, verdict
from pretend_cuda.start import NoDevice, Nursery, failures

SOURCE = """
def place(x, y, device):
    a = torch.zeros(3, dtype=x.dtype, device=x.device)
    b = y.to(x)
    c = y.to(device, non_blocking=True)
    d = y.to(x.device, torch.float32), y.to(x)
    e = y.to(torch.float32), y.to(x.dtype), y.to(device=device, dtype=x.dtype)
    return y.to(x.device if a else "cpu", copy=True)
"""
DROPPED = [
    "torch.zeros(3, dtype=x.dtype)",
    "y.to(x.dtype)",
    "y",
    "y.to(torch.float32)",
    "y.to(x.dtype)",
    "y.to(dtype=x.dtype)",
    "y.clone()",
]


def test_each_placement_is_dropped_once(tmp_path, monkeypatch):
    monkeypatch.setattr("pretend_cuda.mutants.PACKAGE", tmp_path)
    source = ast.unparse(ast.parse(SOURCE))
    (tmp_path / "one.py").write_text(source)
    found = all_mutants()
    assert [mutant.after for mutant in found] == DROPPED
    for mutant in found:
        assert mutant.applied(source).count(mutant.before) == source.count(mutant.before) - 1
    assert [found[1].name, found[4].name] == ["one.py place: y.to(x)", "one.py place: y.to(x) (2)"]


@pytest.mark.slow
def test_every_mutant_is_noticed_or_known_to_be_equivalent():
    survivors, noticing = set(), []
    try:
        with Nursery() as nursery:
            for mutant in all_mutants():
                outcomes = outcomes_of(mutant, nursery)
                assert outcomes
                print(verdict(mutant, outcomes), flush=True)
                if (by := noticed_by(outcomes)) is None:
                    survivors.add(mutant.name)
                else:
                    noticing.append(by)
            assert not failures(failing_without_mutants(noticing, nursery))
    except NoDevice as reason:
        pytest.skip(str(reason))
    assert survivors == EQUIVALENT.keys()


def test_every_mutant_has_cases_and_a_name_of_its_own():
    mutants = all_mutants()
    assert len(mutants) > 50
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert cases_for(mutant.file)
