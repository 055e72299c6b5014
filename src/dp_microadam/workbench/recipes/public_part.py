"""Public examples for methods that need some: taken from the validation part, which the guarantee does not cover anyway."""

from __future__ import annotations

import torch
from torch.utils.data import Subset

from dp_microadam.errors import InputError
from dp_microadam.methods.scale_sources import PublicExamples, refuse_shared_indices
from dp_microadam.training.evaluation import class_loss, next_token_loss
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.dataset import LabelledData, size_of, split
from dp_microadam.workbench.recipes.recipe import Recipe


def public_examples(recipe: Recipe, data: LabelledData, chosen: int | list[int]) -> PublicExamples:
    """The first ``chosen`` held-out examples, or those at these positions of the data set before it was divided.

    Raises:
        InputError: for positions of training examples, or more examples than are held out.
    """
    rows = _rows(recipe, data, chosen)
    loss = next_token_loss if recipe.predicts_tokens else class_loss
    if isinstance(data.validation, tuple):
        inputs, labels = data.validation
        return PublicExamples((inputs[rows], labels[rows]), loss, Preparation(data))
    return PublicExamples(Subset(data.validation, rows.tolist()), loss, Preparation(data))


def _rows(recipe: Recipe, data: LabelledData, chosen: int | list[int]) -> torch.Tensor:
    """Indices within the held-out part."""
    if not isinstance(chosen, list):
        if chosen > size_of(data.validation):
            raise InputError(
                f"optimizer.public is {chosen}; only {size_of(data.validation)} examples are held out, it must be at most that"
            )
        return torch.arange(chosen)
    count = size_of(data.train) + size_of(data.validation)
    if recipe.train_size is not None:
        raise InputError(f"optimizer.public holds positions, but train_size is {recipe.train_size}; give their number instead")
    held_out = data.held_out_rows
    if held_out is None:
        _, held_out = split(count, recipe.validation_fraction, recipe.split_seed, size=recipe.validation_size)
    refuse_shared_indices(chosen, set(range(count)).difference(held_out.tolist()))
    row_of = {position: row for row, position in enumerate(held_out.tolist())}
    unknown = [position for position in chosen if position not in row_of]
    if unknown or not chosen:
        below = f"positions below {count}" if data.train_users is None else "positions of examples"  # their number is private
        raise InputError(f"optimizer.public holds {unknown[0] if unknown else 'nothing'}; it must hold {below}")
    return torch.tensor([row_of[position] for position in chosen])
