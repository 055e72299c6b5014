"""The page about recipes says what the code does."""

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from dp_microadam.workbench.recipes import Recipe, known_recipes, vocabulary

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
ROWS = dict(re.findall(r"^\| `\[?(\w+)\]?` \| (.*?) \|", PAGE.read_text("utf-8"), re.MULTILINE))


def test_every_key_is_explained():
    assert {key.name for key in fields(Recipe)} <= ROWS.keys()


@pytest.mark.parametrize("key", [key for key in fields(Recipe) if key.default not in (MISSING, None)], ids=lambda key: key.name)
def test_the_default_shown_is_the_default(key):
    shown = tomllib.loads(f"value = {ROWS[key.name].strip('`')}")["value"]
    assert shown == key.default


def test_the_recipe_shown_is_one():
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert Recipe.from_toml(shown).optimizer == {"weight_decay": 0.01}


def test_every_word_of_the_vocabulary_and_every_recipe_is_mentioned():
    page = PAGE.read_text("utf-8")
    tables = (*vocabulary.MODEL_OPTIONS.values(), *vocabulary.DATA_OPTIONS.values())
    options = [option for names in tables for option in names]
    for word in (vocabulary.NON_PRIVATE, *vocabulary.MODELS, *vocabulary.DATA_SETS):
        assert f'"{word}"' in page
    for word in (*options, *known_recipes()):
        assert f"`{word}`" in page
