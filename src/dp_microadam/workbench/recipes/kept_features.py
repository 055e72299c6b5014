"""``cache_features`` of a recipe: when features of a frozen backbone can be kept, and what computes them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes import vocabulary

if TYPE_CHECKING:
    from dp_microadam.training.frozen_features import FrozenFeatures
    from dp_microadam.workbench.recipes.recipe import Recipe

_LARGEST_BATCH = 32
"""Examples that go through a frozen part at once. Its activations are far larger than the features a step runs on."""


def refuse_changing_features(recipe: Recipe) -> None:
    """Raise InputError if features of this recipe would differ from step to step, or nothing of its model is frozen."""
    if not recipe.cache_features:
        return
    if recipe.model_options.get("lora_rank"):
        raise InputError("cache_features is true, but with lora_rank features change from step to step; leave one of them out")
    if recipe.model_options.get("trainable") != "head":
        able = [model for model, options in vocabulary.MODEL_OPTIONS.items() if "trainable" in options]
        raise InputError(
            f"cache_features is true, but more than the head of model {recipe.model!r} trains; set model_options.trainable to "
            f"'head', which {', '.join(able)} have, or leave it out"
        )
    changing = [key for key in ("crop_padding", "flip", "resized_crop") if getattr(recipe, key)]
    if changing or recipe.tune:
        what = f"{changing[0]} changes images from step to step" if changing else "[tune] is given"
        raise InputError(f"cache_features is true, but {what}; leave one of them out")


def features_of(recipe: Recipe, model: Any, loss: Any, *, show_progress: bool, **options: Any) -> FrozenFeatures | None:
    """What computes the features of a recipe's model; None for a recipe without ``cache_features``."""
    if not recipe.cache_features:
        return None
    from dp_microadam.training.frozen_features import FrozenFeatures
    from dp_microadam.training.progress import Fraction

    trained = [name.replace(".", "/") for name, parameter in model.named_parameters() if parameter.requires_grad]
    return FrozenFeatures(
        model,
        os.path.commonpath(os.path.dirname(name) for name in trained).replace("/", "."),
        loss,
        physical_batch_size=min(recipe.physical_batch_size, _LARGEST_BATCH),
        num_workers=recipe.num_workers,
        tell=Fraction("features computed").tell if show_progress else None,
        **options,
    )
