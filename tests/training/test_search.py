"""A private search: what it publishes, what it leaves behind, and how it goes on after it was stopped."""

import json
import logging
import os
import re
import shutil
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flat import flat
from thoroughness import THOROUGH

from dp_microadam import InputError, MicroAdam, PrivacyError, PrivacyPlan, PrivateTrainer
from dp_microadam.accounting.selection import Repetitions
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.training.run_record import Pace
from dp_microadam.training.search import PrivateSearch, SearchState

PLAN = SelectionPlan(dataset_size=20, batch_size=5, noise_multiplier=1.0, steps=2, delta=1e-2, expected_runs=3)
VALUES = {"lr": [0.01, 0.1, 0.2], "norm": [0.5, 1.0]}
TRAIN, VALIDATION = torch.arange(60.0).view(20, 3) / 60, torch.arange(12.0).view(4, 3) / 12


def loss(model, batch):
    return (model(batch).squeeze(1) - batch.sum(1)) ** 2


def make_trainer(settings, run_dir, **options):
    model = torch.nn.Linear(3, 1)
    optimizer = MicroAdam(model.parameters(), lr=settings["lr"], fused=False)
    given = {"plan": PLAN, "run_dir": run_dir, "max_grad_norm": settings["norm"], "evaluate_every": 1, **options}
    return PrivateTrainer(model, optimizer, given.pop("plan"), loss, **flat(**given))


def search(folder, make=make_trainer, *, plan=None, values=VALUES):
    return PrivateSearch(plan or PLAN, values, make, score="validation_loss", run_dir=folder / "best")


class Watched:
    """Makes trainers, and notes what only the search itself may know: the runs, their scores and hyperparameters."""

    def __init__(self):
        self.runs, self.scores, self.settings = [], [], []

    def __call__(self, settings, run_dir):
        trainer = make_trainer(settings, run_dir)
        warnings.warn("as a library may, once per run", stacklevel=1)
        logging.getLogger("library").warning("as a library may, once per run")
        fit = trainer.fit

        def noting(*data, **users):
            result = fit(*data, **users)
            self.runs.append(read_ledger(run_dir).run)
            self.scores.append(result.metrics["validation_loss"])
            self.settings.append(settings)
            return result

        trainer.fit = noting
        return trainer


@pytest.fixture
def draws(monkeypatch):
    """The numbers of runs that are drawn from now on; those that were drawn are taken off."""
    left = []
    monkeypatch.setattr(Repetitions, "draw", lambda self: left.pop(0))
    return left


def everything_in(folder):
    """All files below a folder by name, with their content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_best_run_is_published_and_epsilon_covers_the_selection(tmp_path, draws):
    draws.append(2)
    watched = Watched()
    result = search(tmp_path, watched).fit(TRAIN, VALIDATION)
    best = min(range(2), key=watched.scores.__getitem__)
    assert len(watched.runs) == 2
    assert result.finished
    assert result.settings == watched.settings[best]
    assert result.metrics["validation_loss"] == watched.scores[best]
    record = read_ledger(result.run_dir)
    assert record.run == watched.runs[best]
    assert record.epsilon() == result.epsilon == PLAN.epsilon > PLAN.single_run.epsilon
    assert "ε covers the choice" in (result.run_dir / "privacy.txt").read_text()


def test_a_sceptical_reader_finds_nothing_of_other_runs_in_what_a_search_leaves(tmp_path, draws, capfd, caplog):
    """The same files of the same sizes, the same words on the screen, and no run, score or time but those of the winner."""
    left = {}
    for runs in (1, 2, 7) if THOROUGH else (1, 3):
        draws.append(runs)
        folder, watched = tmp_path / str(runs), Watched()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = search(folder, watched).fit(TRAIN, VALIDATION)
        assert [*warned, *caplog.records] == [], "a warning or a message per run counts them"
        assert len(watched.runs) == runs
        files = everything_in(folder)
        assert {name.split("/")[0] for name in files} == {"best"}, "the folder of the search is gone"
        winner = read_ledger(result.run_dir).run
        for name, content in files.items():
            for run, score in zip(watched.runs, watched.scores, strict=True):
                assert run == winner or run.encode() not in content, name
                assert run == winner or str(score).encode() not in content, name
        ledger = [json.loads(line) for line in files["best/ledger.jsonl"].splitlines()]
        assert not any("opened" in line for line in ledger)
        assert b"peak_memory" not in files["best/run.json"], "all runs of a process have a part in it"
        last_run_ended = result.run_dir.stat().st_mtime - 30
        assert all(path.stat().st_mtime > last_run_ended for path in result.run_dir.rglob("*"))
        moments = {int(path.stat().st_mtime) for path in result.run_dir.rglob("*")}
        assert max(moments) - min(moments) <= 5, "all were written when the search ended"
        said = capfd.readouterr()
        left[runs] = {name: len(content) for name, content in files.items()}, said.out, said.err
    names, *_ = left[1]
    for found, *said in left.values():
        assert found.keys() == names.keys()
        assert found["best/ledger.jsonl"] == names["best/ledger.jsonl"]
        assert abs(sum(found.values()) - sum(names.values())) < 300, "figures have different numbers of digits"
        assert said == ["", ""]


def test_nothing_published_depends_on_how_busy_or_warm_the_process_was(tmp_path, draws, monkeypatch):
    """The first run of a process is slower, so that its pace would tell whether the best run was the first."""
    plan = replace(PLAN, steps=5)
    monkeypatch.setattr(f"{__name__}.PLAN", plan)
    draws.append(1)
    paces = []
    monkeypatch.setattr(Pace, "take", lambda self: paces.append(76.543) or 76.543)
    result = search(tmp_path, lambda *given: make_trainer(*given, evaluate_every=4)).fit(TRAIN, VALIDATION)
    assert paces
    for name, content in everything_in(result.run_dir).items():
        assert b"76.543" not in content, name
        assert name.endswith(".ckpt") or not re.search(rb"second|\d\d:\d\d", content), name
    for line in (result.run_dir / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).keys() == {"step", "epsilon", "validation_loss", "learning_rate"}


def stopping(begun, lost=1, **options):
    """Makes trainers of which the first is interrupted after so many steps, or once it has a folder; all of them are noted."""

    def make(settings, run_dir):
        trainer = make_trainer(settings, run_dir, **options)
        begun.append((settings, trainer))
        first, steps, taken = len(begun) == 1, [], trainer.step.take
        if first and not lost:
            run_dir.mkdir()
            raise KeyboardInterrupt

        def take():
            steps.append(taken())
            if first and len(steps) == lost:
                raise KeyboardInterrupt
            return steps[-1]

        trainer.step.take = take
        return trainer

    return make


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_run_that_was_stopped_in_the_middle_goes_on_with_its_own_hyperparameters(tmp_path, draws, lost):
    draws.append(1)
    begun = []
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, stopping(begun, lost)).fit(TRAIN, VALIDATION)
    result = search(tmp_path, stopping(begun)).fit(TRAIN, VALIDATION)
    assert begun[0][0] == begun[1][0] == result.settings
    assert read_ledger(result.run_dir).steps == 2, "a step that was recorded and lost stays spent"


def test_with_bands_a_run_that_was_stopped_begins_again_so_that_no_session_of_it_has_to_be_published(tmp_path, draws):
    draws.append(1)
    plan = replace(PLAN, bands=2, steps=4)
    begun = []
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, stopping(begun, plan=plan), plan=plan).fit(TRAIN, VALIDATION)
    result = search(tmp_path, stopping(begun, plan=plan), plan=plan).fit(TRAIN, VALIDATION)
    record = read_ledger(result.run_dir)
    assert (record.steps, record.resumed_at) == (4, ())
    assert result.epsilon == plan.epsilon
    assert begun[1][1].step.account.updates == 4


@pytest.mark.slow
def test_a_finished_search_returns_its_result_again_and_removes_what_a_killed_process_left(tmp_path):
    first = search(tmp_path).fit(TRAIN, VALIDATION)
    (tmp_path / "best.unpublished").mkdir()
    (tmp_path / "best.unpublished" / "state").write_text("left")
    assert search(tmp_path).fit(TRAIN, VALIDATION) == first
    assert os.listdir(tmp_path) == ["best"]
    other = search(tmp_path, values={**VALUES, "lr": [1.0]})
    with pytest.raises(InputError, match="where another search has published"):
        other.fit(TRAIN, VALIDATION)


def test_a_search_that_is_declared_otherwise_is_refused(tmp_path):
    def failing(settings, run_dir):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        search(tmp_path, failing).fit(TRAIN, VALIDATION)
    other = search(tmp_path, values={**VALUES, "lr": [1.0]})
    with pytest.raises(InputError, match="declared with another plan, other values or another score"):
        other.fit(TRAIN, VALIDATION)
    with pytest.raises(InputError, match="where a search will publish its best run"):
        make_trainer({"lr": 0.1, "norm": 1.0}, tmp_path / "best").fit(TRAIN)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"plan": PLAN.single_run}, "another plan"),
        ({"run_dir": Path("elsewhere")}, "run_dir 'elsewhere'"),
        ({"seed": 3}, "not private"),
        ({"callbacks": [print]}, "callbacks"),
        ({"show_private_metrics": True}, "private metrics"),
    ],
)
def test_trainers_that_would_break_the_guarantee_are_refused(tmp_path, options, sentence):
    with pytest.raises((InputError, PrivacyError), match=sentence):
        search(tmp_path, lambda settings, run_dir: make_trainer(settings, **{"run_dir": run_dir, **options})).fit(
            TRAIN, VALIDATION
        )


@pytest.mark.parametrize(
    ("plan", "values", "score", "sentence"),
    [
        (PrivacyPlan(20, 5, 1.0, 2, 1e-2), VALUES, "validation_loss", "plan is a PrivacyPlan; a search needs a SelectionPlan"),
        (PLAN, {}, "validation_loss", "values is {}; it must hold at least one list"),
        (PLAN, {"lr": 0.1}, "validation_loss", "values['lr'] is 0.1; it must be a list"),
        (PLAN, {"lr": []}, "validation_loss", "values['lr'] is []; it must be a list with at least one value"),
        (PLAN, {"lr": [None]}, "validation_loss", "values['lr'] holds None; it must hold numbers, strings"),
        (PLAN, VALUES, "accuracy", "score is 'accuracy'; it must be one of 'validation_loss'"),
    ],
)
def test_bad_declarations_are_refused_in_one_sentence(tmp_path, plan, values, score, sentence):
    with pytest.raises(InputError) as refused:
        PrivateSearch(plan, values, make_trainer, score=score, run_dir=tmp_path / "best").fit(TRAIN, VALIDATION)
    assert str(refused.value).startswith(sentence)


@pytest.mark.slow
def test_hyperparameters_are_drawn_uniformly_and_independently(tmp_path):
    """Each of 200 draws has six equal chances; a count outside 8 … 68 has probability below 1e-6 for each of them."""
    found = {}
    one = search(tmp_path)
    one._declare()
    with SearchState(tmp_path / "best.unpublished") as state:
        state.write(remaining=1, place="a", choice=None, best=None, best_choice=None)
        for _ in range(200):
            state.write(choice=None)
            with pytest.raises(RuntimeError):
                search(tmp_path, lambda settings, run_dir: (_ for _ in ()).throw(RuntimeError))._one_run(state, None)
            settings = tuple(one._settings(state["choice"]).values())
            found[settings] = found.get(settings, 0) + 1
    assert len(found) == 6
    assert all(8 <= count <= 68 for count in found.values())


def test_the_state_survives_a_write_that_was_cut_off_and_shows_neither_count_nor_age(tmp_path):
    with SearchState(tmp_path) as state:
        assert not state.begun
        for remaining in range(50, 0, -1):
            state.write(remaining=remaining)
            (tmp_path / "state.unfinished").write_text('{"remai')
    with SearchState(tmp_path) as state:
        assert state["remaining"] == 1
        state.write(remaining=0)
    content = (tmp_path / "state").read_bytes()
    assert len(content) == 4096
    assert json.loads(content).keys() == {"remaining", "folder"}


def test_a_copied_search_and_a_second_process_are_refused(tmp_path):
    (tmp_path / "search").mkdir()
    with SearchState(tmp_path / "search") as state:
        state.write(remaining=3)
        with pytest.raises(PrivacyError, match="in use by another process"):
            SearchState(tmp_path / "search")
        shutil.copytree(tmp_path / "search", tmp_path / "copy")
        with pytest.raises(PrivacyError, match="is a copy"):
            SearchState(tmp_path / "copy")
        child = os.fork()
        if not child:  # as a data-loading worker does, which outlives a process that is killed
            time.sleep(20)
            os._exit(0)
    time.sleep(1)
    try:
        with SearchState(tmp_path / "search") as state:
            assert state["remaining"] == 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
def test_progress_tells_the_time_that_passed_and_no_number_of_runs(tmp_path, draws, capfd, monkeypatch):
    draws.append(3)
    monkeypatch.setattr("dp_microadam.training.search._TELL_SECONDS", 0.05)

    def slow(settings, run_dir):
        time.sleep(0.2)
        return make_trainer(settings, run_dir)

    search(tmp_path, slow).fit(TRAIN, VALIDATION)
    said = set(capfd.readouterr().err.splitlines())
    assert said <= {f"searching · 0:00:{second:02d} elapsed" for second in range(60)}
    assert said
