"""Cost of the independence check, compared with one step: `OMP_NUM_THREADS=1 python benchmarks/independence_check.py`.

CPU seconds, so that other work on the machine counts little; on a GPU (`--device cuda`) seconds on the wall clock.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from measuring import add_options, deliver, seconds, tell
from torch import Tensor, nn

from dp_microadam import ClippedGradients
from dp_microadam.workbench import models


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    device = options.device
    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 3, 32, 32).to(device), torch.randint(10, (64,)).to(device)
    engine = ClippedGradients(models.wide_resnet(16, 4).to(device), loss, max_grad_norm=1.0)
    tell("WRN-16-4: the independence check, with three examples")
    first = seconds(lambda: engine.check_independence((inputs[:3], labels[:3])), device)
    tell(f"{first:.1f} s; now at the size of the batch")
    size = seconds(lambda: engine.check_independence((inputs, labels)), device)
    tell(f"{size:.1f} s; now three steps")
    step = statistics.median(seconds(lambda: engine.accumulate((inputs, labels)), device) for _ in range(3))
    print(f"WRN-16-4, batch 64: independence check {first:.1f} s, at the batch's size {size:.1f} s more; a step {step:.1f} s")
    deliver(options, "independence check, WRN-16-4, batch 64", {"check": first, "at_size": size, "step": step})


if __name__ == "__main__":
    main()
