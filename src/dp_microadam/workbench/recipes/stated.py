"""Recipes of runs that exist: every default that a version of this library changed is stated, or filled in as it was.

``config.toml`` of a run states what the recipe left to defaults, so that the run goes on as it began under any later version.
Runs of version 0.1 do not state it; what they left out means what it meant then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dp_microadam.workbench.recipes.pretrained import stated_model_options
from dp_microadam.workbench.recipes.recipe import Recipe, parse_toml

SELECTION = {"density": 0.01, "window": 10, "bias_correction": "paper"}
"""MicroAdam's defaults."""

_IN_VERSION_0_1 = {"method": "dp-microadam", "lr_unit": "absolute", "ema_decay": 0.0, "accountant": "rdp", "bands": 1}


def stated(recipe: Recipe, bands: int) -> Recipe:
    """The recipe with the values of all defaults that may change, and the number of bands that its plan has."""
    optimizer = {**(SELECTION if uses_micro_adam(recipe) else {}), **recipe.optimizer}
    return replace(
        recipe,
        learning_rate=recipe.resolved_learning_rate,
        lr_unit=recipe.resolved_lr_unit,
        ema_decay=recipe.resolved_ema_decay,
        accountant=recipe.resolved_accountant,
        bands=bands,
        model_options=stated_model_options(recipe),
        optimizer=optimizer,
    )


def recipe_of_run(config: str) -> Recipe:
    """The recipe in the ``config.toml`` of a run, which may have been made by version 0.1.

    >>> made = Recipe(name="mine", data="digits", model="mlp", epsilon=8, steps=9, batch_size=16, method="dp-threshold")
    >>> before, since = recipe_of_run(made.to_toml()), recipe_of_run(stated(made, bands=4).to_toml())
    >>> [(one.accountant, one.bands, one.lr_unit) for one in (before, since)]
    [('rdp', 1, 'absolute'), ('pld', 4, 'walk')]

    Raises:
        InputError: if it cannot be used.
    """
    recipe = Recipe.from_dict({**_IN_VERSION_0_1, **parse_toml(config, "the recipe")})
    changes: dict[str, Any] = {}
    changes["model_options"] = stated_model_options(recipe, normalize=False)  # runs from before it was the default
    if uses_micro_adam(recipe):
        changes["optimizer"] = {**SELECTION, **recipe.optimizer}
    return replace(recipe, **changes)


def uses_micro_adam(recipe: Recipe) -> bool:
    """Whether MicroAdam takes the steps of a recipe."""
    return recipe.algorithm == "dp-microadam" or recipe.optimizer.get("base_optimizer") == "microadam"
