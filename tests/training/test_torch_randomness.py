"""Which of torch's random streams a step touches."""

import warnings

import pytest
import torch
from torch import nn

from dp_microadam.training.torch_randomness import forked_torch, random_state, seeded_torch, unpredictable_torch


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has two GPUs, whose streams cannot be touched: asking for one fails the test."""

    def touched(*_, **__):
        raise AssertionError("the stream of a GPU that the model is not on was touched")

    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)


@pytest.mark.parametrize("stream", [unpredictable_torch, forked_torch, lambda model: seeded_torch(model, 3, 5)])
def test_a_step_touches_no_gpu_that_the_model_is_not_on(two_gpus, stream):
    model = nn.Linear(2, 2)
    torch.default_generator.manual_seed(1)
    expected = torch.rand(3)
    torch.default_generator.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with stream(model):
            torch.rand(7)
    assert torch.equal(torch.rand(3), expected), "the caller's stream must go on where it was"


def test_a_trained_run_touches_no_gpu_that_the_model_is_not_on(make_trainer, training_part, request):
    trainer = make_trainer()  # seeds all streams, as users do
    request.getfixturevalue("two_gpus")
    assert trainer.fit(training_part).finished


def test_the_gpus_of_a_model_are_those_of_its_parameters(monkeypatch):
    forked = []

    class Forked:
        def __init__(self, devices):
            forked.append(devices)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    class Parameter:
        def __init__(self, gpu):
            self.is_cuda, self.gpu = gpu is not None, gpu

        def get_device(self):
            return self.gpu

    class Model(nn.Module):
        def parameters(self, recurse=True):
            return map(Parameter, (1, None, 3, 1))

    monkeypatch.setattr(torch.random, "fork_rng", Forked)
    with forked_torch(Model()) as gpus:
        assert gpus == [1, 3]
    assert forked == [[1, 3]]


def test_all_words_of_a_random_state_differ_from_those_of_any_seed():
    first, second = random_state(), random_state()
    words = [state[24 : 24 + 8 * 624].view(torch.int64) for state in (first, second)]
    assert (words[0] == words[1]).float().mean() < 0.01  # two words of 32 bits are alike with probability 2e-10
