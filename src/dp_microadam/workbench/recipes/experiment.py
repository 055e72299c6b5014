"""A recipe with all that was built from it: training, and figures on the test set."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from dp_microadam.plan.learning_rate import too_much_noise
from dp_microadam.training.evaluation import ClassCounts, PerExample, count_hits, document_hits, document_tokens, evaluate
from dp_microadam.training.frozen_features import FrozenFeatures
from dp_microadam.training.trainer import PrivateTrainer, RunResult
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.dataset import Examples, LabelledData, count_users, size_of
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.models.hugging_face import TextModel
from dp_microadam.workbench.recipes.canaries import Canaries
from dp_microadam.workbench.recipes.language import LanguageFigures, language_figures
from dp_microadam.workbench.recipes.recipe import Recipe


@dataclass
class Experiment:
    """A recipe with its data, model and trainer, ready to train."""

    recipe: Recipe
    data: LabelledData
    model: nn.Module
    trainer: PrivateTrainer
    canaries: Canaries | None = None
    features: FrozenFeatures | None = None
    """For a recipe with ``cache_features``, what computes the features that the trainer takes."""
    language_before: LanguageFigures | None = None
    """Figures of a language model before its first step."""

    def fit(self) -> RunResult:
        """Train on the training part, with validation on the part held out of it, if any is."""
        if self.trainer.step.account.updates == 0:
            self.language_before = self.language_figures()
        validation = self.data.validation if size_of(self.data.validation) else None
        train, held_out = self._inputs(training_part(self.recipe, self.data), validation)
        return self.trainer.fit(train, held_out, **users_of(self.recipe, self.data))

    def notes(self) -> list[str]:
        """What the owner of the data should know before they are looked at: what was passed over, and what is held out.

        How many examples users have together is private: where users are known, they are counted instead.
        """
        data, recipe = self.data, self.recipe
        if not size_of(data.validation):
            return [*data.notes, "no example is held out for validation: validation_fraction is 0", *self._too_much_noise()]
        unit, held_out, rest = "examples", size_of(data.validation), size_of(data.train) - len(self.canaries or ())
        if data.train_users is not None and data.validation_users is not None:
            unit = f"{recipe.unit_name or 'user'}s"
            held_out, rest = count_users(data.validation_users), count_users(data.train_users)
        return [
            *data.notes,
            f"held out for validation, and not protected: {held_out:,} of {held_out + rest:,} {unit} of the training part, "
            f"drawn with split seed {recipe.split_seed}; validation_fraction = 0 holds out none",
            *self._too_much_noise(),
        ]

    def _too_much_noise(self) -> Iterator[str]:
        """The hint of the plan, for methods that train all parameters in every step."""
        step = self.trainer.step
        plan = step.account.privacy
        if plan is not None and all(phase.trainable is None for phase in step.phases):
            trained = sum(parameter.numel() for parameter in step.model.parameters() if parameter.requires_grad)
            found = too_much_noise(plan, trained, self.recipe.unit_name or self.recipe.unit)
            yield from () if found is None else (found,)

    def training_part(self) -> Examples:
        """The training examples, or the features of them that the trainer takes."""
        return self._inputs(training_part(self.recipe, self.data))[0]

    def _inputs(self, *parts: Any) -> Sequence[Any]:
        if self.features is None:
            return parts
        with self.trainer.ranks.one_per_machine_first():
            return self.features.of(*parts)

    def test_results(self) -> tuple[ClassCounts, str]:
        """Right predictions on the test set by class, and which weights made them: averaged ones if the recipe keeps these.

        A language model's predictions are next tokens, all of one class.
        """
        with self.best_weights() as weights:
            return self._counts(), weights

    def test_accuracy(self) -> tuple[float, str]:
        """Accuracy on the test set, and which weights it belongs to."""
        counts, weights = self.test_results()
        return counts.accuracy, weights

    @contextmanager
    def best_weights(self) -> Iterator[str]:
        """The model has averaged weights inside, if the recipe keeps an average; yields which weights these are."""
        average = self.trainer.average
        if average is None:
            yield "final weights"
            return
        with average.in_place_of(self.model):
            yield "averaged weights"

    def language_figures(self) -> LanguageFigures | None:
        """Perplexity on the test texts and a sample, of a language model; None for other models."""
        if not isinstance(self.model, TextModel) or not self.recipe.predicts_tokens:
            return None
        with self.best_weights():
            return language_figures(self.recipe, self.model, self._means)

    def final_weights_accuracy(self) -> float | None:
        """Accuracy on the test set of the weights after the last step, if the recipe also keeps an average; else None."""
        return None if self.trainer.average is None else self._counts().accuracy

    def best_model(self) -> nn.Module:
        """A copy of the model with the weights that are evaluated: averaged ones if the recipe keeps an average."""
        with self.best_weights():
            return copy.deepcopy(self.model)

    def _counts(self) -> ClassCounts:
        if self.recipe.predicts_tokens:
            found = self._means({"hits": document_hits, "tokens": document_tokens})
            documents = size_of(self.data.test)
            return ClassCounts((round(found["hits"] * documents),), (round(found["tokens"] * documents),))
        (test,) = self._inputs(self.data.test)
        on = None if self.features is None else self.features.on
        return count_hits(self.model, test, self.data.num_classes, on=on, **self._evaluation())

    def _means(self, measures: Mapping[str, PerExample]) -> dict[str, float]:
        """Means of measures over the test set."""
        return evaluate(self.model, self.data.test, measures, **self._evaluation())

    def _evaluation(self) -> dict[str, Any]:
        device = next(self.model.parameters()).device
        prepare = Preparation(self.data) if self.features is None else lambda batch: batch
        return {
            "prepare": lambda batch: prepare(tree_map(lambda leaf: leaf.to(device), batch)),
            "num_workers": self.recipe.num_workers,
            "ranks": self.trainer.ranks,
        }


def training_part(recipe: Recipe, data: LabelledData) -> Examples:
    """The training examples. Random crops of image files, which differ in size, are cut right after decoding."""
    if isinstance(data.train, ImageFolder) and recipe.resized_crop:
        return data.train.random_crops(recipe.multiplicity)
    return data.train


def users_of(recipe: Recipe, data: LabelledData) -> dict[str, Any]:
    """Whose the examples are, as arguments of ``fit``; none unless the recipe's unit is the user."""
    known = {"users": data.train_users, "validation_users": data.validation_users}
    return known if recipe.unit == "user" else {}
