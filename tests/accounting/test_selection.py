"""Private selection: the distribution of the number of runs, and ε of publishing the best one."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from dp_events import as_dp_event
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp
from thoroughness import examples

from dp_microadam.accounting.costs import ORDERS, SubsampledGaussian, epsilon, group_epsilon
from dp_microadam.accounting.selection import DISTRIBUTIONS, Repetitions, SelectedRun
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.ledger.ledger import PrivacyLedger, RunSettings, read_ledger, spent_together
from dp_microadam.ledger.statement import privacy_report, statement_in_words
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.plan.selection_plan import SelectionPlan

PAPER = SubsampledGaussian(4096 / 45_000, 3.0, 2480)
SETTINGS = RunSettings(private=True, randomness="operating system's entropy", sensitivity=1.0)
SMALL = {"dataset_size": 2000, "batch_size": 100, "delta": 1e-5}

shapes = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 20))
means = st.floats(1.05, 200)


def best_of(part, distribution="geometric", runs=10.0):
    return SelectedRun((part,), Repetitions(runs, DISTRIBUTIONS[distribution]))


@dataclass(frozen=True)
class Measured:
    """A mechanism whose divergences were computed from its two distributions."""

    divergences: tuple[float, ...]
    steps: int = 1

    def rdp(self, missing=0):
        return np.array(self.divergences)


@functools.cache
def as_dp_accounting_sees(part):
    """One run with the divergences of dp-accounting, which are too large at orders that are not whole.

    There it adds up all terms of an alternating series with the same sign; at whole orders it agrees with ours.
    """
    accountant = RdpAccountant(ORDERS)
    accountant.compose(as_dp_event([part]))
    return Measured(tuple(accountant._rdp))


@pytest.mark.parametrize(
    ("distribution", "published", "exact"), [("geometric", "13.391", "13.025"), ("logarithmic", "11.790", "11.745")]
)
def test_ten_expected_runs_of_the_papers_plan_cost_what_was_published_or_less(distribution, published, exact):
    """The published numbers are those of dp-accounting's divergences of one run. Ours are exact, and give a smaller ε."""
    assert f"{epsilon([best_of(as_dp_accounting_sees(PAPER), distribution)], 1e-5, 'rdp'):.3f}" == published
    assert f"{epsilon([best_of(PAPER, distribution)], 1e-5, 'rdp'):.3f}" == exact


@pytest.mark.parametrize("shape", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("mean", [1.5, 10.0, 100.0])
@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (30.0, 200)])
def test_selection_agrees_with_dp_accounting_to_nine_digits(sigma, steps, mean, shape):
    part = SubsampledGaussian(1.0, sigma, steps)  # without sampling both compute the same divergences of one run
    other = RdpAccountant(ORDERS)
    other.compose(RepeatAndSelectDpEvent(as_dp_event([part]), mean, shape))
    assert epsilon([SelectedRun((part,), Repetitions(mean, shape))], 1e-5) == pytest.approx(other.get_epsilon(1e-5), rel=1e-9)


def test_a_selection_composes_with_other_runs_as_dp_accounting_says():
    first, second = SubsampledGaussian(1.0, 9.0, 30), SubsampledGaussian(1.0, 4.0, 5)
    other = RdpAccountant(ORDERS)
    other.compose(RepeatAndSelectDpEvent(as_dp_event([first]), 5.0, 1.0))
    other.compose(as_dp_event([second]))
    assert epsilon([second, best_of(first, runs=5)], 1e-6) == pytest.approx(other.get_epsilon(1e-6), rel=1e-9)


@given(shapes, means)
@examples(50)
def test_probabilities_sum_to_one_and_have_the_declared_mean(shape, mean):
    probabilities = dict(Repetitions(mean, shape)._probabilities())
    assert math.fsum(probabilities.values()) == pytest.approx(1, abs=1e-12)
    assert math.fsum(k * value for k, value in probabilities.items()) == pytest.approx(mean, rel=1e-10)


@given(shapes, means, st.integers(1, 60))
@examples(50)
def test_probabilities_are_those_of_scipy(shape, mean, runs):
    repetitions = Repetitions(mean, shape)
    if shape:
        full = stats.nbinom(shape, math.exp(-repetitions.log_inverse_gamma))
        expected = full.pmf(runs) / full.sf(0)
    else:
        expected = stats.logser(1 - math.exp(-repetitions.log_inverse_gamma)).pmf(runs)
    assert dict(repetitions._probabilities()).get(runs, 0.0) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", [0.0, 1.0, 3.5])
def test_the_number_of_runs_is_drawn_with_the_declared_probabilities(shape):
    """A chi-squared test; it fails one time in ten million if the draws are right."""
    repetitions = Repetitions(6.0, shape)
    draws, last = 20_000, 25
    found = Counter(min(repetitions.draw(), last) for _ in range(draws))
    shares = [share for _, share in itertools.islice(repetitions._probabilities(), last - 1)]
    expected = draws * np.array([*shares, 1 - math.fsum(shares)])
    observed = np.array([found[k] for k in range(1, last + 1)])
    assert ((observed - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-7, last - 1)


def divergences(p, q):
    """Rényi divergences of two distributions over a finite set at all orders, the larger of both directions."""
    orders, logs = np.array(ORDERS)[:, None], (np.log(p), np.log(q))
    both = [logsumexp(orders * a + (1 - orders) * b, axis=1) / (orders[:, 0] - 1) for a, b in (logs, logs[::-1])]
    return np.maximum(*both)


def best_of_random_runs(p, repetitions):
    """The distribution of the best of K draws from ``p``, whose values are in ascending order, by K's generating function."""
    gamma, eta = math.exp(-repetitions.log_inverse_gamma), repetitions.shape
    up_to = np.concatenate([[0.0], np.cumsum(p)])
    inside = 1 - (1 - gamma) * up_to
    generated = (inside**-eta - 1) / (gamma**-eta - 1) if eta else np.log(inside) / np.log(gamma)
    return np.diff(generated)


@given(shapes, st.floats(1.05, 30), st.lists(st.tuples(st.floats(0.05, 1), st.floats(-0.5, 0.5)), min_size=2, max_size=6))
@examples(100)
def test_no_selection_diverges_more_than_its_bound(shape, mean, outcomes):
    """The exact distribution of the best of K runs of a small mechanism, on two neighbouring data sets."""
    weights = np.array([weight for weight, _ in outcomes])
    p = weights / weights.sum()
    q = p * np.exp([change for _, change in outcomes])
    q /= q.sum()
    repetitions = Repetitions(mean, shape)
    exact = divergences(best_of_random_runs(p, repetitions), best_of_random_runs(q, repetitions))
    bound = SelectedRun((Measured(tuple(divergences(p, q))),), repetitions).rdp()
    assert (exact <= bound + 1e-9).all()


def test_a_divergence_that_cannot_be_computed_is_no_bound():
    with pytest.raises(InputError, match="pld"):
        epsilon([PAPER, best_of(PAPER)], 1e-5, "pld")
    nothing_known = SelectedRun((Measured((math.nan,) * len(ORDERS)),), Repetitions(10))
    assert epsilon([nothing_known], 1e-5, "rdp") == math.inf


@pytest.mark.parametrize("distribution", ["geometric", pytest.param("logarithmic", marks=pytest.mark.slow)])
def test_the_noise_solved_for_is_the_least_that_keeps_the_search_within_epsilon(distribution):
    plan = SelectionPlan.solve(**SMALL, epsilon=4.0, steps=300, expected_runs=8, distribution=distribution)
    assert plan.epsilon <= 4.0 < replace(plan, noise_multiplier=round(plan.noise_multiplier - 1e-4, 4)).epsilon
    alone = plan.single_run_of_same_epsilon
    assert alone.noise_multiplier < plan.noise_multiplier
    assert alone.epsilon <= plan.epsilon < replace(alone, noise_multiplier=round(alone.noise_multiplier - 1e-4, 4)).epsilon
    assert plan.single_run == PrivacyPlan(**SMALL, noise_multiplier=plan.noise_multiplier, steps=300, accountant="rdp")


@pytest.mark.parametrize("bands", [1, 4])
def test_the_steps_solved_for_are_the_most_that_keep_the_search_within_epsilon(bands):
    plan = SelectionPlan.solve(**SMALL, epsilon=4.0, noise_multiplier=3.0, expected_runs=8, bands=bands)
    assert plan.epsilon <= 4.0 < plan.epsilon_after(plan.steps + 1)
    assert plan.steps % bands == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"expected_runs": 1}, "expected_runs is 1; it must lie in (1, 1000]"),
        ({"expected_runs": 2000}, "expected_runs is 2000; it must lie in (1, 1000]"),
        ({"distribution": "poisson"}, "distribution is 'poisson'; it must be one of 'geometric', 'logarithmic'"),
        ({"accountant": "pld"}, "accountant is 'pld'; for a selection among runs it must be 'rdp'"),
        pytest.param(
            {"epsilon": 0.01},
            "no noise_multiplier up to 100000 keeps the best of 10 expected runs within epsilon 0.01",
            marks=pytest.mark.slow,
        ),
        ({"steps": None, "noise_multiplier": 0.9}, "noise_multiplier 0.9 spends epsilon"),
    ],
)
def test_plans_that_cannot_be_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(InputError) as refused:
        SelectionPlan.solve(**{**SMALL, "epsilon": 3.0, "steps": 300, "expected_runs": 10, **options})
    assert str(refused.value).startswith(sentence)


def recorded(folder, plan, steps):
    with PrivacyLedger.create(folder, plan, SETTINGS) as ledger:
        for _ in range(steps):
            ledger.record_step()
    return read_ledger(folder)


def test_a_ledger_of_a_search_says_that_epsilon_covers_the_selection_and_copies_count_once(tmp_path):
    plan = SelectionPlan(**SMALL, noise_multiplier=2.0, steps=30, expected_runs=8)
    search = recorded(tmp_path / "search", plan, 30)
    assert search.plan == plan
    assert search.epsilon() == plan.epsilon > plan.single_run.epsilon
    assert epsilon(spent_together([search, search]), 1e-5, "rdp") == plan.epsilon
    other = recorded(tmp_path / "other", PrivacyPlan(**SMALL, noise_multiplier=2.0, steps=20), 20)
    together = epsilon(spent_together([search, other]), 1e-5, "rdp")
    assert together == epsilon([plan.spent_after(30), other.plan.spent_after(20)], 1e-5, "rdp") > plan.epsilon
    with pytest.raises(PrivacyError, match="cannot continue"):
        PrivacyLedger.resume(tmp_path / "search", replace(plan, expected_runs=2.0), SETTINGS, position=30)

    report = privacy_report(search, group_size=2)
    assert report["selection"]["epsilon_of_one_run"] == plan.single_run.epsilon
    assert report["group_epsilon"] == group_epsilon(search.spent, 1e-5, 2) > 2 * plan.epsilon
    words = statement_in_words(report)
    assert "the best of a random number of such runs (geometric, 8 expected)" in words
    assert "ε covers the choice" in words
    assert "general group privacy" in words
    assert "how long it took" in words
