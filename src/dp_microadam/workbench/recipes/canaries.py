"""Canaries for the audit of one's own run: synthetic examples of a declared kind, about half of them in the training data.

Each canary is noise with a label at random: for images every pixel is black or white, white with the public mean of its channel
as probability; for tables every column is normal with its public constants. They come from a fixed seed and are public. Whether
a canary takes part is decided by a fair coin for each, tossed with a random key that the run draws from the operating system,
which has nothing to do with the randomness of sampling and noise, and keeps in its configuration.

All canaries have places in the training data, so that its size, which is public, does not depend on the coins. A canary that
does not take part has the label that torch's cross-entropy ignores: its place may be sampled, its loss and its gradient are
zero, and the sum is that of a dataset from which it was removed.

Formal guarantees: with canaries a run has the (ε, δ) of its plan for each real example, because canaries do not depend on real
examples; the plan counts their places. For the canaries themselves, a run with a canary and one without it are neighbours.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.training.distributed import Ranks
from dp_microadam.workbench.data.dataset import LabelledData
from dp_microadam.workbench.recipes.recipe import Recipe

NO_LABEL = -100
"""The label that torch's cross-entropy ignores: such an example has no loss and no gradient."""

_PUBLIC_SEED = 20231116


@dataclass(frozen=True, eq=False)
class Canaries:
    """Inputs [m, …] and labels [m] of all canaries, and which of them take part."""

    inputs: Tensor
    labels: Tensor
    present: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def with_canary_key(recipe: Recipe, ranks: Ranks) -> Recipe:
    """The recipe with a key for its canaries: the one it has, as a resumed run does, or a new one; or that of its seed."""
    if recipe.audit_canaries is None or recipe.canary_key is not None:
        return recipe
    new = secrets.token_hex(16) if recipe.seed is None else f"{recipe.seed:032x}"
    return replace(recipe, canary_key=ranks.from_main(lambda: new))


def add_canaries(recipe: Recipe, data: LabelledData) -> tuple[LabelledData, Canaries | None]:
    """The data with the canaries of the recipe after its training examples, and the canaries; unchanged without any."""
    if recipe.audit_canaries is None:
        return data, None
    if not isinstance(data.train, tuple):
        raise InputError(
            f"audit_canaries is {recipe.audit_canaries}, but the training examples of {recipe.data!r} are read from files; "
            "canaries need training data in memory"
        )
    inputs, labels = data.train
    canaries = _canaries(recipe.audit_canaries, str(recipe.canary_key), data, inputs)
    own = torch.where(canaries.present, canaries.labels, NO_LABEL)
    train = torch.cat([inputs, canaries.inputs.to(inputs.dtype)]), torch.cat([labels, own.to(labels.dtype)])
    return replace(data, train=train), canaries


def canaries_in_words(canaries: Canaries) -> str:
    """What a privacy statement says about them."""
    return (
        f"{len(canaries)} canaries for an audit (noise with a label at random), each taking part with probability 1/2; their "
        "places count as examples"
    )


def _canaries(count: int, key: str, data: LabelledData, like: Tensor) -> Canaries:
    public = np.random.default_rng(_PUBLIC_SEED)
    shape = (count, *like.shape[1:])
    if data.images:
        bright = np.array(data.mean or (0.5,)).reshape(-1, 1, 1)
        inputs = torch.from_numpy((public.random(shape) < bright).astype(np.uint8) * np.uint8(255))
    else:
        drawn = torch.from_numpy(public.standard_normal(shape))
        inputs = drawn * torch.tensor(data.std or (1.0,)) + torch.tensor(data.mean or (0.0,))
    labels = torch.from_numpy(public.integers(0, data.num_classes, count))
    coins = np.random.default_rng(int(key, 16)).random(count) < 0.5
    return Canaries(inputs, labels, torch.from_numpy(coins))
