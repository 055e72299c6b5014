"""Where things lie: recipes in the package or in files, with ``key=value`` overrides; and pretrained weights."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.catalogue import usual_folders
from dp_microadam.workbench.recipes import keys
from dp_microadam.workbench.recipes.recipe import Recipe, kinds, parse_toml


def known_recipes() -> list[str]:
    """Names of the built-in recipes."""
    folder = resources.files("dp_microadam.workbench.recipes")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a built-in recipe by name, or any recipe by the path of its TOML file, and apply ``key=value`` overrides.

    Values are parsed as TOML, or else taken as strings. ``optimizer.density=0.05`` sets a key of a table, ``steps=none``
    removes a key, and later overrides win. A recipe file without a ``name`` is named after the file. Options that the file
    gives to the optimizer of its own method are left out where an override names a method that does not have them.

    >>> load_recipe("demo", ["method=dp-sgd", "optimizer.momentum=0.9"]).optimizer
    {'momentum': 0.9}
    """
    values = recipe_values(name_or_path)
    method, own = values.get("method"), {f"optimizer.{option}" for option in values.get("optimizer", {})}
    apply_overrides(values, overrides)
    allowed = keys.OPTIMIZER_OPTIONS.get(values.get("base") or values.get("method", ""))
    if values.get("method") != method and allowed is not None and isinstance(values.get("optimizer"), dict):
        left = own - {override.partition("=")[0].strip() for override in overrides} - {f"optimizer.{one}" for one in allowed}
        values["optimizer"] = {name: value for name, value in values["optimizer"].items() if f"optimizer.{name}" not in left}
    return Recipe.from_dict(values)


def recipe_values(name_or_path: str) -> dict[str, Any]:
    """The keys of a built-in recipe or of a file, unchecked, with a name."""
    names, path = known_recipes(), Path(name_or_path)
    if name_or_path in names:
        return parse_toml((resources.files(__package__) / f"{name_or_path}.toml").read_text("utf-8"), name_or_path)
    if not path.name.endswith(".toml") and path.name == name_or_path and not path.is_file():
        near = difflib.get_close_matches(name_or_path, names, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise InputError(
            f"there is no recipe {name_or_path!r}; known are {', '.join(names)}{hint}, or give the path of a TOML file"
        )
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"recipe {name_or_path} cannot be read: {reason}") from None
    return {"name": path.stem, **parse_toml(text, name_or_path)}


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Change the keys of a recipe, in place, by ``key=value`` overrides; later ones win.

    A value is parsed as TOML. It is taken as a string where it is none, or where the key takes nothing else (a folder named
    2024). ``key=none`` removes a key that can be left out, or an option of a table.

    >>> values = {"steps": 100, "optimizer": {"density": 0.01}}
    >>> apply_overrides(values, ["steps=none", "optimizer.density=0.05", "method=dp-sgd", "data_folder=2024"])
    >>> values
    {'optimizer': {'density': 0.05}, 'method': 'dp-sgd', 'data_folder': '2024'}
    """
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not (key and equals):
            raise InputError(f"override {override!r} is not of the form key=value; write it as steps=100")
        table, dot, option = key.partition(".")
        target, kind = (values.setdefault(table, {}) if dot else values), kinds().get(key)
        if not isinstance(target, dict):
            raise InputError(f"recipe key {key} = {text} is unknown; {table} is not a table, set {table} itself")
        if text.lower() == "none" and (dot or keys.accepts(kind, None)):
            target.pop(option if dot else key, None)
            continue
        parsed = _parsed(text)
        only_text = kind is not None and not keys.accepts(kind, parsed) and keys.accepts(kind, text)
        target[option if dot else key] = text if only_text else parsed


def _parsed(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def located(name: str) -> str:
    """Where the weights called ``name`` lie, if that is the name of a folder beside the data sets; else ``name`` itself.

    A folder of ``save_pretrained`` is returned as it is, and of any other the one file of weights in it.
    """
    if not name or Path(name).name != name or Path(name).exists():
        return name
    for folder in usual_folders(name):
        files = sorted(path for path in folder.glob("*") if path.suffix == ".safetensors")
        if (folder / "config.json").is_file():
            return str(folder)
        if len(files) == 1:
            return str(files[0])
    return name


def located_options(recipe: Recipe) -> dict[str, Any]:
    """The options that the recipe's model is built with."""
    options = recipe.resolved_model_options
    name = options.get("pretrained")
    return {**options, "pretrained": located(name)} if isinstance(name, str) else options
