"""Weights in the loss are covered by the clipping; samplers that draw unequally are refused with the reason."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from dp_microadam import InputError, PerformanceSettings, UnprotectedPlan
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.recipes.assemble import assemble, weighted_class_loss
from dp_microadam.workbench.recipes.recipe import Recipe


def batch_of(count: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 5, generator=generator), torch.randint(0, classes, (count,), generator=generator)


def clipped_sum(loss, model, batch, bound=0.5) -> torch.Tensor:
    engine = ClippedGradients(model, loss, max_grad_norm=bound)
    try:
        engine.reset()
        engine.accumulate(batch)
        return torch.cat([total.flatten() for total in engine.sums.values()]).clone()
    finally:
        engine.close()


@pytest.mark.slow
@examples(20, quick=20)
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3), count=st.integers(1, 5))
def test_an_example_adds_at_most_the_clipping_norm_whatever_its_weight(weights, count):
    """With one example more the sum moves by C at most; and it is the sum of clipped weighted gradients, taken one by one."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    inputs, labels = batch_of(count + 1)
    inputs = inputs.double()
    loss = weighted_class_loss(weights)
    both = [clipped_sum(loss, model, (inputs[:size], labels[:size])) for size in (count, count + 1)]
    assert (both[1] - both[0]).norm() <= 0.5 * (1 + 1e-6)
    expected = torch.zeros_like(both[0])
    for example in range(count):
        value = weights[labels[example]] * class_loss(model, (inputs[example, None], labels[example, None])).sum()
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(value, list(model.parameters()))])
        expected += gradient * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(both[0], expected, rtol=1e-5, atol=1e-6)


def test_a_weight_of_a_million_adds_the_clipping_norm_and_no_more():
    total = clipped_sum(weighted_class_loss([1e6, 1.0, 1.0]), nn.Linear(5, 3), (torch.randn(1, 5), torch.tensor([0])))
    assert float(total.norm()) == pytest.approx(0.5, rel=1e-5)


def test_weights_are_torchs_and_evaluation_has_none():
    model = nn.Linear(5, 3)
    batch = batch_of(8)
    weighted = weighted_class_loss([1.0, 2.0, 0.5])
    theirs = nn.functional.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 0.5]), reduction="none")
    torch.testing.assert_close(weighted(model, batch), theirs)
    model.eval()
    torch.testing.assert_close(weighted(model, batch), class_loss(model, batch))


def recipe(**options) -> Recipe:
    settings = {"name": "weights", "data": "digits", "model": "mlp", "epsilon": 8, "steps": 3, "batch_size": 64}
    return Recipe(**settings, validation_size=50, checkpoint_every=3, **options)


def test_a_recipe_with_weights_trains_says_so_and_has_the_epsilon_of_one_without(tmp_path):
    weights = [1.0] * 9 + [3.0]
    experiment = assemble(recipe(class_weights=weights), tmp_path / "run", show_progress=False)
    experiment.fit()
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "weights of the classes in the loss (1, 1, 1, 1, 1, 1, 1, 1, 1, 3)" in written["public_by_declaration"]
    assert written["epsilon"] == experiment.trainer.plan.epsilon
    assert Recipe.from_toml(experiment.recipe.to_toml()).class_weights == tuple(weights)


def test_weights_for_another_number_of_classes_are_refused(tmp_path):
    with pytest.raises(InputError, match="class_weights has 3 numbers, but digits has 10 classes; it must have one for each"):
        assemble(recipe(class_weights=[1, 2, 3]), tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()


def test_a_sampler_that_draws_unequally_is_refused_with_the_reason_and_what_to_do_instead():
    data = TensorDataset(*batch_of(10))
    unequal = WeightedRandomSampler([0.1] * 5 + [0.9] * 5, 10)
    with pytest.raises(InputError, match=r"DataLoader with a WeightedRandomSampler; ε is .* more weight in the loss"):
        PoissonSampler(UnprotectedPlan(10, 5, 1)).load(DataLoader(data, sampler=unequal))
    for name in ("sampler", "batch_sampler"):
        with pytest.raises(InputError, match=f"loader_options has '{name}'.* more weight in the loss instead"):
            PerformanceSettings(loader_options={name: unequal})
    with pytest.raises(InputError, match="data is a DataLoader, which chooses its own batches"):
        PoissonSampler(UnprotectedPlan(10, 5, 1)).load(DataLoader(data, shuffle=True))
