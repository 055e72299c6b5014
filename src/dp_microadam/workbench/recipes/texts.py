"""Recipes on texts: the encoder, losses per document of language models, a classifier of files, and exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import InputError
from dp_microadam.ledger.statement import STATEMENT_NAME
from dp_microadam.training.export import CARD, model_card, new_folder
from dp_microadam.workbench.data.raw import TEXT_ENDINGS, texts_in
from dp_microadam.workbench.models.hugging_face import (
    SentenceClassifier,
    TextEncoder,
    TextModel,
    save_text_model,
    saved_classifier,
    text_encoder,
    text_loading_code,
)
from dp_microadam.workbench.recipes import keys
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import located_options

if TYPE_CHECKING:
    from dp_microadam.workbench.recipes.experiment import Experiment

_DEFAULT_LENGTH = 128


def encoder_of(recipe: Recipe) -> TextEncoder:
    """The tokenizer of the recipe's model, with the recipe's length."""
    return text_encoder(located_options(recipe).get("pretrained", ""), _length(recipe))


def texts_in_words(recipe: Recipe) -> list[str]:
    """What a privacy statement lists as public about texts."""
    if recipe.data not in keys.TEXT_SETS:
        return []
    return [f"the tokenizer, and the length of {_length(recipe)} tokens: longer texts are cut there, shorter ones padded"]


def _length(recipe: Recipe) -> int:
    length: int = recipe.data_options.get("max_length", _DEFAULT_LENGTH)
    return length


def _column(recipe: Recipe) -> str:
    return str(recipe.data_options.get("text", "text"))


Batch = tuple[Tensor, Tensor]
"""Tokens [B, length], negative where there is none, and labels, which are not used."""


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of each document's own tokens given those before them; 0 for a document of a single token.

    Formal guarantees: the loss of a document depends on its own tokens alone. Its length does not weigh it: a long document is
    clipped as a short one is.
    """
    return document_nats(model, batch) / document_tokens(model, batch).clamp(min=1)


def next_token_hits(model: nn.Module, batch: Batch) -> Tensor:
    """The fraction of each document's tokens that are the most likely one, given those before them."""
    return document_hits(model, batch) / document_tokens(model, batch).clamp(min=1)


def document_hits(model: nn.Module, batch: Batch) -> Tensor:
    """The number of each document's tokens that are the most likely one."""
    scores, targets, counted = _shifted(model, batch[0])
    return ((scores.argmax(-1) == targets) & counted).sum(1)


def document_nats(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of each document's cross-entropies; with :func:`document_tokens` it gives the perplexity."""
    scores, targets, counted = _shifted(model, batch[0])
    losses = nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    return torch.where(counted, losses, 0.0).sum(1)


def document_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """The number of predicted tokens of each document."""
    return (batch[0][:, 1:] >= 0).sum(1)


def _shifted(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all tokens but the last, the tokens after them, and which of these exist."""
    targets = tokens[:, 1:]
    return model(tokens)[:, :-1], targets.clamp(min=0).long(), targets >= 0


@dataclass(frozen=True)
class TextClassifier:
    """Probabilities of classes for texts in files, which are encoded as in training."""

    model: nn.Module
    encoder: TextEncoder
    classes: tuple[str, ...]
    column: str = "text"
    """Of CSV files and JSON lines."""

    endings = TEXT_ENDINGS

    @classmethod
    def of_run(cls, experiment: Experiment) -> TextClassifier:
        """That of a run, with averaged weights if it has them."""
        recipe = experiment.recipe
        if recipe.predicts_tokens:
            raise InputError(
                f"model is {recipe.model!r}, which has no classes; run dp-microadam evaluate, which prints its perplexity"
            )
        return cls(experiment.best_model(), encoder_of(recipe), experiment.data.classes, _column(recipe))

    @classmethod
    def of_export(cls, folder: Path) -> TextClassifier:
        """That of a folder that ``export`` has written, or another classifier of ``transformers``."""
        return cls(*saved_classifier(folder))

    def read(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        """The texts in a file, each with its name, as tokens."""
        return ((name, self.encoder([text])) for name, text in texts_in(file, self.column))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model.cpu().eval()(tokens)
        return scores.softmax(1)


def export_texts(
    experiment: Experiment, output: Path, metrics: Mapping[str, Any], *, adapters_alone: bool = False, group_size: int = 1
) -> None:
    """Write the model of a run as ``transformers`` does, or its adapters as ``peft`` does; averaged weights if it has them."""
    recipe, model = experiment.recipe, experiment.model
    assert isinstance(model, TextModel | SentenceClassifier)
    encoder, classes = encoder_of(recipe), () if recipe.predicts_tokens else experiment.data.classes
    if isinstance(model, SentenceClassifier) and adapters_alone:
        raise InputError(
            "pooling is 'mean', whose head no class of transformers or peft computes; leave --adapters out to export the whole"
        )
    kind = "AutoModelForCausalLM" if recipe.predicts_tokens else "AutoModelForSequenceClassification"
    code = text_loading_code(model, kind, recipe.model_options["pretrained"], encoder.max_length, adapters_alone=adapters_alone)
    with new_folder(output) as folder:
        with experiment.best_weights():
            save_text_model(model, encoder, folder, classes=classes, column=_column(recipe), adapters_alone=adapters_alone)
        # Computed again from the ledger: what is published must not claim less than was spent.
        experiment.trainer.step.write_privacy(folder, group_size)
        statement = (folder / STATEMENT_NAME).read_text(encoding="utf-8")
        write_text_durably(folder / CARD, model_card(recipe.name, recipe.to_toml(), statement, metrics, loading=code))
