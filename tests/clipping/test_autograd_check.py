"""Norms, sums and the clip are compared with autograd before the first step: an engine that does not clip is refused."""

import pytest
import torch
from torch import Tensor, nn

from dp_microadam.clipping.engine import ClippedGradients, ClippedRowNorms
from dp_microadam.clipping.rules.embedding import EmbeddingCall
from dp_microadam.clipping.rules.rule import PartsCall
from dp_microadam.errors import PrivacyError


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


OPTIONS = {
    "flat": {},
    "a bound that no gradient reaches": {"max_grad_norm": 1e6},
    "per layer": {"clipping": "per-layer"},
    "scaled": {"scale": {"0.weight": torch.full((6, 4), 3.0)}},
    "some rows": {"row_masks": {"0.weight": torch.arange(6) % 2 == 0}},
}


@pytest.fixture
def coefficients_of_one(monkeypatch):
    ones = staticmethod(lambda norms, bound: torch.ones_like(norms))
    monkeypatch.setattr(ClippedGradients, "_coefficients", ones)


@pytest.mark.parametrize("kind", [ClippedGradients, ClippedRowNorms])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_clipping_coefficients_that_are_all_one_are_refused_before_the_first_step(coefficients_of_one, kind, options):
    engine = kind(mlp(), loss, **{"max_grad_norm": 1.0, **options})
    with pytest.raises(PrivacyError, match="fault of the clipping engine"):
        engine.check_independence(torch.randn(8, 4))
    with pytest.raises(PrivacyError, match="fault of the clipping engine"):
        engine.accumulate(torch.randn(8, 4))
    assert all(not total.any() for total in engine.sums.values())


@pytest.mark.parametrize("kind", [ClippedGradients, ClippedRowNorms])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_engine_that_clips_is_accepted_and_left_as_it_was(kind, options):
    engine = kind(mlp(), loss, **{"max_grad_norm": 1.0, **options})
    bounds = engine.sensitivity, engine.layer_bounds
    engine.check_independence(torch.randn(8, 4))
    assert (engine.sensitivity, engine.layer_bounds) == bounds
    assert all(not total.any() for total in engine.sums.values())
    engine.scale = None  # refused within a step


def test_one_coefficient_for_a_whole_chunk_is_refused(monkeypatch):
    def coefficients(norms: Tensor, bound: float) -> Tensor:
        return (bound / torch.linalg.vector_norm(norms).clamp(min=bound)).expand_as(norms)

    monkeypatch.setattr(ClippedGradients, "_coefficients", staticmethod(coefficients))
    with pytest.raises(PrivacyError, match="fault of the clipping engine"):
        ClippedGradients(mlp(), loss, max_grad_norm=1.0).check_independence(torch.randn(8, 4))


def test_a_clip_that_leaves_out_biases_is_refused(monkeypatch):
    def clipped_sums(self: PartsCall, coefficients: Tensor) -> dict[str, Tensor]:
        ones = torch.ones_like(coefficients)
        return {name: part.weighted_sum(ones if name == "bias" else coefficients) for name, part in self.parts.items()}

    monkeypatch.setattr(PartsCall, "clipped_sums", clipped_sums)
    with pytest.raises(PrivacyError, match="fault of the clipping engine"):
        ClippedGradients(mlp(), loss, max_grad_norm=1.0).check_independence(torch.randn(8, 4))


def test_a_clip_that_leaves_out_embeddings_is_refused(monkeypatch):
    original = EmbeddingCall.clipped_sums
    monkeypatch.setattr(EmbeddingCall, "clipped_sums", lambda self, c: original(self, torch.ones_like(c)))
    with pytest.raises(PrivacyError, match="fault of the clipping engine"):
        ClippedGradients(nn.Embedding(5, 3), loss, max_grad_norm=1.0).check_independence(torch.randint(5, (8, 4)))


@pytest.mark.parametrize("refused", [False, True], ids=["clips", "does not clip"])
def test_models_that_draw_random_numbers_are_checked_too(monkeypatch, refused):
    model = nn.Sequential(nn.Linear(4, 60), nn.Dropout(0.5), nn.Linear(60, 2))
    state = torch.get_rng_state()
    if refused:
        ones = staticmethod(lambda norms, bound: torch.ones_like(norms))
        monkeypatch.setattr(ClippedGradients, "_coefficients", ones)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    if refused:
        with pytest.raises(PrivacyError, match="fault of the clipping engine"):
            engine.check_independence(torch.ones(8, 4))
    else:
        engine.check_independence(torch.ones(8, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_synthetic_examples_that_are_given_are_the_ones_that_are_clipped(coefficients_of_one):
    engine = ClippedGradients(mlp(), loss, max_grad_norm=1.0, synthetic_batch=torch.randn(5, 4))
    with pytest.raises(PrivacyError, match="fault of the clipping engine"):
        engine.check_independence(torch.randn(8, 4))
