"""One contract for all methods: they resume exactly, repeat with a seed, leave the model's flags alone, and train."""

import pytest
import torch

from dp_microadam import methods
from dp_microadam.methods import PublicExamples
from dp_microadam.methods.registry import build
from dp_microadam.methods.table import METHODS, kept_bytes
from dp_microadam.training.rates import RunNoise
from dp_microadam.workbench.recipes.assemble import assemble
from dp_microadam.workbench.recipes.recipe import Recipe

STP = "scale-then-privatize"
VARIANTS = {
    # name: method, options on the tiny problem, and for training: more options and a learning rate for 200 steps
    "dp-walk": ("dp-walk", {}, {}, None),
    "dp-threshold": ("dp-threshold", {}, {}, None),
    "dp-microadam": ("dp-microadam", {}, {}, 3e-3),
    "dense error": ("dp-microadam", {"quantize": False}, {}, 3e-3),
    "tensor scope": ("dp-microadam", {"scope": "tensor"}, {}, 3e-3),
    "window's bias": ("dp-microadam", {"bias_correction": "window"}, {}, 3e-2),
    "no warm-up": ("dp-microadam", {"bias_correction": "steady"}, {}, 3e-3),
    "density 0.1 %": ("dp-microadam", {"density": 0.001}, {}, 3e-3),
    "density 100 %": ("dp-microadam", {"density": 1.0}, {}, 3e-3),
    "dp-sgd": ("dp-sgd", {}, {}, 2.0),
    "momentum": ("dp-sgd", {"momentum": 0.9}, {}, 0.2),
    "dp-adam": ("dp-adam", {}, {}, 1e-3),
    "dp-adamw": ("dp-adamw", {}, {}, 1e-3),
    "dp-adambc": ("dp-adambc", {}, {}, 1e-3),
    "scaled, Adam": (STP, {}, {}, 1e-3),
    "scaled, MicroAdam": (STP, {"base_optimizer": "microadam"}, {}, 3e-3),
    "delayed": (STP, {"source": "delayed", "interval": 2}, {"interval": 20, "rate_ratio": 0.025}, 2.0),
    "delayed, Adam": (STP, {"source": "delayed", "interval": 2, "base_optimizer": "adam"}, {"interval": 20}, 1e-3),
    "public": (STP, {"source": "public", "public": None}, {"public": 100}, 1.0),
    "dp-bitfit": ("dp-bitfit", {}, {}, 0.5),
    "dp-bitfit, Adam": ("dp-bitfit", {"base_optimizer": "adam"}, {}, 1e-2),
    "sparta, sum": ("sparta", {"keep": 0.3}, {"scoring_epochs": 0.5}, 0.5),
    "sparta, norms": ("sparta", {"keep": 0.3, "scores": "norms"}, {"scoring_epochs": 0.5}, 0.5),
    "sparta, rows only": ("sparta", {"keep": 0.3, "rows_only": True}, {"scoring_epochs": 0.5}, 0.5),
}


def sample_of(variants, quick):
    """All variants, of which those that are not named in ``quick`` run in ``make test-all`` only."""
    return pytest.mark.parametrize(
        "variant", [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in variants]
    )


# One per kind of state or of phases that a method may have.
KINDS = [
    *("dp-threshold", "dp-microadam", "dense error", "momentum", "dp-adam", "dp-adamw", "dp-adambc", "scaled, MicroAdam"),
    *("delayed", "public", "dp-bitfit", "sparta, sum", "sparta, norms"),
]
# And one of every method, those that somebody adds among them.
OF_EACH_KIND = [*KINDS, *(name for name, (method, *_) in VARIANTS.items() if method not in {VARIANTS[one][0] for one in KINDS})]


def wired(variant, hand):
    method, options, _, _ = VARIANTS[variant]
    if "public" in options:
        options = {**options, "public": PublicExamples(hand.examples(5, seed=9), hand.half_squared_error, batch_size=2)}
    return lambda model: build(method, model, options, lr=0.05)


def test_every_method_is_here():
    assert {method for method, *_ in VARIANTS.values()} == set(METHODS)
    assert {VARIANTS[name][0] for name in OF_EACH_KIND} == set(METHODS)


def test_every_method_is_a_function_of_the_package():
    import dp_microadam

    for name in METHODS:
        function = getattr(dp_microadam.methods, name.replace("-", "_"))
        assert function.__name__ == name.replace("-", "_")
        assert function.__doc__


@sample_of([*VARIANTS, *(f"{name} without privacy" for name in VARIANTS)], [*OF_EACH_KIND, "delayed without privacy"])
def test_it_resumes_to_the_bit_at_every_phase_boundary(hand, tmp_path, variant):
    # Ten steps: boundaries are at 2 and 4 for sparta, at every second step for DP².
    make, private = wired(variant.removesuffix(" without privacy"), hand), not variant.endswith(" without privacy")
    torch.manual_seed(0)
    whole = hand.train(make, tmp_path / "whole", steps=10, private=private)
    start = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.trainer.fit(whole.data)
    for stop in (2, 3, 4, None):
        torch.manual_seed(0)
        part = hand.train(make, tmp_path / "parts", steps=10, private=private, max_steps=stop)
        (part.trainer if stop == 2 else part.trainer.resume()).fit(part.data)
    assert part.trainer.finished
    found = whole.model.state_dict()
    assert all(torch.equal(value, part.model.state_dict()[name]) for name, value in found.items())
    assert any(not torch.equal(value, start[name]) for name, value in found.items())


@sample_of(VARIANTS, OF_EACH_KIND)
def test_what_is_trainable_is_so_again_afterwards(hand, tmp_path, variant):
    def with_a_frozen_bias(model):
        model[0].bias.requires_grad_(False)
        return wired("dp-adam" if variant.startswith("dp-bitfit") else variant, hand)(model)

    run = hand.train(with_a_frozen_bias, tmp_path / "run", steps=10)
    frozen = run.model[0].bias.detach().clone()
    run.trainer.fit(run.data)
    assert [parameter.requires_grad for parameter in run.model.parameters()] == [True, False, True, True]
    assert torch.equal(run.model[0].bias, frozen)


@sample_of([*VARIANTS, "dp-adambc without privacy"], ["dp-threshold", "scaled, Adam", "dp-adambc without privacy"])
def test_it_trains_digits_in_200_steps_to_far_better_than_chance(tmp_path, variant):
    # Ten classes: chance is 10 %. A fixed seed, so that it cannot fail by chance.
    method, options, for_training, rate = VARIANTS[variant.removesuffix(" without privacy")]
    recipe = Recipe(
        name="short",
        data="digits",
        model="mlp",
        model_options={"hidden": 16},
        **({"method": "non-private", "base": method} if variant.endswith(" without privacy") else {"method": method}),
        optimizer={**options, **for_training},
        learning_rate=rate,
        epsilon=8.0,
        steps=200,
        batch_size=128,
        seed=1,
        evaluate_every=1000,
        checkpoint_every=1000,
    )
    experiment = assemble(recipe, tmp_path / "run", show_progress=False)
    assert experiment.fit().finished
    assert experiment.test_results()[0].accuracy > 0.35


@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if entry.path is None])
def test_the_table_says_what_a_method_keeps_for_each_parameter(name):
    model = torch.nn.Linear(1000, 1000, bias=False)
    method = getattr(methods, name.replace("-", "_"))(model)
    method.prepare(RunNoise(0.1, 10, 10.0), 10)
    method.update(model, {"weight": torch.randn(1000, 1000)})
    state = [value for kept in method.optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    held = {"optimizer": state, "average": method.average.state_dict().values() if method.average else ()}
    told = kept_bytes(name, bands=1)
    for part, tensors in held.items():
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
        assert size == pytest.approx(told[part], abs=0.01), part
