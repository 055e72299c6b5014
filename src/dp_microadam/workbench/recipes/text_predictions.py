"""Classes of texts, by the model of a run or by an exported one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.raw import TEXT_ENDINGS, texts_in
from dp_microadam.workbench.models.hugging_face import TextEncoder, saved_classifier
from dp_microadam.workbench.recipes.experiment import Experiment
from dp_microadam.workbench.recipes.texts import class_names_of, encoder_of, text_column_of


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
        """That of a run, with averaged weights if it has them.

        Raises:
            InputError: for a language model.
        """
        recipe = experiment.recipe
        if recipe.predicts_tokens:
            raise InputError(
                f"model is {recipe.model!r}, which has no classes; run dp-microadam evaluate, which prints what it writes"
            )
        return cls(experiment.best_model(), encoder_of(recipe), class_names_of(recipe), text_column_of(recipe))

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
