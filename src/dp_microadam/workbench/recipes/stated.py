"""The recipe that a run keeps in its folder: what it left to defaults is stated, so that the run goes on as it began."""

from __future__ import annotations

from dataclasses import replace

from dp_microadam.workbench.recipes.pretrained import stated_model_options
from dp_microadam.workbench.recipes.recipe import Recipe


def stated(recipe: Recipe, bands: int) -> Recipe:
    """The recipe with the values of its defaults, and the number of bands that its plan has."""
    return replace(
        recipe,
        learning_rate=recipe.resolved_learning_rate,
        distance=recipe.resolved_distance,
        ema_decay=recipe.resolved_ema_decay,
        accountant=recipe.resolved_accountant,
        bands=bands,
        model_options=stated_model_options(recipe),
    )
