"""Exports a text model as a folder that ``from_pretrained`` loads, with model card and privacy statement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dp_microadam.durable_files import write_text_durably
from dp_microadam.ledger.statement import STATEMENT_NAME
from dp_microadam.training.export import CARD, new_folder
from dp_microadam.training.model_card import model_card
from dp_microadam.workbench.models.hugging_face import SentenceClassifier, TextModel
from dp_microadam.workbench.models.text_export import save_text_model, sentence_loading_code, text_loading_code
from dp_microadam.workbench.recipes.experiment import Experiment
from dp_microadam.workbench.recipes.texts import class_names_of, encoder_of, text_column_of


def export_texts(
    experiment: Experiment, output: Path, metrics: Mapping[str, Any], *, adapters_alone: bool = False, group_size: int = 1
) -> None:
    """Write the model of a run as ``transformers`` does, or its adapters as ``peft`` does.

    Averaged weights, if there are any, are those that are written.

    Raises:
        InputError: if ``output`` exists.
    """
    recipe, model, trainer = experiment.recipe, experiment.model, experiment.trainer
    assert isinstance(model, TextModel | SentenceClassifier)
    encoder = encoder_of(recipe)
    kind = "AutoModelForCausalLM" if recipe.predicts_tokens else "AutoModelForSequenceClassification"
    pretrained = recipe.model_options["pretrained"]
    if isinstance(model, SentenceClassifier):
        classes = class_names_of(recipe)
        code = sentence_loading_code(model, pretrained, encoder.max_length, classes, adapters_alone=adapters_alone)
    else:
        code = text_loading_code(kind, pretrained, encoder.max_length, adapters_alone=adapters_alone)
    with new_folder(output) as folder:
        with experiment.best_weights():
            names, column = class_names_of(recipe), text_column_of(recipe)
            save_text_model(model, encoder, folder, classes=names, column=column, adapters_alone=adapters_alone)
        # Anew from the ledger: what is published must not claim less than was spent.
        trainer.write_privacy(folder, group_size)
        statement = (folder / STATEMENT_NAME).read_text(encoding="utf-8")
        write_text_durably(folder / CARD, model_card(recipe.name, recipe.to_toml(), statement, metrics, loading=code))
