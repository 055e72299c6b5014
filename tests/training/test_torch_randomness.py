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


def test_all_words_of_a_random_state_differ_from_those_of_any_seed():
    first, second = random_state(), random_state()
    words = [state[24 : 24 + 8 * 624].view(torch.int64) for state in (first, second)]
    assert (words[0] == words[1]).float().mean() < 0.01  # two words of 32 bits are alike with probability 2e-10


def test_dropout_cannot_be_predicted_from_a_seed_set_before():
    drawn, model = [], torch.nn.Linear(1, 1)
    for _ in range(2):
        torch.manual_seed(0)
        with unpredictable_torch(model):
            drawn.append(torch.rand(4))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(*drawn)


def test_unpredictable_torch_draws_uniform_numbers():
    # Dvoretzky–Kiefer–Wolfowitz with N = 1e6: beyond 0.0029 with probability at most 1e-7.
    with unpredictable_torch(torch.nn.Linear(1, 1)):
        drawn = torch.rand(1_000_000)
    counts = torch.histc(drawn, bins=1000, min=0, max=1).double().cumsum(0) / 1e6
    assert float((counts - torch.arange(1, 1001, dtype=torch.float64) / 1000).abs().max()) <= 0.0029 + 2.0**-24
