"""Per-example gradients agree with those of Opacus, an independent implementation, on what both support."""

import pytest
import torch
from opacus import GradSampleModule
from torch import Tensor, nn

from dp_microadam import ClippedGradients

NETWORKS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.GroupNorm(4, 8),
            nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False),
            nn.InstanceNorm2d(8, affine=True),
            nn.Flatten(),
            nn.Linear(72, 4),
        ),
        lambda: torch.randn(5, 3, 8, 8),
    ),
    "signals": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, dilation=2), nn.Tanh(), nn.Conv1d(4, 2, 1), nn.Flatten(), nn.Linear(12, 2)),
        lambda: torch.randn(5, 2, 10),
    ),
    "text": (
        lambda: nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Flatten(), nn.Linear(42, 3)),
        lambda: torch.randint(11, (5, 7)),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("strategy", [None, "ghost", "keep", "drop"])
def test_clipped_sums_agree_with_opacus_grad_samples(name, strategy):
    torch.manual_seed(0)
    build, batch = NETWORKS[name]
    model, x = build(), batch()
    twin = GradSampleModule(build(), loss_reduction="sum")
    twin._module.load_state_dict(model.state_dict())

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sin().sum(1)

    loss(twin, x).sum().backward()
    samples = {name: p.grad_sample for name, p in twin._module.named_parameters()}
    norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples.values()]).norm(dim=0)
    bound = float(norms.median())
    coefficients = (bound / norms).clamp(max=1)
    engine = ClippedGradients(model, loss, max_grad_norm=bound, strategy=strategy)
    torch.testing.assert_close(engine.accumulate(x), norms, rtol=1e-5, atol=1e-6)
    for name, part in engine.sums.items():
        torch.testing.assert_close(part, torch.einsum("b,b...->...", coefficients, samples[name]), rtol=1e-4, atol=1e-5)
