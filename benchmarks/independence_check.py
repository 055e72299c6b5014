"""Cost of the independence check, compared with one step: `OMP_NUM_THREADS=1 python benchmarks/independence_check.py`.

CPU seconds, so that other work on the machine counts little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam import ClippedGradients, models


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    engine = ClippedGradients(models.wide_resnet(16, 4), loss, max_grad_norm=1.0)
    first = seconds(lambda: engine.check_independence((inputs[:3], labels[:3])))
    size = seconds(lambda: engine.check_independence((inputs, labels)))
    step = statistics.median(seconds(lambda: engine.accumulate((inputs, labels))) for _ in range(3))
    print(f"WRN-16-4, batch 64: independence check {first:.1f} s, at the batch's size {size:.1f} s more; a step {step:.1f} s")


if __name__ == "__main__":
    main()
