"""What is given in the wrong form is refused in one sentence, before a step is spent."""

import pytest
import torch
from flat import flat
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from dp_microadam import InputError, Method, PrivacyPlan, PrivateTrainer
from dp_microadam.ledger.ledger import LEDGER_NAME
from dp_microadam.training.given_data import count_examples, refuse_wrapped_model

INPUTS, LABELS = torch.rand(40, 4), torch.arange(40) % 3
PAIRS = list(zip(INPUTS, LABELS, strict=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(PAIRS)


class Endless(Dataset):
    def __getitem__(self, index):
        return PAIRS[index]


WRONG_DATA = {
    "a loader": (DataLoader(TensorDataset(INPUTS)), "is a DataLoader, which chooses its own batches; pass its dataset$"),
    "a weighted loader": (
        DataLoader(TensorDataset(INPUTS), sampler=WeightedRandomSampler([1.0] * 40, 40)),
        "pass its dataset, and give some examples more weight in the loss",
    ),
    "a stream": (Stream(), r"is an IterableDataset \(Stream\), whose examples have no numbers to draw; pass a map-style"),
    "a Dataset without a length": (Endless(), "is of type Endless, which has no __len__; it must be a map-style Dataset"),
    "a list of pairs": (PAIRS, "is a list of 40 items; it must be a map-style Dataset, or tensors"),
    "an array": (INPUTS.numpy(), "is a numpy array; pass tensors, which torch.from_numpy makes"),
    "arrays": ((INPUTS, LABELS.numpy()), "is a tuple with ndarray in it; torch.from_numpy makes tensors"),
    "nothing": ({}, "is a dict with nothing in it"),
    "tensors of several lengths": ((INPUTS, LABELS[:30]), "the tensors of .* have 30 and 40 rows"),
    "a number": (3, "is of type int; it must be a map-style Dataset"),
    "a generator": ((pair for pair in PAIRS), "is of type generator"),
    "a name": ("cifar10", "is of type str"),
}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def fit(tmp_path):
    def fitted(train=(INPUTS, LABELS), validation=None, **options):
        model = nn.Linear(4, 3)
        usual = PrivacyPlan.solve(dataset_size=40, batch_size=10, delta=1e-3, noise_multiplier=1.0, steps=4)
        plan = options.pop("plan", usual)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = PrivateTrainer(model, optimizer, plan, loss, run_dir=tmp_path / "run", **flat(show_progress=False, **options))
        return trainer.fit(train, validation)

    yield fitted
    assert not (tmp_path / "run" / LEDGER_NAME).exists(), "no step can have been spent"


@pytest.mark.parametrize("kind", WRONG_DATA)
@pytest.mark.parametrize("name", ["train", "validation"])
def test_data_of_a_wrong_kind_gets_one_sentence_for_validation_as_for_training(fit, name, kind):
    data, sentence = WRONG_DATA[kind]
    with pytest.raises(InputError, match=sentence) as caught:
        fit(**{name: data})
    assert name in str(caught.value)
    assert len(str(caught.value)) < 250


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float()


WRONG_MEASURES = {
    "a mean": (
        lambda model, batch: accuracy(model, batch).mean(),
        "is one number for all, such as a mean; it must be",
    ),
    "a number": (lambda model, batch: 3, "is of type int; it must be a tensor with one value per example"),
    "an array": (lambda model, batch: accuracy(model, batch).numpy(), "is of type ndarray"),
    "too few": (lambda model, batch: accuracy(model, batch)[:1], r"is a tensor of shape \[1\]"),
    "an error": (lambda model, batch: batch["labels"], r"validation fails on its first examples \(TypeError: tuple indices"),
}


@pytest.mark.parametrize("kind", WRONG_MEASURES)
def test_validation_is_tried_on_one_batch_before_the_first_step(fit, kind):
    measure, sentence = WRONG_MEASURES[kind]
    with pytest.raises(InputError, match=sentence):
        fit(validation=(torch.rand(20, 4), torch.arange(20) % 3), accuracy=measure)


@pytest.mark.parametrize("norm", [[1.0, 2.0], torch.ones(2), "1", True])
def test_a_clipping_norm_that_is_no_number_is_refused(fit, norm):
    with pytest.raises(InputError, match=r"max_grad_norm is .*; it must be one number above 0"):
        fit(max_grad_norm=norm)


def test_models_wrapped_by_something_else_are_refused_by_name():
    opacus = pytest.importorskip("opacus")
    for model, sentence in (
        (opacus.GradSampleModule(nn.Linear(2, 1)), r"is Opacus' GradSampleModule; pass the module in it, model\._module"),
        (nn.DataParallel(nn.Linear(2, 1)), r"is a DataParallel, which averages gradients on its own; pass model\.module"),
        (lambda inputs: inputs, "is of type function; it must be a torch.nn.Module"),
    ):
        with pytest.raises(InputError, match=sentence):
            refuse_wrapped_model(model)
    sharded = nn.Linear(2, 1)
    sharded.weight.placements = ()  # as a DTensor has
    with pytest.raises(InputError, match="parameter 'weight' is sharded, as fully_shard does"):
        refuse_wrapped_model(sharded)


def test_an_optimizer_of_opacus_and_a_plan_that_is_none_are_refused_by_name(fit):
    optimizers = pytest.importorskip("opacus.optimizers")
    plain = torch.optim.SGD(nn.Linear(2, 1).parameters())
    clipping = optimizers.DPOptimizer(plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    with pytest.raises(InputError, match=r"Opacus' DPOptimizer, .*; pass the optimizer in it, optimizer\.original_optimizer"):
        Method.of(clipping)
    with pytest.raises(InputError, match="plan is a NoneType; it must be a PrivacyPlan"):
        fit(plan=None)


def test_data_of_the_right_kinds_is_counted():
    for data in (INPUTS, (INPUTS, LABELS), {"x": INPUTS}, TensorDataset(INPUTS)):
        assert count_examples("train", data) == 40
