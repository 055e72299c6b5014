"""What clipping users costs beside clipping as many examples: time per example, for users of different sizes.

    python benchmarks/users.py [--models "tanh cnn" mlp] [--users 64] [--most 8] [--physical-batch 64] [--rounds 7]
        [--device cuda] [--out FILE]

Users have from 1 to 24 examples, small numbers more often, of which at most --most enter a step. The same number of examples,
without users, is processed in turn with them; figures are medians of the ratio of both. Drawing the users' examples, putting
them into physical batches, fetching and padding count. The examples are random, because time does not depend on them. Also
printed: how many rows are padding, and how long the check before the first step takes with and without users.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from dp_microadam import ClippedGradients, Randomness
from dp_microadam.sampling.users import Units, widths
from dp_microadam.workbench.command_line.measuring import add_options, deliver, seconds, tell
from dp_microadam.workbench.models import mlp, small_cnn, tanh_cnn, wide_resnet

LARGEST = 24

# The engine checks the model again at calls 16, 32, 64, …, which is no part of a step.
_WARM_UP = 6

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(784), (1, 28, 28)),
    "tanh cnn": (tanh_cnn, (1, 28, 28)),
    "small cnn": (small_cnn, (3, 32, 32)),
    "wrn-16-4": (lambda: wide_resnet(depth=16, width=4), (3, 32, 32)),
    "text": (lambda: Text(), (32,)),
}


class Text(nn.Module):
    """A small transformer on sequences of 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.table(tokens)).mean(1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Median ratios of one model."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().to(options.device)
    sizes = np.minimum(np.random.default_rng(0).geometric(0.2, options.users), LARGEST)
    units, randomness = Units(np.repeat(np.arange(options.users), sizes), options.most), Randomness.seeded(0)
    count = int(sizes.sum())
    inputs = torch.randint(1000, (count, *shape)) if name == "text" else torch.rand(count, *shape)
    data = inputs.to(options.device), torch.randint(10, (count,)).to(options.device)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    sample = tuple(part[: options.physical_batch] for part in data)
    of_examples = seconds(lambda: engine.check_independence(sample), options.device)
    more = seconds(lambda: engine.check_independence(sample, rows_per_unit=widths(options.most)), options.device)

    def take(rows: Tensor, weights: Tensor | None = None) -> None:
        engine.accumulate(tuple(part[rows.to(options.device)] for part in data), weights)

    def users(step: int) -> None:
        for rows, weights in units.batches(np.arange(options.users), step, randomness, options.physical_batch):
            take(rows, weights.to(options.device))

    brought = int(np.minimum(sizes, options.most).sum())

    def examples(step: int) -> None:
        for rows in torch.arange(brought).split(options.physical_batch):
            take(rows)

    ratios = []
    for round_number in range(_WARM_UP + options.rounds):
        both = [seconds(lambda work=work, step=round_number: work(step), options.device) for work in (users, examples)]
        if round_number >= _WARM_UP:
            ratios.append(both[0] / both[1])
    batches = units.batches(np.arange(options.users), 0, randomness, options.physical_batch)
    return {
        "time per example, users over examples": statistics.median(ratios),
        "padding, part of all rows": 1 - brought / sum(weights.numel() for _, weights in batches),
        "physical batches of users": len(batches),
        "physical batches of examples": -(-brought // options.physical_batch),
        "check, users over examples": (of_examples + more) / of_examples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--most", type=int, default=8, help="k, the largest number of a user's examples in a step")
    parser.add_argument("--physical-batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    add_options(parser)
    options = parser.parse_args()
    found = {}
    for name in options.models:
        tell(f"{name}: {_WARM_UP + options.rounds} rounds")
        found[name] = measure(name, options)
        print(name)
        for what, value in found[name].items():
            print(f"    {what:<40} {value:.3g}", flush=True)
    deliver(options, "users", found)


if __name__ == "__main__":
    main()
