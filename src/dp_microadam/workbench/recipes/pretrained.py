"""Pretrained weights of a recipe: options of its model, and where the weights lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.catalogue import find, usual_folders
from dp_microadam.workbench.recipes import vocabulary

if TYPE_CHECKING:
    from dp_microadam.workbench.recipes.recipe import Recipe

NORMALIZE = "normalize_features"


def stated_model_options(recipe: Recipe, *, normalize: bool = True) -> dict[str, Any]:
    """``model_options``, which say whether features are brought to a fixed norm if most of a transformer is frozen."""
    options = recipe.model_options
    frozen = options.get("trainable") in ("biases", "head") or bool(options.get("lora_rank"))
    if not frozen or NORMALIZE not in vocabulary.MODEL_OPTIONS[recipe.model]:
        return options
    return {NORMALIZE: normalize, **options}


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
    options = stated_model_options(recipe)
    name = options.get("pretrained")
    return {**options, "pretrained": located(name)} if isinstance(name, str) else options


def missing_files(recipe: Recipe) -> str | None:
    """Which data set or pretrained weights of a recipe are not here, in one sentence; None if nothing is known to be missing.

    Names of the Hugging Face hub, with a slash in them, may be fetched, and are not asked for.
    """
    name = recipe.model_options.get("pretrained")
    try:
        find(recipe.data, recipe.data_folder or None)
    except InputError as error:
        return str(error)
    if not isinstance(name, str) or not name or "/" in name or Path(located(name)).exists():
        return None
    places = " or ".join(str(folder) for folder in usual_folders(name))
    return f"pretrained is {name!r}, which was not found: put its weights into {places}, or name any other file or folder"
