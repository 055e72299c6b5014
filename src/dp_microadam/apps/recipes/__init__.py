"""Recipes: TOML files with all settings of a training run. They are parsed and checked without importing torch."""

from dp_microadam.apps.recipes.recipe import Recipe, known_recipes, load_recipe

__all__ = ["Recipe", "known_recipes", "load_recipe"]
