"""Recipes on texts: the encoder, losses per document and figures of language models, a classifier of files, and exports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import InputError
from dp_microadam.ledger.statement import STATEMENT_NAME
from dp_microadam.training.evaluation import PerExample
from dp_microadam.training.export import CARD, model_card, new_folder
from dp_microadam.workbench.data.catalogue import known
from dp_microadam.workbench.data.raw import TEXT_ENDINGS, texts_in
from dp_microadam.workbench.data.tables import Layout, layout_of
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
_NEW_TOKENS = 40


def encoder_of(recipe: Recipe) -> TextEncoder:
    """The tokenizer of the recipe's model, with the recipe's length."""
    return text_encoder(located_options(recipe).get("pretrained", ""), _length(recipe))


def text_arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of ``load`` for the texts of a recipe; none for other data."""
    return {"encode": encoder_of(recipe)} if recipe.data in keys.TEXT_SETS else {}


def texts_in_words(recipe: Recipe) -> list[str]:
    """What a privacy statement lists as public about texts."""
    if recipe.data not in keys.TEXT_SETS:
        return []
    prompt = ["the prompt of samples"] if recipe.model_options.get("prompt") else []
    cut = "longer texts are cut there, shorter ones padded"
    return [f"the tokenizer, and the length of {_length(recipe)} tokens: {cut}", *prompt]


def _length(recipe: Recipe) -> int:
    length: int = recipe.data_options.get("max_length", _DEFAULT_LENGTH)
    return length


def _layout_of(recipe: Recipe) -> Layout:
    """The columns of texts and labels, and the names of the classes; a language model has none."""
    return layout_of(known(recipe.data), recipe.data_options, labelled=not recipe.predicts_tokens)


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


def language_figures(
    recipe: Recipe, model: TextModel, means: Callable[[Mapping[str, PerExample]], Mapping[str, float]]
) -> dict[str, Any]:
    """Perplexity on the test texts, and the continuation of the recipe's ``prompt``; ``means`` evaluates measures on them.

    Perplexity is exp of the mean cross-entropy of a token, over all tokens of all texts.
    """
    found = means({"nats": document_nats, "tokens": document_tokens})
    prompt = recipe.model_options.get("prompt")
    sample = {"sample": written(recipe, model, prompt)} if prompt else {}
    return {"test_perplexity": math.exp(found["nats"] / found["tokens"]), **sample}


@torch.no_grad()
def written(recipe: Recipe, model: TextModel, prompt: str) -> str:
    """``prompt`` and the most likely tokens after it, without a repetition of three."""
    tokenizer = encoder_of(recipe).tokenizer
    was_training, network = model.training, cast(Any, model.network)
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt")["input_ids"].to(next(model.parameters()).device)
    options = {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "no_repeat_ngram_size": 3}
    found = network.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **options)
    model.train(was_training)
    return " ".join(tokenizer.decode(found[0], skip_special_tokens=True).split())


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
                f"model is {recipe.model!r}, which has no classes; run dp-microadam evaluate, which prints what it writes"
            )
        layout = _layout_of(recipe)
        return cls(experiment.best_model(), encoder_of(recipe), layout.classes, layout.text or "text")

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
    encoder, layout, pretrained = encoder_of(recipe), _layout_of(recipe), recipe.model_options["pretrained"]
    classes = layout.classes
    if isinstance(model, SentenceClassifier) and adapters_alone:
        raise InputError(
            "pooling is 'mean', whose head no class of transformers or peft computes; leave --adapters out to export the whole"
        )
    kind = "AutoModelForCausalLM" if recipe.predicts_tokens else "AutoModelForSequenceClassification"
    code = text_loading_code(model, kind, pretrained, encoder.max_length, adapters_alone=adapters_alone)
    with new_folder(output) as folder:
        with experiment.best_weights():
            save_text_model(
                model, encoder, folder, classes=classes, column=layout.text or "text", adapters_alone=adapters_alone
            )
        # Computed again from the ledger: what is published must not claim less than was spent.
        experiment.trainer.write_privacy(folder, group_size)
        statement = (folder / STATEMENT_NAME).read_text(encoding="utf-8")
        write_text_durably(folder / CARD, model_card(recipe.name, recipe.to_toml(), statement, metrics, loading=code))
