"""The private step that trainer, adapters and people's own loops share."""

import copy
import json
import logging
import os
import random
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest
import torch
from flat import flat, idle
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

from dp_microadam import InputError, PrivacyError, PrivacyPlan, PrivateStep, methods
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.plan.plan import UnprotectedPlan
from dp_microadam.training.withheld import withheld
from dp_microadam.validation import require_positive

EXAMPLES = 40


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def examples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(EXAMPLES, 5, generator=generator), torch.randint(0, 3, (EXAMPLES,), generator=generator)


def plan_of(steps=6, batch_size=10, noise_multiplier=1.0):
    return PrivacyPlan(EXAMPLES, batch_size, noise_multiplier, steps, 1e-3)


@pytest.fixture
def make(tmp_path):
    """Builds a step on the examples; keyword arguments go to the step, except those named here."""
    opened = []

    def build(*, model=None, method=None, plan=None, data=None, run="run", per_example_loss=loss, begin=True, **options):
        options.setdefault("physical_batch_size", 8)
        model = model or network()
        step = PrivateStep(
            model,
            method or idle(model),
            plan or plan_of(),
            per_example_loss,
            examples() if data is None else data,
            run_dir=tmp_path / run,
            **flat(**options),
        )
        opened.append(step)
        if begin:
            step.account.begin()
        return step

    yield build
    for step in opened:
        step.close()


class Rows(Dataset):
    """The examples one by one; ``read`` is called with each index before it is read."""

    def __init__(self, read=lambda index: None):
        self.inputs, self.targets = examples()
        self.read = read

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        self.read(index)
        return self.inputs[index], self.targets[index]


class Armed:
    """Calls ``work`` with the value it is given, from when it is armed on: not while the step is checked."""

    def __init__(self, work):
        self.work, self.armed = work, False

    def __call__(self, value=0):
        if self.armed:
            self.work(value)
        return value


def failing_step(make, part, work, **options):
    """A step in which ``work`` is called in a part of what processes examples."""
    fail = Armed(work)
    of_part = {
        "Dataset": lambda: {"data": Rows(fail)},
        "prepare": lambda: {"prepare": fail},
        "loss": lambda: {"per_example_loss": lambda model, batch: fail(loss(model, batch))},
    }
    step = make(**of_part[part](), **whole_batch(**options))
    fail.armed = True
    return step


def whole_batch(**options):
    """A plan that samples every example in each step, with noise too small to see."""
    return {"plan": PrivacyPlan(EXAMPLES, EXAMPLES, 0.05, 4, 1e-3), "max_grad_norm": 1e-6, **options}


def slow_sum(model, batch, bound):
    totals, _ = clipped_sum(copy.deepcopy(model).double(), loss, (batch[0].double(), batch[1]), max_grad_norm=bound)
    return totals


def assert_means(means, model, bound, tolerance=6.0):
    """Means are the slow twin's sums over the expected batch, up to six deviations of the noise, σ·C/B each."""
    for name, total in slow_sum(model, examples(), bound).items():
        difference = (means[name].double() - total / EXAMPLES).abs().max()
        assert difference <= tolerance * 0.05 * bound / EXAMPLES, name


def test_sums_start_at_zero_whatever_happened_before(make):
    """A step that failed half-way leaves nothing behind: the next one counts every example once."""
    failing = [True]

    def read(index):
        if failing[0] and index == 30:
            raise OSError("disk")

    data = Rows()
    step = make(data=data, **whole_batch())
    data.read = read
    with pytest.raises(PrivacyError, match="could not be processed"):
        step.take()
    failing[0] = False
    assert_means(step.take(), step.model, 1e-6)
    assert read_ledger(step.account.run_dir).steps == step.position == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_example_of_a_step_is_read_before_that_step_is_recorded(make, tmp_path, num_workers):
    ledger, seen = tmp_path / "run" / "ledger.jsonl", tmp_path / "read.txt"

    def read(index):
        with open(seen, "a") as file:  # workers are other processes
            file.write(f"{len(ledger.read_text().splitlines()) - 1 if ledger.exists() else 0}\n")

    step = make(data=Rows(read), num_workers=num_workers, **whole_batch())
    seen.unlink()  # what the independence check took the shapes of
    for _ in step:
        pass
    recorded = [int(line) for line in seen.read_text().split()]
    assert recorded == [number for number in (1, 2, 3, 4) for _ in range(EXAMPLES)]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_leaves_a_step_before_the_ledger_is_on_the_disk(make, monkeypatch, fails):
    """The file is synced while gradients are computed; neither means nor an error get out before."""
    step = make()
    begun, go_on, real = threading.Event(), threading.Event(), os.fsync

    def slow(file):
        begun.set()
        assert go_on.wait(60)
        real(file)

    if fails:
        monkeypatch.setattr(step.clip._engine, "_loss", lambda model, batch: 1 / 0)
    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(step.take)
        assert begun.wait(60)
        assert not wait([taken], timeout=0.5).done
        go_on.set()
        assert (taken.exception() is not None) == fails


def test_other_processes_hear_of_a_failure_only_when_the_ledger_is_on_the_disk(make, monkeypatch):
    step = make()
    real, synced, heard = os.fsync, [], []

    def watched(file):
        real(file)
        synced.append(read_ledger(step.account.run_dir).steps)

    @contextmanager
    def together():
        try:
            yield
        except Exception:
            heard.extend(synced)
            raise

    monkeypatch.setattr(step.clip._engine, "_loss", lambda model, batch: 1 / 0)
    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(step.ranks, "together", together)
    with pytest.raises(PrivacyError, match="ZeroDivisionError"):
        step.take()
    assert heard == [1]


def throw(error):
    raise error


@pytest.mark.parametrize(
    ("part", "stage"),
    {
        "Dataset": "its examples were read",
        "prepare": "augment or prepare was applied",
        "loss": "per_example_loss or its gradients were computed",
    }.items(),
)
def test_a_message_that_is_withheld_says_at_which_stage_and_how_to_see_it(make, part, stage):
    step = failing_step(make, part, lambda value: throw(ValueError("private text 17")))
    with pytest.raises(PrivacyError, match=rf"\(ValueError\) while {stage}.* withheld; to see it, .*made-up") as caught:
        step.take()
    assert "private text" not in str(caught.value)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda value: throw(InputError("patient Anna")),
        lambda value: throw(PrivacyError("patient Anna")),
        lambda value: require_positive("patient Anna", -1.0),
    ],
    ids=["input", "privacy", "by a function of the library"],
)
@pytest.mark.parametrize("part", ["loss", "prepare"])
def test_this_library_s_own_errors_show_no_text_that_a_loss_gave_them(make, part, refuse):
    step = failing_step(make, part, refuse)
    with pytest.raises(PrivacyError, match=r"could not be processed \((Input|Privacy)Error\)") as caught:
        step.take()
    assert "Anna" not in str(caught.value)


def test_a_loop_of_one_s_own_is_resumed_from_its_checkpoint(make, tmp_path):
    def loop(step, method, stop):
        for gradients in step:
            method.update(step.model, gradients)
            if step.position == stop:
                break
        return {"model": step.model.state_dict(), "method": method.state_dict(), "step": step.state_dict()}

    def parts(run, **options):
        model = network()
        method = methods.dp_sgd(model, lr=0.5, momentum=0.9)
        return make(model=model, run=run, method=method, seed=3, begin=False, **options), method

    whole, method = parts("whole")
    reached = loop(whole, method, None)
    first, method = parts("parts")
    torch.save(loop(first, method, 4), tmp_path / "saved.pt")
    first.close()
    second, method = parts("parts")
    saved = torch.load(tmp_path / "saved.pt")
    second.model.load_state_dict(saved["model"])
    method.load_state_dict(saved["method"])
    second.load_state_dict(saved["step"])
    found = loop(second, method, None)
    assert all(torch.equal(found["model"][name], value) for name, value in reached["model"].items())
    assert read_ledger(second.account.run_dir).steps == 6
    second.write_privacy()
    assert json.loads((second.account.run_dir / "privacy.json").read_text())["steps_done"] == 6


def test_steps_lost_after_a_checkpoint_stay_spent(make):
    first = make()
    first.take()
    saved = first.state_dict()
    first.take()
    first.close()
    second = make(begin=False)
    second.load_state_dict(saved)
    assert (second.position, second.account.updates, second.account.remaining) == (2, 1, 4)
    assert second.epsilon() == pytest.approx(plan_of().epsilon_after(2))


def test_a_checkpoint_of_another_run_is_refused(make):
    first, other = make(), make(run="other")
    first.take()
    saved = first.state_dict()
    other.close()
    with pytest.raises(PrivacyError, match="another run"):
        make(run="other", begin=False).load_state_dict(saved)


def test_a_step_without_a_folder_is_refused_by_its_own_name():
    with pytest.raises(InputError, match="run_dir is missing; the ledger"):
        PrivateStep(nn.Linear(2, 2), idle(nn.Linear(2, 2)), plan_of(), loss)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"plan": plan_of(steps=1)}, PrivacyError, "all 1 steps of the plan are spent"),
        ({"max_steps": 1}, InputError, "max_steps is 1, and that many steps are taken"),
    ],
)
def test_a_step_too_many_is_refused_and_not_spent(make, options, error, sentence):
    step = make(**options)
    step.take()
    assert step.account.remaining == 0
    with pytest.raises(error, match=sentence):
        step.take()
    assert read_ledger(step.account.run_dir).steps == 1


def test_sums_without_noise_are_forgotten_when_a_step_is_done(make):
    step = make(**whole_batch())
    step.take()
    assert not any(total.any() for total in step.clip._engine.sums.values())


def test_a_step_without_data_or_ledger_is_refused(make, tmp_path):
    with pytest.raises(PrivacyError, match="no ledger is open"):
        make(begin=False).take()
    model = network()
    step = PrivateStep(model, idle(model), plan_of(), loss, run_dir=tmp_path / "none")
    step.account.begin()
    with pytest.raises(InputError, match="no training data is attached"):
        step.take()
    step.close()


def test_a_collate_fn_that_makes_two_rows_of_an_example_is_refused(make):
    def twice(rows):
        return default_collate([*rows, *rows])

    with pytest.raises(PrivacyError, match="collate_fn returns more rows than it is given examples"):
        make(data=Rows(), loader_options={"collate_fn": twice}, **whole_batch())


def test_the_unprotected_twin_draws_the_same_and_neither_clips_nor_adds_noise(make):
    plan = UnprotectedPlan(EXAMPLES, EXAMPLES, 2)
    step = make(plan=plan, max_grad_norm=1e-6)
    means = step.take()
    inputs, targets = examples()
    total = loss(step.model, (inputs, targets)).sum() / EXAMPLES
    gradients = torch.autograd.grad(total, list(step.model.parameters()))
    for (name, _), expected in zip(step.model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(means[name], expected, msg=name)
    assert (step.account.stamp, step.epsilon()) == ("not private: trained without clipping and noise", None)


def test_training_measures_are_means_over_the_sample(make):
    step = make(show_private_metrics=True, **whole_batch())
    step.take()
    assert step.training_metrics["training_loss"] == pytest.approx(loss(step.model, examples()).mean().item(), rel=1e-5)


def test_a_new_phase_is_entered_by_take_itself(make):
    model = network()
    method = methods.sparta(model, lr=0.1, first_phase=0.2, scoring_epochs=0.5)
    step = make(model=model, method=method, plan=plan_of(steps=10, batch_size=20))
    names = []
    for gradients in step:
        method.update(model, gradients)
        names.append(step.phase.name)
    assert names == ["head, biases, norms"] * 2 + ["scoring"] + ["selected rows"] * 7
    assert dict(read_ledger(step.account.run_dir).phases) == {"head, biases, norms": 2, "scoring": 1, "selected rows": 7}


def test_the_random_streams_of_a_step_are_unpredictable_in_torch_numpy_and_python(make):
    """Whatever seeds were set before: two runs draw differently, and the caller's streams come back as they were."""
    drawn, kept = [], []

    def read(index):
        if index == 0:
            drawn.append((torch.rand(()).item(), np.random.random(), random.random()))  # noqa: NPY002

    for run in ("a", "b"):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        step = make(data=Rows(read), run=run, **whole_batch())
        drawn.clear()
        step.take()
        kept.append(drawn[0])
        kept.append((torch.rand(()).item(), np.random.random(), random.random()))  # noqa: NPY002
    first, callers, second, _ = kept
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert all(one != other for one, other in zip(first, callers, strict=True))


def test_workers_draw_unpredictably_whatever_their_init_function_seeds(make, tmp_path):
    seen = tmp_path / "drawn.txt"

    def read(index):
        if index == 0:
            with open(seen, "a") as file:
                file.write(f"{torch.rand(()).item()} {np.random.random()} {random.random()}\n")  # noqa: NPY002

    def seeded(worker):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)

    for run in ("a", "b"):
        step = make(data=Rows(read), run=run, num_workers=1, loader_options={"worker_init_fn": seeded}, **whole_batch())
        seen.write_text("") if run == "a" else None
        step.take()
    first, *_, last = (line.split() for line in seen.read_text().splitlines())
    assert all(one != other for one, other in zip(first, last, strict=True))


def test_setting_torch_s_seed_during_a_step_is_refused(make):
    step = failing_step(make, "Dataset", lambda index: torch.manual_seed(0))
    with pytest.raises(PrivacyError, match="random seed was set during a training step"):
        step.take()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_example_that_ends_the_loader_early_is_an_error_and_not_a_shorter_step(make, num_workers):
    step = failing_step(make, "Dataset", lambda index: index == 9 and throw(StopIteration()), num_workers=num_workers)
    with pytest.raises(PrivacyError, match="could not be processed"):
        step.take()


def test_training_data_that_visibly_repeats_examples_is_refused(make):
    with pytest.raises(InputError, match=r"the same example several times \(the indices of a Subset repeat"):
        make(data=Subset(Rows(), [*range(EXAMPLES - 1), 0]))


def test_the_plan_of_a_step_and_the_noise_of_a_mechanism_cannot_be_exchanged(make):
    step = make()
    with pytest.raises(AttributeError):
        step.plan = plan_of(noise_multiplier=50.0)
    with pytest.raises(AttributeError):
        step.mechanism.noise_deviation = 0.1


def test_two_threads_do_not_take_a_step_together(make):
    inside, go_on = threading.Event(), threading.Event()
    step = failing_step(make, "Dataset", lambda index: (inside.set(), go_on.wait(20)))
    thread = threading.Thread(target=step.take)
    thread.start()
    assert inside.wait(20)
    try:
        with pytest.raises(PrivacyError, match="another thread is taking a step"):
            step.take()
    finally:
        go_on.set()
        thread.join()
    assert read_ledger(step.account.run_dir).steps == 1


def test_padding_that_depends_on_the_other_examples_is_refused(make):
    def padded(rows):
        longest = 5 + max(int(target) for _, target in rows)
        return torch.stack([nn.functional.pad(inputs, (0, longest - 5)) for inputs, _ in rows]), torch.stack(
            [target for _, target in rows]
        )

    with pytest.raises(PrivacyError, match="collate_fn gives an example another shape beside others than alone"):
        make(
            data=Rows(),
            loader_options={"collate_fn": padded},
            per_example_loss=lambda model, batch: model(batch[0][:, :5]).sum(1),
        )


@pytest.mark.parametrize("name", ["shuffle", "sampler", "batch_size", "generator"])
def test_a_loader_option_that_would_choose_batches_is_refused_by_name(make, name):
    with pytest.raises(InputError, match=f"loader_options has '{name}'"):
        make(data=Rows(), loader_options={name: None})


class Stopped(BaseException):
    """As what timeouts and cancelled tasks raise: no Exception."""


@pytest.mark.parametrize(
    "error", [ValueError("patient 93"), InputError("patient_93.png is broken"), SystemExit("patient 93"), Stopped("patient 93")]
)
def test_an_error_about_an_example_leads_nowhere_to_its_text(make, error):
    step = failing_step(make, "Dataset", lambda index: throw(error))
    with pytest.raises(PrivacyError, match="could not be processed") as caught:
        step.take()
    assert "93" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def talk(index=0):
    """Reads an example as libraries do that say something of it."""
    _warn_of_it()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("patient 93 again", stacklevel=1)
    logging.getLogger("decoder").critical("patient 93")
    Thread(target=lambda: 1 / 0, name="patient 93").start()
    Broken()


class Broken:
    def __del__(self):
        raise ValueError("patient 93")


def _warn_of_it():
    warnings.warn("patient 93 has a palette", stacklevel=1)


def _shown_by(work, capfd):
    """What ``work`` shows on the terminal of a program that shows warnings and log messages as Python does."""
    hooks = sys.unraisablehook, threading.excepthook
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("decoder").addHandler(handler)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.showwarning = lambda message, *where, **options: print(message, file=sys.stderr)
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        try:
            work()
        finally:
            sys.unraisablehook, threading.excepthook = hooks
            logging.getLogger("decoder").removeHandler(handler)
    return "".join(capfd.readouterr())


@pytest.mark.parametrize("where", ["Dataset", "worker", "spawned worker", "loss", "prepare"])
def test_nothing_python_says_while_examples_are_read_is_shown(make, capfd, where):
    options = {}
    if "worker" in where:
        options = {"num_workers": 1, "loader_options": {"worker_init_fn": _talk_again}}
        options["loader_options"] |= {"multiprocessing_context": "spawn"} if where == "spawned worker" else {}
    part = "Dataset" if "worker" in where else where
    assert "93" not in _shown_by(lambda: failing_step(make, part, talk, **options).take(), capfd)


def _talk_again(worker):
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *where, **options: print(message, file=sys.stderr)


def test_warnings_are_shown_as_ever_outside_of_steps_and_whatever_steps_withheld(make, capfd):
    talking = Armed(talk)
    step = make(data=Rows(talking), **whole_batch())

    def train():
        for talking.armed in (True, True, False):
            step.take()
        for _ in range(3):
            _warn_of_it()
            step.take() if step.account.remaining else None

    assert _shown_by(train, capfd).count("patient 93 has a palette") == 1, "once, as Python does"


def test_two_threads_that_withhold_at_once_leave_things_as_they_were():
    hooks = warnings.showwarning, sys.unraisablehook, threading.excepthook, logging.root.manager.disable, warnings.filters[:]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for found in [pool.submit(withheld, barrier.wait) for _ in range(2)]:
            found.result()
    assert hooks == (
        warnings.showwarning,
        sys.unraisablehook,
        threading.excepthook,
        logging.root.manager.disable,
        warnings.filters[:],
    )


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused():
    with pytest.raises(InputError, match="optimizer is LBFGS"):
        methods.Method.of(torch.optim.LBFGS(network().parameters()))
