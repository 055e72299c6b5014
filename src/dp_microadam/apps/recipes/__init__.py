"""Recipes: everything that makes up one training run, as a TOML file. No torch here, so a bad recipe is refused at once."""

from dp_microadam.apps.recipes.recipe import Recipe, known_recipes, load_recipe

__all__ = ["Recipe", "known_recipes", "load_recipe"]
