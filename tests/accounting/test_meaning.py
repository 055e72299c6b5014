"""What (ε, δ) means, as statements and plans say it."""

import math

import pytest

from dp_microadam.accounting.costs import SubsampledGaussian
from dp_microadam.accounting.meaning import meaning, meaning_in_words, percent
from dp_microadam.accounting.selection import Repetitions, SelectedRun


def test_a_selection_among_runs_claims_no_curve_of_a_single_run():
    one = SubsampledGaussian(0.1, 3.0, 10)
    found = meaning([SelectedRun((one,), Repetitions(10))], 1e-5)
    assert found.keys() == {"not_computed"}
    ((_, words),) = meaning_in_words(found, 1e-5)
    assert "a selection among runs" in words


def test_without_subsampling_mu_is_exact_and_holds_for_all_rates():
    found = meaning([SubsampledGaussian(1.0, math.sqrt(3), 3)], 1e-5)
    assert (found["mu"], found["mu_smallest_rate"]) == (1.0, 0.0)
    assert dict(meaning_in_words(found, 1e-5))["Gaussian privacy"].startswith("μ ≤ 1.00; ")


def test_nothing_spent_is_stated_as_guessing():
    found = meaning([], 1e-5)
    assert (found["mu"], found["replace_one_epsilon"]) == (0.0, 0.0)
    assert [row["true_positive_rate"] for row in found["attacks"]] == pytest.approx([0.1, 0.01, 0.001])


@pytest.mark.parametrize(("share", "shown"), [(0.38914, "38.92 %"), (0.00001, "0.01 %"), (0.5, "50.00 %"), (0.99995, "100 %")])
def test_shares_are_never_rounded_down(share, shown):
    assert percent(share) == shown
