"""``PrivateHFTrainer`` in the real ``transformers``: the same steps as ours, and no way round them."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torchmetrics
from accelerate.state import AcceleratorState
from flat import flat
from transformers import (
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

from dp_microadam import InputError, PrivacyError, PrivacyPlan, PrivateTrainer, methods
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.integrations.hugging_face import PrivateHFTrainer, causal_language_loss, classification_loss
from dp_microadam.integrations.private_steps import PrivateSteps
from dp_microadam.ledger.ledger import read_ledger

WORKER = Path(__file__).with_name("hugging_face_worker.py")
_spec = importlib.util.spec_from_file_location("hugging_face_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)

LENGTH, WORDS, COUNT = worker.LENGTH, worker.WORDS, 120
sentences, rows, bert, words = worker.sentences, worker.rows, worker.bert, worker.words


@pytest.fixture
def make(plan, tmp_path):
    """Builds a trainer; TrainingArguments in ``arguments``, the rest goes to the trainer."""
    opened = []

    def build(model=None, *, out="out", arguments=None, kind=PrivateHFTrainer, **options):
        settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
        args = TrainingArguments(output_dir=str(tmp_path / out), **{**settings, **(arguments or {})})
        options = {"plan": plan, "train_dataset": rows(sentences(COUNT, 0)), "eval_dataset": rows(sentences(20, 1)), **options}
        model = words() if model is None else model
        if "method" not in options:
            options.setdefault("optimizers", (torch.optim.SGD(model.parameters(), lr=0.5), None))
        opened.append(kind(model, args, **flat(**options)))
        return opened[-1]

    yield build
    for trainer in opened:
        trainer.private_steps.close()


def assert_equal(weights, expected, atol=0.0):
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(("kind", "unit"), [(bert, "example"), (words, "user")])
def test_weights_are_those_of_our_own_trainer(make, kind, unit, plan, plan_of_users, users, tmp_path):
    plan, users = (plan, None) if unit == "example" else (plan_of_users, users)
    arguments = {"lr_scheduler_type": "constant", "per_device_train_batch_size": 16}
    trainer = make(kind(), plan=plan, users=users, seed=4, arguments=arguments)
    trainer.train()
    twin = kind().train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    options = flat(seed=4, physical_batch_size=16, show_progress=False)
    ours = PrivateTrainer(twin, optimizer, plan, classification_loss, run_dir=tmp_path / "ours", **options)
    ours.fit(sentences(COUNT, 0), users=users)
    assert_equal(trainer.model.state_dict(), twin.state_dict())
    statement = (trainer.private_steps.run_dir / "privacy.txt").read_text()
    assert ("each of 40 users in each step" in statement) == (unit == "user")


def test_a_user_on_both_sides_is_refused(make, plan_of_users, users):
    with pytest.raises(InputError, match="a user has examples in the training data and in the held-out data"):
        make(plan=plan_of_users, users=users, validation_users=[77, 3])


class Spy(TrainerCallback):
    """Keeps all the host tells its callbacks."""

    def __init__(self):
        self.logs, self.batches = [], []

    def on_train_begin(self, args, state, control, train_dataloader=None, **rest):
        self.batches += list(train_dataloader)

    def on_log(self, args, state, control, logs=None, **rest):
        self.logs.append(dict(logs))


def test_the_host_sees_step_numbers_and_no_training_loss(make, plan, tmp_path):
    spy = Spy()
    trainer = make(callbacks=[spy], arguments={"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps"})
    result = trainer.train()
    assert all(batch == {"step": 0} for batch in spy.batches)
    assert result.training_loss is None
    written = json.loads((tmp_path / "out" / f"checkpoint-{plan.steps}" / "trainer_state.json").read_text())["log_history"]
    names = {name for line in (*spy.logs, *written) for name in line} | result.metrics.keys()
    assert not {name for name in names if "loss" in name or "sample" in name or "tokens" in name} - {
        "eval_loss",
        "eval_samples_per_second",
    }
    assert {"epsilon", "grad_norm", "learning_rate"} <= names
    assert result.metrics["epsilon"] == pytest.approx(plan.epsilon)


def test_a_checkpoint_has_the_statement_and_no_random_states(make, plan, tmp_path):
    trainer = make(arguments={"save_strategy": "steps", "save_steps": 5})
    trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-5"
    assert not list(checkpoint.glob("rng_state*"))
    assert json.loads((checkpoint / "privacy.json").read_text())["steps_done"] == 5
    trainer.save_model()
    assert (tmp_path / "out" / "privacy.txt").read_text().startswith("PRIVATE")


def test_resuming_goes_on_with_the_ledger_and_lost_steps_stay_spent(make, plan, tmp_path):
    make(arguments={"max_steps": 6, "save_strategy": "steps", "save_steps": 4}).train()
    # As after a crash: two steps were taken after the checkpoint.
    trainer = make(arguments={"save_strategy": "steps", "save_steps": 4})
    result = trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert result.global_step == plan.steps - 2
    assert read_ledger(tmp_path / "out" / "privacy").steps == plan.steps
    assert result.metrics["epsilon"] == pytest.approx(plan.epsilon)


def test_checkpoints_that_do_not_match_the_ledger_are_refused(make, tmp_path):
    for out in ("out", "other"):
        make(out=out, arguments={"max_steps": 4, "save_strategy": "steps"}).train()
    with pytest.raises(PrivacyError, match="another run"):
        make().train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-4"))
    state = tmp_path / "out" / "checkpoint-4" / "dp_microadam.pt"
    kept = state.read_bytes()
    state.unlink()
    with pytest.raises(PrivacyError, match="no private run wrote it"):
        make().train(resume_from_checkpoint=True)
    state.write_bytes(kept)
    ledger = tmp_path / "out" / "privacy" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyError, match="missing from the ledger"):
        make().train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"gradient_accumulation_steps": 2}, "noise is added once"),
        ({"max_grad_norm": 0.5}, r"give privacy=PrivacySettings\(max_grad_norm"),
        ({"train_sampling_strategy": "group_by_length"}, "Poisson samples"),
        ({"dataloader_drop_last": True}, "an empty one too"),
        ({"num_train_epochs": 5}, "the plan says how many steps"),
        ({"max_steps": 10}, "allows at most 9 steps"),
        ({"data_seed": 3}, "must not be repeatable"),
        ({"auto_find_batch_size": True}, "spent twice"),
        ({"include_num_input_tokens_seen": "all"}, "tokens a step saw is private"),
        ({"skip_memory_metrics": False}, "how large batches were"),
        ({"label_smoothing_factor": 0.1}, "smooth it there"),
        ({"optim": "adafactor"}, "optimizers="),
        ({"neftune_noise_alpha": 5.0}, "does not use it; leave it at None"),
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "does not use it; leave it at False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_would_break_the_guarantee_are_refused(make, arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        make(arguments=arguments)


def test_half_precision_is_refused_by_its_name(make, monkeypatch):
    # The host itself refuses fp16 without a GPU, before we are asked; on a machine with one, this is what happens.
    arguments = TrainingArguments("unused", report_to="none", use_cpu=True)
    arguments.fp16 = True
    with pytest.raises(InputError, match="fp16 is True: it scales losses and gradients"):
        PrivateHFTrainer(bert(), arguments, plan=PrivacyPlan(COUNT, 30, 1.0, 9, 1e-3), train_dataset=rows(sentences(COUNT, 0)))


@pytest.fixture
def fresh_accelerate():
    """Its settings are the same for all of a process; here another one begins."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_mixed_precision_reaches_the_clipping_engine(make, monkeypatch):
    # Products of bfloat16 are not available on every processor: what is asked for is looked at, and nothing is computed.
    asked = {}

    def begin(self, *arguments, **options):
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(PrivateSteps, "begin", begin)
    with pytest.raises(InterruptedError):
        make(arguments={"bf16": True}).train()
    assert asked["autocast"] is torch.bfloat16


@pytest.mark.usefixtures("fresh_accelerate")
def test_float16_from_the_environment_is_refused(make, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises((InputError, ValueError), match=r"mixed_precision is 'fp16'|fp16 mixed precision requires"):
        make()


def test_a_process_with_several_devices_is_refused(make, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(InputError, match="one process for each device with torchrun"):
        make()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process reaches."""
    return worker.train(tmp_path_factory.mktemp("alone"))


def test_a_method_with_phases_trains_as_in_our_own_trainer(alone, tmp_path):
    twin = worker.without_dropout()
    method = worker.sparta(twin)
    options = {"physical_batch_size": 7, "run_dir": tmp_path / "ours", "seed": 4, "show_progress": False}
    PrivateTrainer(twin, method, worker.PLAN, classification_loss, **flat(**options)).fit(sentences(worker.COUNT, 0))
    assert_equal(alone["weights"], twin.state_dict(), 1e-9)
    assert dict(read_ledger(tmp_path / "ours").phases) == {"head, biases, norms": 2, "scoring": 3, "selected rows": 3}


def test_a_method_s_state_is_in_the_checkpoint(alone, tmp_path):
    assert_equal(worker.train_in_parts(tmp_path), alone["weights"], 1e-9)
    assert torch.load(tmp_path / "checkpoint-4" / "dp_microadam.pt")["method"]["extra"]["totals"]


@pytest.mark.slow
def test_two_processes_reach_the_weights_of_one(run_group, alone):
    folder = run_group("hugging-face", 2, WORKER)
    for rank in range(2):
        found = torch.load(folder / f"trained-{rank}.pt")
        assert_equal(found["weights"], alone["weights"], 1e-9)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6), "evaluation is divided between them"
        assert_equal(torch.load(folder / f"parts-{rank}.pt"), alone["weights"], 1e-9)
    for run in ("trained", "parts"):
        assert read_ledger(folder / run / "privacy").processes == {2: worker.PLAN.steps}
        assert json.loads((folder / run / "privacy" / "privacy.json").read_text())["steps_done"] == worker.PLAN.steps


@pytest.mark.parametrize("precision", [None, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_sums_with_gradient_checkpointing_and_autocast_are_those_of_single_examples(make, precision):
    """All examples are in the sample, and the noise is too small to see: one step of SGD shows the mean gradient."""
    bound, noise = 1e-3, 0.05
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).to(
        torch.float64 if precision is None else torch.float32
    )
    before = copy.deepcopy(model)
    data = sentences(COUNT, 0)
    trainer = make(
        model,
        plan=PrivacyPlan(COUNT, COUNT, noise, 1, 1e-3),
        train_dataset=rows(data),
        max_grad_norm=bound,
        **flat(autocast=precision),
        optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
        arguments={"gradient_checkpointing": True, "lr_scheduler_type": "constant"},
    )
    trainer.train()
    assert model.is_gradient_checkpointing
    expected, _ = clipped_sum(before.double(), classification_loss, data, max_grad_norm=bound)
    # Seven deviations of the noise: 2.6e-12 for each of fewer than 10,000 coordinates, so that it fails with less than 3e-8.
    tolerance = 7 * noise * bound / COUNT
    assert sum(parameter.numel() for parameter in model.parameters()) < 10_000
    for name, parameter in model.named_parameters():
        moved = before.get_parameter(name) - parameter.double()
        rounding = 0.0 if precision is None else 3e-2 * bound
        torch.testing.assert_close(moved, expected[name] / COUNT, rtol=0, atol=tolerance + rounding, msg=name)


def test_options_of_the_private_step_are_reachable(make, tmp_path):
    seen = []

    def augment(batch):
        seen.append(len(batch["labels"]))
        return batch

    options = {
        "augment": augment,
        "clipping": "per-layer",
        "max_steps": 3,
        "physical_batch_size": 5,
        "public": ("the seasons",),
    }
    result = make(**options).train()
    assert result.global_step == read_ledger(tmp_path / "out" / "privacy").steps == 3
    assert 5 in seen  # besides the synthetic examples of the check
    assert "the seasons" in (tmp_path / "out" / "privacy" / "privacy.txt").read_text()


def test_options_that_contradict_the_host_s_are_refused(make):
    model = bert()
    with pytest.raises(InputError, match="give data_collator"):
        make(loader_options={"collate_fn": list})
    with pytest.raises(InputError, match="give it as method"):
        make(model, optimizers=(methods.dp_sgd(model), None))
    with pytest.raises(InputError, match="has its own optimizer"):
        make(model, method=methods.dp_sgd(model), optimizers=(torch.optim.SGD(model.parameters()), None))


def test_a_failed_step_is_spent_and_the_run_can_be_resumed_in_the_same_process(make, plan, tmp_path, capsys):
    failing, fail_at = [], [5]

    def loss(model, batch):
        if failing:
            raise ValueError(f"secret {batch['input_ids'][0]}")
        return classification_loss(model, batch)

    class FailLater(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            failing.extend(step for step in fail_at if step == state.global_step)

    often = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    trainer = make(per_example_loss=loss, callbacks=[FailLater()], arguments=often)
    with pytest.raises(PrivacyError, match="withheld") as caught:
        trainer.train()
    assert "secret" not in str(caught.value)
    assert read_ledger(tmp_path / "out" / "privacy").steps == 6
    failing.clear()
    fail_at.clear()
    result = trainer.train(resume_from_checkpoint=True)
    assert result.global_step == plan.steps - 2 == 7
    assert read_ledger(tmp_path / "out" / "privacy").steps == plan.steps
    ends = f"training ends after 7 updates instead of {plan.steps}"
    assert f"resumed at step 4; 2 steps after it were lost and stay spent, so that {ends}" in capsys.readouterr().err
    # Step 7 is evaluated and saved once, though the host expected to do so at 8.
    state = json.loads((tmp_path / "out" / "checkpoint-7" / "trainer_state.json").read_text())
    assert [line["step"] for line in state["log_history"] if "eval_loss" in line] == [4, 7]
    assert state["epoch"] == pytest.approx(7 / len(trainer.private_steps))


def test_a_second_run_in_the_same_folder_is_refused_before_anything_is_checked(make, monkeypatch):
    make().train()
    monkeypatch.setattr("dp_microadam.training.private_step.PrivateStep.attach", lambda *_: pytest.fail("it was checked"))
    with pytest.raises(InputError, match="has a ledger already; resume it, or use a new folder"):
        make().train()


class OwnLoss(PrivateHFTrainer):
    def compute_loss(self, model, inputs, **options):
        return super().compute_loss(model, inputs, **options)


def test_losses_over_a_batch_are_refused(make):
    with pytest.raises(InputError, match="compute_loss is overridden"):
        make(kind=OwnLoss)
    with pytest.raises(InputError, match="compute_loss_func"):
        make(compute_loss_func=lambda outputs, labels: outputs.logits.mean())


def test_searches_and_models_made_anew_are_refused(make):
    with pytest.raises(InputError, match="model_init"):
        make(model_init=bert)
    trainer = make()
    with pytest.raises(InputError, match="budget"):
        trainer.hyperparameter_search()
    with pytest.raises(InputError, match="trial"):
        trainer.train(trial={"lr": 1.0})


def test_a_collator_with_a_seed_is_refused(make):
    collator = DataCollatorForLanguageModeling.__new__(DataCollatorForLanguageModeling)
    collator.seed = 1
    with pytest.raises(InputError, match="predictable"):
        make(data_collator=collator)


def test_a_collator_that_packs_examples_into_one_row_is_refused(make):
    with pytest.raises(InputError, match="packs examples into one row, which would be clipped as one"):
        make(data_collator=DataCollatorWithFlattening())


def as_lists(data):
    return [{name: value.tolist() for name, value in row.items()} for row in data]  # as tokenizers give


PARTS = {
    "all": (rows, lambda data, columns: data),
    "a slice": (lambda columns: as_lists(rows(columns)), lambda data, columns: data[:16]),
    "rows of the tensors": (rows, lambda data, columns: rows({name: value[:16] for name, value in columns.items()})),
    "the name of a dict's entry": (rows, lambda data, columns: "train"),
}


@pytest.mark.parametrize("part", PARTS)
def test_metrics_of_training_data_are_refused(make, part):
    columns, (make_data, part_of) = sentences(COUNT, 0), PARTS[part]
    data, held_out = make_data(columns), make_data(sentences(16, 1))
    trainer = make(train_dataset=data, eval_dataset={"held_out": held_out, "train": None})
    trainer.eval_dataset["train"] = data
    for look in (trainer.evaluate, trainer.predict) if part != "the name of a dict's entry" else (trainer.evaluate,):
        with pytest.raises(InputError, match="hold it out"):
            look(part_of(data, columns))
    assert "eval_loss" in trainer.evaluate("held_out")


class Writer:
    """As TensorBoard's."""

    def __init__(self):
        self.written = []

    def add_scalar(self, *scalar):
        self.written.append(scalar)


class Gathering(BertForSequenceClassification):
    """Keeps figures of what goes through it, as models with metrics of their own do."""

    def __init__(self, config):
        super().__init__(config)
        self.accuracy = torchmetrics.SumMetric()
        self.metrics = {"train": [torchmetrics.MetricCollection([torchmetrics.SumMetric()])]}
        self.seen, self.tell = [], lambda model, logits: None

    def forward(self, input_ids, attention_mask=None, labels=None):
        found = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        self.tell(self, found.logits)
        return found


TELLINGS = {
    "metric": (lambda model, logits: model.accuracy.update(logits.argmax(1).sum()), "attribute 'accuracy.sum_value'"),
    "collection in a dict": (lambda model, logits: model.metrics["train"][0].update(len(logits)), "attribute 'metrics'"),
    "list": (lambda model, logits: model.seen.append(len(logits)), "attribute 'seen'"),
    "log": (lambda model, logits: model.trainer().log({"train_loss": 1.0}), r"\['train_loss'\] were logged"),
    "history": (lambda model, logits: model.trainer().state.log_history.append({}), "'trainer.state.log_history'"),
    "callbacks": (lambda model, logits: model.trainer().callback_handler.callbacks, "'?trainer.callback_handler'? was used"),
    "trackers": (lambda model, logits: model.trainer().accelerator.log({}), "'?trainer.accelerator'? was used"),
    "state": (lambda model, logits: setattr(model.trainer().state, "best_metric", 1.0), None),
    "control": (lambda model, logits: setattr(model.trainer().control, "should_training_stop", True), None),
    "rate": (lambda model, logits: model.trainer().optimizer.param_groups[0].update(lr=0.1), "'optimizer.param_groups'"),
    "config": (lambda model, logits: setattr(model.config, "train_loss", 1.0), None),
    "config's number": (lambda model, logits: setattr(model.config, "num_hidden_layers", 7), "attribute 'config'"),
    "writer": (lambda model, logits: model.writer.add_scalar("train_loss", 1.0), "'?writer'? was used"),
}


@pytest.mark.parametrize(("tell", "sentence"), TELLINGS.values(), ids=TELLINGS)
def test_figures_of_the_loss_reach_no_log(make, tmp_path, tell, sentence):
    torch.manual_seed(1)
    model = Gathering(bert().config)
    trainer = make(model, eval_dataset=None)
    model.trainer = lambda: trainer
    model.tell, model.writer = tell, Writer()
    if sentence is None:  # attributes that are set are put back
        trainer.train()
        assert (trainer.state.best_metric, hasattr(model.config, "train_loss")) == (None, False)
        assert trainer.state.global_step == trainer.state.max_steps
        return
    with pytest.raises(PrivacyError, match=sentence):
        trainer.train()
    assert model.seen == model.writer.written == []
    assert model.accuracy.compute() == model.metrics["train"][0]["SumMetric"].compute() == 0
    assert trainer.state.log_history == []
    assert not (tmp_path / "out" / "privacy").exists(), "refused before the first step"


def test_lengths_that_differ_are_refused_and_padding_to_one_length_is_not(make):
    ragged = [{"input_ids": [2] * (2 + i % 3), "labels": i % 2} for i in range(COUNT)]

    def pad(features, length):
        longest = length or max(len(one["input_ids"]) for one in features)
        ids = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in features]
        words = torch.tensor(ids)
        return {
            "input_ids": words,
            "attention_mask": (words != 0).long(),
            "labels": torch.tensor([f["labels"] for f in features]),
        }

    with pytest.raises(PrivacyError, match="pad all to one length"):
        make(train_dataset=ragged, data_collator=lambda features: pad(features, None)).train()
    result = make(out="padded", train_dataset=ragged, data_collator=lambda features: pad(features, LENGTH)).train()
    assert result.global_step == 9


def test_dropout_stays_on_after_an_evaluation(make):
    modes = []

    def loss(model, batch):
        modes.append(model.training)
        return classification_loss(model, batch)

    make(per_example_loss=loss, arguments={"eval_strategy": "steps", "eval_steps": 2}).train()
    assert all(modes)


def test_the_host_s_default_batch_of_eight_counts_as_not_set(make):
    def physical(**options):
        return make(**options).private_steps._performance.physical_batch_size

    assert physical() == 32
    assert physical(arguments={"per_device_train_batch_size": 16}) == 16
    assert physical(physical_batch_size=8) == 8


def test_noise_is_not_clipped_by_the_host(make):
    # σC/B = 1/3 in each of more than 600 coordinates: a norm of about 9, which the host would cut to 1.
    trainer = make(max_grad_norm=10.0)
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert min(norms) > 0.5 * 10 / 30 * parameters**0.5  # chance of failing below 1e-12: χ² of hundreds of degrees


@pytest.mark.parametrize("has", ["the default", "a method", "an optimizer"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"learning_rate": 0.01}, "learning_rate is 0.01: a method has its own rate or distance"),
        ({"adam_beta1": 0.8}, "a method has options of its own"),
    ],
)
def test_settings_that_a_method_does_not_have_are_refused(make, arguments, sentence, has):
    model = words()
    if has == "an optimizer":
        make(model, arguments=arguments)  # it is the host's business
        return
    given = {"method": methods.dp_sgd(model)} if has == "a method" else {"optimizers": (None, None)}
    with pytest.raises(InputError, match=sentence):
        make(model, arguments=arguments, **given)


def test_classification_loss_is_the_model_s_own_for_each_example():
    model, batch = bert().eval(), sentences(5, 2)
    alone = [model(**{name: value[i : i + 1] for name, value in batch.items()}).loss for i in range(5)]
    torch.testing.assert_close(classification_loss(model, batch), torch.stack(alone))


def test_causal_language_loss_is_the_model_s_own_for_each_example():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2)).eval()
    batch = sentences(5, 2)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][1, 3:] = -100
    alone = [model(**{name: value[i : i + 1] for name, value in batch.items()}).loss for i in range(5)]
    torch.testing.assert_close(causal_language_loss(model, batch), torch.stack(alone))


def test_labels_that_are_no_classes_are_refused_with_the_way_out(make):
    data = [{**row, "labels": row["input_ids"]} for row in rows(sentences(COUNT, 0))]
    with pytest.raises(InputError, match="causal_language_loss"):
        make(train_dataset=data).train()
