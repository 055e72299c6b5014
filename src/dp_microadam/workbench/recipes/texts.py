"""What a recipe says about texts: checks, the encoder, and the measures of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes import vocabulary

if TYPE_CHECKING:
    from dp_microadam.workbench.data.tables import Layout
    from dp_microadam.workbench.models.hugging_face import TextEncoder
    from dp_microadam.workbench.recipes.recipe import Recipe

DEFAULT_LENGTH = 128

_TEXT_MODELS = (vocabulary.TEXT_CLASSIFIER, vocabulary.LANGUAGE_MODEL)


PACKING = ("packing", "pack", "group_texts")
"""Names under which other libraries put several documents into one row."""


def refuse_packing(options: Mapping[str, Any]) -> None:
    """Raise InputError if documents are to share rows."""
    for name in PACKING:
        if name in options:
            raise InputError(
                f"{name} is {options[name]!r}, but documents must not share a row: its gradient would be clipped as one, and a "
                "document that spans rows would count in each, so that ε would not hold for a document; leave it out, each is "
                "cut or padded to max_length"
            )


def refuse_misfits(recipe: Recipe) -> None:
    """Raise InputError if data or model are texts and the other is not, or for settings that texts do not have."""
    for options in (recipe.data_options, recipe.model_options):
        refuse_packing(options)
    is_text = recipe.data in vocabulary.TEXT_SETS
    if is_text and recipe.model not in _TEXT_MODELS:
        raise InputError(
            f"model is {recipe.model!r}, but {recipe.data} are texts; it must be 'hugging-face' for classes, or "
            "'hugging-face-causal' for a language model"
        )
    if not is_text and recipe.model in _TEXT_MODELS:
        raise InputError(
            f"model is {recipe.model!r}, which takes texts; data must be one of {', '.join(map(repr, vocabulary.TEXT_SETS))}"
        )
    if is_text and recipe.audit_canaries is not None:
        raise InputError(f"audit_canaries is {recipe.audit_canaries}; canaries must be images or rows of numbers, not texts")
    if recipe.predicts_tokens and recipe.class_weights is not None:
        raise InputError("class_weights are given, but a language model has no classes; leave them out")


def encoder_of(recipe: Recipe) -> TextEncoder:
    """The tokenizer of the recipe's model, with the recipe's length."""
    from dp_microadam.workbench.models.hugging_face import text_encoder
    from dp_microadam.workbench.recipes.pretrained import located_options

    return text_encoder(located_options(recipe).get("pretrained", ""), recipe.data_options.get("max_length", DEFAULT_LENGTH))


def class_names_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the classes; none for a language model."""
    return _layout_of(recipe).names


def text_column_of(recipe: Recipe) -> str:
    """The column that texts are in."""
    return _layout_of(recipe).text or "text"


def _layout_of(recipe: Recipe) -> Layout:
    from dp_microadam.workbench.data.catalogue import known
    from dp_microadam.workbench.data.tables import layout_of

    return layout_of(known(recipe.data), recipe.data_options, labelled=not recipe.predicts_tokens)


def text_arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of ``load`` for the texts of a recipe; none for other data."""
    if recipe.data not in vocabulary.TEXT_SETS:
        return {}
    return {"encode": encoder_of(recipe)}


def texts_in_words(recipe: Recipe) -> list[str]:
    """What a privacy statement lists as public about texts."""
    if recipe.data not in vocabulary.TEXT_SETS:
        return []
    length = recipe.data_options.get("max_length", DEFAULT_LENGTH)
    prompt = ["the prompt of samples"] if recipe.model_options.get("prompt") else []
    return [f"the tokenizer, and the length of {length} tokens: longer texts are cut there, shorter ones padded", *prompt]
