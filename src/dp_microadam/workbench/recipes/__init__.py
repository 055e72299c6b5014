"""Recipes: TOML files with all settings of a training run. They are parsed and checked without importing torch."""

from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import known_recipes, load_recipe

__all__ = ["Recipe", "known_recipes", "load_recipe"]
