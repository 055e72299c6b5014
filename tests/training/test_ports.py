"""What people bring from loops of their own: schedulers, collate functions, autocast, compiled modules."""

import pytest
import torch
from flat import flat
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from dp_microadam import ClippedGradients, InputError, Method, MicroAdam, PrivacyError, PrivacyPlan, PrivateTrainer

EXAMPLES, LONGEST = 40, 8


class Sentences(Dataset):
    """Sequences of 3 to 7 numbers, each with a class."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return torch.linspace(0, 1, 3 + index % 5), index % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LONGEST, 6), nn.Tanh(), nn.Linear(6, 3))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def padded(examples, length=LONGEST):
    inputs = [nn.functional.pad(one, (0, length - len(one))) for one, _ in examples]
    return torch.stack(inputs), torch.tensor([label for _, label in examples])


def to_the_longest(examples):
    return pad_sequence([one for one, _ in examples], batch_first=True), torch.tensor([label for _, label in examples])


def nested(examples):
    inputs = torch.nested.nested_tensor([one for one, _ in examples], layout=torch.jagged)
    return inputs, torch.tensor([label for _, label in examples])


@pytest.fixture
def trainer_of(tmp_path):
    def make(model=None, optimizer=None, per_example_loss=loss, **options):
        model = network() if model is None else model
        optimizer = MicroAdam(model.parameters()) if optimizer is None else optimizer
        plan, run = PrivacyPlan(EXAMPLES, 10, 1.0, 3, 1e-3), tmp_path / "run"
        method = Method.of(optimizer).configure(schedule=options.pop("schedule", None))
        return PrivateTrainer(model, method, plan, per_example_loss, run_dir=run, **flat(show_progress=False, **options))

    return make


def test_a_scheduler_that_ends_before_the_run_is_refused(trainer_of):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=2)
    with pytest.raises(InputError, match=r"OneCycleLR of 2 steps .*; make it for the 3 steps"):
        trainer_of(model, optimizer, schedule=schedule)


def test_a_function_in_place_of_a_scheduler_is_refused(trainer_of):
    with pytest.raises(InputError, match="schedule is a function; it must be a Schedule, or a torch scheduler"):
        trainer_of(schedule=lambda step: 0.5)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (None, "different shapes.*pads all to one length"),
        (to_the_longest, "pad all"),
        (nested, "nested tensor"),
    ],
)
def test_sequences_of_different_lengths_are_refused_before_a_step_is_spent(trainer_of, tmp_path, collate, message):
    trainer = trainer_of(loader_options={} if collate is None else {"collate_fn": collate})
    with pytest.raises(PrivacyError, match=message):
        trainer.fit(Sentences())
    assert not (tmp_path / "run").exists()


def test_sequences_that_are_padded_to_one_length_are_trained_on(trainer_of):
    result = trainer_of(loader_options={"collate_fn": padded}).fit(Sentences())
    assert result.finished


def clipped_sums(model, per_example_loss, **options):
    engine = ClippedGradients(model, per_example_loss, max_grad_norm=0.3, **options)
    engine.accumulate(padded([Sentences()[index] for index in range(12)]))
    return engine.sums


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "torch.compile(loss)"])
def test_what_is_compiled_runs_as_it_was_written_and_gives_the_same_sums(how):
    def compiler(graph, inputs):
        raise AssertionError("compiled within a private pass, which takes minutes and gains nothing")

    model, own_loss = network(), loss
    if how == "torch.compile(loss)":
        own_loss = torch.compile(loss, backend=compiler)
    elif how == "model.compile()":
        model.compile(backend=compiler)
    else:
        model = torch.compile(model, backend=compiler)
    found = clipped_sums(model, own_loss)
    for name, total in clipped_sums(network(), loss).items():
        assert torch.equal(found[f"_orig_mod.{name}" if how == "torch.compile(model)" else name], total)
