"""The centre of an image in torch operations, for deployed models, is byte for byte what Pillow gives in evaluation."""

import numpy as np
import pytest
import torch
from PIL import Image

from dp_microadam.workbench.data.resampling import ResizedCentre, resized_centre


def both_ways(pixels: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    by_pillow = torch.from_numpy(np.array(resized_centre(Image.fromarray(pixels), size))).permute(2, 0, 1)
    return by_pillow, ResizedCentre(size)(torch.from_numpy(pixels).permute(2, 0, 1)[None])[0]


@pytest.mark.parametrize("size", [(37, 190), (190, 37), (28, 28), (32, 32), (3, 5), (1, 1), (64, 300), (131, 77)])
@pytest.mark.parametrize("kind", ["noise", "black and white"])
def test_the_resized_centre_in_torch_is_pillow_s_to_the_byte(size, kind):
    drawn = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    by_pillow, by_torch = both_ways(drawn if kind == "noise" else (drawn // 128 * 255).astype(np.uint8), 28)
    assert by_torch.dtype == torch.uint8
    assert torch.equal(by_pillow, by_torch)
