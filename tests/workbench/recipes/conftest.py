"""Made-up images in CIFAR-10's format."""

import numpy as np
import pytest


@pytest.fixture
def cifar10(tmp_path):
    """Settings of a recipe that name such files."""
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    return [f"data_folder={tmp_path}", "verify_data=false"]
