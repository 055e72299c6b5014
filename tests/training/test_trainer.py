"""The training loop does what the plan says, writes what it promises, and shows nothing private."""

import copy
import json
import re

import pytest
import torch

from dp_microadam import InputError, PrivacyError, PrivacyPlan
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.method import Method
from dp_microadam.training.rates import Schedule
from dp_microadam.training.trainer import UnprotectedPlan


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_it_stops_at_the_last_step_that_fits_the_budget(make_trainer, training_part):
    plan = PrivacyPlan.solve(dataset_size=len(training_part[0]), batch_size=64, delta=1e-5, noise_multiplier=1.0, epsilon=1.5)
    trainer = make_trainer(plan=plan)
    result = trainer.fit(training_part)
    assert result.finished
    assert result.steps_done == plan.steps
    assert result.epsilon <= 1.5 < plan.epsilon_after(plan.steps + 1)
    assert read_ledger(result.run_dir).steps == plan.steps


def test_the_schedule_follows_optimizer_steps_with_warm_up_from_the_first(make_trainer, training_part):
    schedule = Schedule("linear", 6, warmup=0.5)
    trainer = make_trainer(steps=6, schedule=schedule)
    rates = []
    trainer.callbacks = (lambda report: rates.append(report.learning_rate) if report.step else None,)
    trainer.fit(training_part)
    assert rates == pytest.approx([1e-2 * factor for factor in (1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3)])


def test_raw_and_averaged_weights_are_evaluated_and_the_averaged_ones_stay(
    make_trainer, training_part, validation_part, digits
):
    from dp_microadam.workbench.data import Preparation

    trainer = make_trainer(steps=4, average=0.9, evaluate_every=2)
    stepped = []
    trainer.callbacks = (lambda report: stepped.append(weights_of(trainer)),)
    result = trainer.fit(training_part, validation=validation_part)
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    raw, average = stepped[-1], trainer.average.state_dict()
    assert same(weights_of(trainer), average)
    with trainer.method.last_weights(trainer.model):
        assert same(weights_of(trainer), raw)
    assert same(weights_of(trainer), average)
    assert not same(raw, average)
    inputs, labels = Preparation(digits)(validation_part)
    for prefix, weights in (("", raw), ("ema_", average)):
        model = copy.deepcopy(trainer.model).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(inputs)
        expected = {
            f"{prefix}validation_accuracy": float((logits.argmax(1) == labels).double().mean()),
            f"{prefix}validation_loss": float(torch.nn.functional.cross_entropy(logits, labels)),
        }
        for name, value in expected.items():
            assert lines[-1][name] == result.metrics[name] == pytest.approx(value, abs=1e-5), name
    assert lines[-1]["validation_loss"] != lines[-1]["ema_validation_loss"]
    assert trainer.model.training


def test_it_learns(make_trainer, training_part, validation_part):
    # Ten classes: chance is 10 %. Noise is low here, so 150 steps are plenty.
    trainer = make_trainer(steps=150, batch_size=256, physical_batch_size=256)
    assert trainer.fit(training_part, validation=validation_part).metrics["validation_accuracy"] > 0.6


def test_any_dataset_will_do(make_trainer, digits):
    class Examples(torch.utils.data.Dataset):
        def __len__(self):
            return len(digits.train[1])

        def __getitem__(self, index):
            return digits.train[0][index], digits.train[1][index]

    from_tensors = make_trainer(steps=3, seed=4, run="tensors")
    from_tensors.fit(digits.train)
    from_dataset = make_trainer(steps=3, seed=4, run="dataset", num_workers=1)
    from_dataset.fit(Examples())
    assert same(weights_of(from_tensors), weights_of(from_dataset))


def test_a_dataset_of_another_size_than_the_plan_s_is_refused_before_anything_is_written(make_trainer, training_part):
    trainer = make_trainer()
    with pytest.raises(InputError, match="data has 100 examples"):
        trainer.fit((training_part[0][:100], training_part[1][:100]))
    assert not trainer.record.path.exists()


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adam(params, lr=1e-3),
        lambda params: torch.optim.RMSprop(params, lr=1e-3),
    ],
    ids=["microadam", "sgd", "adam", "rmsprop"],
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(make_trainer, training_part, optimizer):
    options = {"steps": 6, "seed": 11, "average": 0.9, "schedule": Schedule("cosine", 6, warmup=0.3), "optimizer": optimizer}
    whole = make_trainer(run="whole", **options)
    whole.fit(training_part)
    for stop in (2, 5):
        part = make_trainer(run="parts", max_steps=stop, **options)
        result = (part if stop == 2 else part.resume()).fit(training_part)
        assert (result.finished, result.steps_done, result.epsilon) == (True, stop, part.plan.epsilon_after(stop))
    last = make_trainer(run="parts", **options).resume()
    assert last.fit(training_part).finished
    assert same(weights_of(whole), weights_of(last))
    assert same(whole.average.state_dict(), last.average.state_dict())


def test_a_private_run_does_not_repeat_itself(make_trainer, training_part):
    first, second = make_trainer(run="a"), make_trainer(run="b")
    first.fit(training_part)
    second.fit(training_part)
    assert not same(weights_of(first), weights_of(second))


def test_a_fixed_seed_is_stamped_not_private_everywhere(make_trainer, training_part, capsys):
    trainer = make_trainer(seed=1, show_progress=True)
    result = trainer.fit(training_part)
    assert result.private is False
    assert "not private" in capsys.readouterr().err
    assert json.loads((result.run_dir / "privacy.json").read_text())["private"] is False
    assert "NOT PRIVATE" in (result.run_dir / "privacy.txt").read_text()
    assert "not private" in (result.run_dir / "ledger.jsonl").read_text().splitlines()[0]
    assert "not private" in (result.run_dir / "log.txt").read_text()


def test_a_non_private_run_is_stamped_so_and_claims_no_epsilon(make_trainer, training_part, validation_part, capsys):
    plan = UnprotectedPlan(len(training_part[0]), 64, 40)
    trainer = make_trainer(plan=plan, show_progress=True)
    result = trainer.fit(training_part, validation=validation_part)
    assert result.private is False
    assert result.epsilon is None
    assert "not private" in capsys.readouterr().err
    summary = json.loads((result.run_dir / "privacy.json").read_text())
    assert (summary["private"], summary["epsilon"], summary["steps_done"]) == (False, None, 40)
    assert result.metrics["validation_accuracy"] > 0.3


def test_training_metrics_appear_only_when_asked_for_and_marked(make_trainer, training_part, validation_part, capsys):
    silent = make_trainer(steps=4, evaluate_every=2, run="silent", show_progress=True)
    silent.fit(training_part, validation=validation_part)
    written = "".join(path.read_text() for path in silent.record.path.iterdir() if path.suffix in (".jsonl", ".json", ".txt"))
    assert "training_loss" not in written
    assert "training loss" not in capsys.readouterr().err
    loud = make_trainer(steps=4, evaluate_every=2, run="loud", show_progress=True, show_private_metrics=True)
    loud.fit(training_part, validation=validation_part)
    first = json.loads((loud.record.path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["outside_the_guarantee"].keys() == {"training_loss", "training_accuracy"}
    assert "outside the guarantee" in capsys.readouterr().err
    outside = json.loads((loud.record.path / "privacy.json").read_text())["outside_the_guarantee"]
    assert any("training batches" in item for item in outside)


def test_nothing_the_run_writes_depends_on_realised_batch_sizes(make_trainer, training_part, validation_part, capsys):
    # Two runs whose batches differ in size, by the sample: everything they write but weights is equal. Time and memory differ
    # between any two runs; that they are kept with two digits only is tested with the other run statistics. So do the run's
    # random name, and the hashes that begin with it.
    texts = []
    for run, seed in (("a", 1), ("b", 2)):
        trainer = make_trainer(steps=4, evaluate_every=2, run=run, seed=seed, show_progress=True)
        trainer.fit(training_part)
        files = [path for path in sorted(trainer.record.path.iterdir()) if path.suffix in (".jsonl", ".json", ".txt")]
        text = capsys.readouterr().err + "".join(path.read_text() for path in files)
        text = re.sub(r'"(steps_per_second|peak_memory_bytes)": [\d.e+-]+', r'"\1": ROUNDED', text)
        text = re.sub(r"\b([0-9a-f]{16}|[0-9a-f]{32})\b", "RANDOM", text)
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME", text).replace(f"/{run}", "/RUN").replace(f"seed {seed}", "seed")
        texts.append(text)
    assert texts[0] == texts[1]


def test_checkpoints_hold_no_random_state_and_no_partial_sums(make_trainer, training_part):
    trainer = make_trainer(average=0.5)
    trainer.fit(training_part)
    _, content, _ = trainer.record.checkpoints.newest()
    assert content.keys() == {"updates", "model", "method", "ledger_head"}
    assert content["method"].keys() == {"optimizer", "updates", "schedule", "average", "extra"}
    assert all(param.grad is None for param in trainer.model.parameters())
    # Of the optimizer's own seed it holds the one for rounding, which is post-processing.
    assert set(content["method"]["optimizer"]["state"][0]) == {"step", "indices", "values", "codes", "bounds"}


@pytest.mark.parametrize("began", ["a rate", "a distance"])
def test_a_resumed_run_keeps_the_rate_it_began_with(make_trainer, training_part, tmp_path, began):
    def method(params, kind):
        optimizer = torch.optim.SGD(params, lr=1e-3)
        return Method(optimizer, distance=0.5) if kind == "a distance" else Method(optimizer)

    make_trainer(optimizer=lambda params: method(params, began), max_steps=3, checkpoint_every=1).fit(training_part)
    other = "a rate" if began == "a distance" else "a distance"
    resumed = make_trainer(optimizer=lambda params: method(params, other), run="other").resume(tmp_path / "run")
    resumed.fit(training_part)
    (group,) = resumed.optimizer.param_groups
    assert (group["lr"], group.get("distance")) == (1e-3, 0.5 if began == "a distance" else None)


def test_an_optimizer_of_other_parameters_is_refused(make_trainer):
    with pytest.raises(InputError, match="that is not the model's"):
        make_trainer(optimizer=lambda params: torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))


def test_a_run_folder_that_exists_is_refused(make_trainer, training_part):
    make_trainer().fit(training_part)
    with pytest.raises(InputError, match=r"exists already; .*go on with: trainer\.resume\('.*'\)\.fit\(data\)"):
        make_trainer().fit(training_part)


def test_a_step_leaves_the_caller_s_random_stream_alone(make_trainer, training_part):
    trainer = make_trainer()
    torch.manual_seed(3)
    trainer.fit(training_part)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(3)))


def test_an_error_in_the_first_examples_says_nothing_private(make_trainer, training_part):
    class Records(torch.utils.data.Dataset):
        def __len__(self):
            return len(training_part[1])

        def __getitem__(self, index):
            raise ValueError("record of a patient aged 93")

    with pytest.raises(PrivacyError, match="could not be processed") as caught:
        make_trainer().fit(Records())
    assert "93" not in str(caught.value)


def test_no_error_tells_how_many_examples_were_drawn(make_trainer, training_part):
    trainer = make_trainer()
    loss = trainer.step.clip._engine._loss
    background = trainer.step.loading.prepared(training_part)[0][0, 0, 0, 0]

    # Of real images alone: the random ones that the check before the first step tries have no background.
    def without_sevens(model, batch):
        return loss(model, batch)[(batch[1] != 7) | (batch[0][:, 0, 0, 0] != background)]

    trainer.step.clip._loss = without_sevens
    with pytest.raises(PrivacyError, match="one value per example") as caught:
        trainer.fit(training_part)
    assert not any(character.isdigit() for character in str(caught.value))


def test_a_finished_run_is_not_trained_again(make_trainer, training_part, validation_part):
    make_trainer().fit(training_part, validation=validation_part)
    again = make_trainer().resume()
    assert again.fit(training_part, validation=validation_part).steps_done == 6


def test_an_error_in_a_training_batch_is_spent_and_says_nothing_private(make_trainer, training_part):
    labels = training_part[1].clone()
    labels[:] = 41
    trainer = make_trainer()
    with pytest.raises(PrivacyError, match="could not be processed") as caught:
        trainer.fit((training_part[0], labels))
    assert "41" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert read_ledger(trainer.record.path).steps == 1
    assert json.loads((trainer.record.path / "privacy.json").read_text())["steps_done"] == 1


def test_the_statement_never_claims_fewer_steps_than_what_it_covers(make_trainer, training_part, validation_part, monkeypatch):
    trainer = make_trainer(steps=6, evaluate_every=2, checkpoint_every=100)
    append, write = trainer.record.append_metrics, trainer.record.checkpoints.write
    covered = []

    def claimed():
        return json.loads((trainer.record.path / "privacy.json").read_text())["steps_done"]

    def checked_append(values):
        covered.append((values["step"], claimed()))
        append(values)

    def checked_write(position, content):
        covered.append((position, claimed()))
        return write(position, content)

    monkeypatch.setattr(trainer.record, "append_metrics", checked_append)
    monkeypatch.setattr(trainer.record.checkpoints, "write", checked_write)
    trainer.fit(training_part, validation=validation_part)
    assert [step for step, _ in covered] == [0, 2, 4, 6, 6]
    assert all(claim >= step for step, claim in covered)


def test_private_metrics_once_shown_stay_in_the_statement_after_a_resume(make_trainer, training_part, validation_part):
    first = make_trainer(steps=6, evaluate_every=2, max_steps=3, show_private_metrics=True)
    first.fit(training_part, validation=validation_part)
    make_trainer(steps=6).resume().fit(training_part, validation=validation_part)
    outside = json.loads((first.record.path / "privacy.json").read_text())["outside_the_guarantee"]
    assert any("training batches" in item for item in outside)


def test_modules_stay_in_the_mode_they_are_given_in(make_trainer, training_part, validation_part):
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.5).eval(), torch.nn.Linear(784, 10), torch.nn.Dropout(0.1)
    )
    make_trainer(model=model).fit(training_part, validation=validation_part)
    assert [module.training for module in model] == [True, False, True, True]


def test_validation_on_the_training_data_is_refused(make_trainer, training_part):
    trainer = make_trainer()
    with pytest.raises(InputError, match="validation shares examples with the training data"):
        trainer.fit(training_part, validation=(training_part[0], training_part[1]))
    assert not trainer.record.path.exists()


def test_examples_that_interact_are_refused_before_anything_is_written(make_trainer, training_part):
    class Centred(torch.nn.Module):
        def forward(self, batch):
            return batch - batch.mean(0)

    trainer = make_trainer(model=torch.nn.Sequential(torch.nn.Flatten(), Centred(), torch.nn.Linear(784, 10)))
    with pytest.raises(InputError):
        trainer.fit(training_part)
    assert not trainer.record.path.exists()


def standardized(batch):
    images, labels = batch
    return (images.float() - images.float().mean()) / (images.float().std() + 1e-3), labels


@pytest.mark.parametrize(
    ("part", "transform", "message"),
    [
        ("augment", lambda batch: tuple(torch.cat([part, part]) for part in batch), "augment or prepare makes 6 rows of 3"),
        (
            "augment",
            lambda batch: (batch[0].float() + batch[0].float().roll(1, 0), batch[1]),
            "augment or prepare mixes examples",
        ),
        ("augment", standardized, "augment or prepare mixes examples"),
        ("prepare", standardized, "prepare mixes examples"),
    ],
)
def test_a_transform_in_which_examples_meet_is_refused_before_anything_is_written(
    make_trainer, training_part, tmp_path, part, transform, message
):
    trainer = make_trainer()
    object.__setattr__(trainer.step.loading, part, transform)
    with pytest.raises(InputError, match=message):
        trainer.fit(training_part)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("hook", ["a callback", "the metrics file", "validation"])
def test_an_error_outside_the_step_writes_a_checkpoint_from_which_the_run_goes_on(
    make_trainer, training_part, validation_part, monkeypatch, hook
):
    """Nothing is lost but the error's own work: the weights of step 3 are there, and no step is spent twice."""
    failing = [True]

    def fail(*_, **__):
        if failing and trainer.step.position == 3:
            raise ConnectionError("the tracking server is away")

    def again():
        made = make_trainer(steps=6, seed=1, evaluate_every=3, checkpoint_every=100)
        if hook == "a callback":
            made.callbacks = (fail,)
        elif hook == "the metrics file":
            write = made.record.append_metrics
            made.record.append_metrics = lambda values: (fail(), write(values))
        else:
            measure = made.validation._means
            made.validation._means = lambda *given: (fail(), measure(*given))[1]
        return made

    trainer = again()
    with pytest.raises(ConnectionError):
        trainer.fit(training_part, validation=validation_part)
    assert trainer.record.checkpoints.newest()[0] == read_ledger(trainer.record.path).steps == 3
    failing.clear()
    trainer = again().resume()
    result = trainer.fit(training_part, validation=validation_part)
    assert (result.finished, result.steps_done, result.updates) == (True, 6, 6)
    whole = make_trainer(steps=6, seed=1, evaluate_every=3, run="whole")
    whole.fit(training_part, validation=validation_part)
    assert same(weights_of(whole), weights_of(trainer))


def test_callbacks_are_tried_before_the_first_step_is_spent(make_trainer, training_part):
    def wrong(report):
        raise AttributeError("no such field")

    trainer = make_trainer(callbacks=[wrong])
    with pytest.raises(AttributeError):
        trainer.fit(training_part)
    assert read_ledger(trainer.record.path).steps == 0


def test_callbacks_learn_public_facts_and_every_evaluation(make_trainer, training_part, validation_part):
    reports = []
    trainer = make_trainer(steps=5, evaluate_every=2, callbacks=[reports.append])
    result = trainer.fit(training_part, validation=validation_part)
    assert [(report.step, report.steps) for report in reports] == [(step, 5) for step in range(6)]
    assert set(vars(reports[0])) == {"step", "steps", "expected_batch", "plan", "learning_rate", "metrics", "resumed_at"}
    assert [report.step for report in reports if report.metrics is not None] == [2, 4, 5]
    assert reports[-1].metrics == result.metrics
    assert reports[-1].epsilon == result.epsilon
    assert reports[-1].expected_batch == 64
