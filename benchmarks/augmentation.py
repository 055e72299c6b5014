"""What augmentation costs beside a private step: WRN-16-4 on 32×32 images.

    python benchmarks/augmentation.py [--batch 128] [--rounds 5] [--threads 1] [--device cuda] [--json] [--out FILE]

Each way of augmenting a physical batch, with the normalization that follows it, is measured in processor time (on a GPU: on
the wall clock) and compared with the time of the clipped gradients of that batch. Rounds are interleaved, so that a busy
machine disturbs both alike, and medians of the shares are shown. K views make K times as many images for both. The goal is 3 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import partial

import torch

from dp_microadam import ClippedGradients
from dp_microadam.training.evaluation import class_loss, over_views
from dp_microadam.workbench.command_line.measuring import add_options, deliver, seconds, tell
from dp_microadam.workbench.data import Augmentation, LabelledData, Preparation
from dp_microadam.workbench.models import wide_resnet

WAYS = {
    "crop with padding 4, flip": Augmentation(crop_padding=4, flip=True),
    "crop with padding 4, flip, 4 views": Augmentation(crop_padding=4, flip=True, multiplicity=4),
    "resized crop, flip": Augmentation(resized_crop=True, flip=True),
    "resized crop, flip, 4 views": Augmentation(resized_crop=True, flip=True, multiplicity=4),
}
_REPEATS = 20
"""Augmentation is short: so many runs make one measurement."""


def measure(batch: int, rounds: int, device: str) -> Iterator[tuple[str, dict[str, float]]]:
    """For each way the median seconds of augmentation and of the gradients, and the median of their ratios."""
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (batch,))
    raw = (images.to(device), labels.to(device))
    prepare = Preparation(LabelledData("random", 10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3, raw, raw, raw))
    model = wide_resnet(depth=16, width=4).to(device)
    engine = ClippedGradients(model, over_views(class_loss, (3, 32, 32)), max_grad_norm=1.0)

    def augmented(way: Augmentation, repeats: int) -> None:
        for _ in range(repeats):
            prepare(way(raw))

    for name, way in WAYS.items():
        tell(f"{name}: {rounds} rounds")
        ready = prepare(way(raw))
        engine.accumulate(ready)  # what happens once per shape, above all the independence check, is not part of a step
        augmented(way, 2)
        pairs = []
        for _ in range(rounds):
            cost = seconds(lambda way=way: augmented(way, _REPEATS), device) / _REPEATS
            step = seconds(lambda ready=ready: engine.accumulate(ready), device)
            engine.reset()
            pairs.append((cost, step))
        yield (
            name,
            {
                "augmentation": statistics.median(cost for cost, _ in pairs),
                "gradients": statistics.median(step for _, step in pairs),
                "share": statistics.median(cost / (cost + step) for cost, step in pairs),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    show = tell if options.json else partial(print, flush=True)
    show(f"{'augmentation of ' + str(options.batch) + ' images':38}{'its ms':>10}{'gradients ms':>14}{'share':>9}")
    found = {}
    for name, row in measure(options.batch, options.rounds, options.device):
        found[name] = row
        show(f"{name:38}{1000 * row['augmentation']:10.2f}{1000 * row['gradients']:14.0f}{100 * row['share']:8.2f} %")
    deliver(options, "augmentation", {"batch": options.batch, "ways": found})
    if options.json:
        print(json.dumps({"batch": options.batch, "threads": options.threads, "ways": found}))


if __name__ == "__main__":
    main()
