"""Every family of models is clipped exactly: sums and norms are those of one example at a time."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.workbench import models
from dp_microadam.workbench.models import TransformerSize
from dp_microadam.workbench.models.resnets import NormalizerFreeResNet

SMALL = TransformerSize(width=16, layers=2, heads=2)
REAL = os.environ.get("DP_MICROADAM_VIT_TINY")


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_of(count: int, side: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=generator, dtype=dtype), torch.arange(count) % 3


def small_nf_resnet() -> nn.Module:
    return NormalizerFreeResNet((2, 1), 1, 3)


FAMILIES = {
    # name: model, side of its images
    "wide-resnet": (lambda: models.wide_resnet(10, 1, 3), 8),
    "nf-resnet": (small_nf_resnet, 32),
    "vit": (lambda: models.vit(SMALL, 3, resolution=16, patch_size=8), 16),
    "vit, resized": (lambda: models.vit(SMALL, 3, resolution=24, patch_size=8), 16),
    "vit, head only": (lambda: models.vit(SMALL, 3, resolution=16, patch_size=8, trainable="head"), 16),
}


def assert_clipped_exactly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    _, norms = clipped_sum(model, loss, batch, max_grad_norm=1.0)
    bound = sorted(norms)[len(norms) // 2] * 0.999  # some examples are clipped, some are not
    expected, _ = clipped_sum(model, loss, batch, max_grad_norm=bound)
    engine = ClippedGradients(model, loss, max_grad_norm=bound)
    found = engine.accumulate(batch)
    torch.testing.assert_close(found, torch.tensor(norms, dtype=found.dtype), rtol=1e-9, atol=0)
    assert engine.sums.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(engine.sums[name], total, rtol=1e-7, atol=1e-9 * bound)


@pytest.mark.parametrize("family", FAMILIES)
def test_clipped_sums_are_those_of_one_example_at_a_time(family):
    torch.manual_seed(0)
    build, side = FAMILIES[family]
    assert_clipped_exactly(build().double(), batch_of(4, side))


# The others have no kind of parameter that these lack.


@pytest.mark.skipif(not REAL, reason="DP_MICROADAM_VIT_TINY names no vit_tiny_patch16_224.safetensors")
@pytest.mark.parametrize("trainable", ["all", "head"])
def test_a_pretrained_model_of_real_size_is_clipped_to_the_bound(trainable):
    torch.manual_seed(0)
    model = models.vit("tiny", 3, pretrained=REAL, resolution=32, trainable=trainable)
    engine = ClippedGradients(model, loss, max_grad_norm=1e-3)
    norms = engine.accumulate(batch_of(3, 32, torch.float32))
    assert bool((norms > 1e-3).all())
    total = torch.cat([part.flatten() for part in engine.sums.values()])
    assert 0 < float(total.norm()) <= 3e-3 * (1 + 1e-5)
