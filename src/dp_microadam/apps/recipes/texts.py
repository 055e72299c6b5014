"""What a recipe says about texts: checks, the encoder, and the measures of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dp_microadam.apps.recipes import vocabulary
from dp_microadam.errors import InputError

if TYPE_CHECKING:
    from dp_microadam.apps.recipes.recipe import Recipe
    from dp_microadam.models.hugging_face import TextEncoder

DEFAULT_LENGTH = 128

_TEXT_MODELS = (vocabulary.TEXT_CLASSIFIER, vocabulary.LANGUAGE_MODEL)


def refuse_misfits(recipe: Recipe) -> None:
    """Raise InputError if data or model are texts and the other is not, or for settings that texts do not have."""
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
        raise InputError(f"audit_canaries is {recipe.audit_canaries}; canaries are images or rows of numbers, not texts")
    if recipe.predicts_tokens and recipe.class_weights is not None:
        raise InputError("class_weights are given, but a language model has no classes; leave them out")


def encoder_of(recipe: Recipe) -> TextEncoder:
    """The tokenizer of the recipe's model, with the recipe's length."""
    from dp_microadam.models.hugging_face import text_encoder

    return text_encoder(recipe.model_options.get("pretrained", ""), recipe.data_options.get("max_length", DEFAULT_LENGTH))


def text_arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of ``load`` for the texts of a recipe; none for other data."""
    if recipe.data not in vocabulary.TEXT_SETS:
        return {}
    return {"encode": encoder_of(recipe), "labelled": not recipe.predicts_tokens}


def texts_in_words(recipe: Recipe) -> list[str]:
    """What a privacy statement lists as public about texts."""
    if recipe.data not in vocabulary.TEXT_SETS:
        return []
    length = recipe.data_options.get("max_length", DEFAULT_LENGTH)
    return [f"the tokenizer, and the length of {length} tokens: longer texts are cut there, shorter ones padded"]
