"""A recipe with all that was built from it: training, figures on the test set, and what its model takes when it is deployed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.plan.learning_rate import too_much_noise
from dp_microadam.training.evaluation import PerExample, class_hits, evaluate
from dp_microadam.training.export import Deployment, normalization_in_words
from dp_microadam.training.frozen_features import FrozenFeatures
from dp_microadam.training.program import for_deployment
from dp_microadam.training.trainer import PrivateTrainer, RunResult
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.dataset import Examples, LabelledData, count_users, size_of
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.recipes.canaries import Canaries
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.texts import document_hits, document_nats, document_tokens

_CHECKED = 32
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ClassCounts:
    """How many examples of each class there are, and how many of them were predicted right."""

    hits: tuple[int, ...]
    examples: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        return sum(self.hits) / max(1, sum(self.examples))

    @property
    def recalls(self) -> list[float | None]:
        """Of each class, the fraction that was predicted right; None for a class without examples."""
        return [hit / count if count else None for hit, count in zip(self.hits, self.examples, strict=True)]

    @property
    def majority(self) -> float:
        """The accuracy of always predicting the most frequent class."""
        return max(self.examples, default=0) / max(1, sum(self.examples))


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
    perplexity_before: float | None = None
    """Of a language model before its first step."""

    def fit(self) -> RunResult:
        """Train on the training part, with validation on the part held out of it, if any is."""
        if self.trainer.step.account.updates == 0:
            self.perplexity_before = self.perplexity()
        validation = self.data.validation if size_of(self.data.validation) else None
        train, held_out = self._inputs(training_part(self.recipe, self.data), validation)
        return self.trainer.fit(train, held_out, **users_of(self.recipe, self.data))

    def notes(self) -> Iterator[str]:
        """What the owner of the data should know before they are looked at: what was passed over, and what is held out.

        How many examples users have together is private: where users are known, they are counted instead.
        """
        data, recipe, step = self.data, self.recipe, self.trainer.step
        plan = step.account.privacy
        yield from data.notes
        if size_of(data.validation):
            unit, held_out, rest = "examples", size_of(data.validation), size_of(data.train) - len(self.canaries or ())
            if data.train_users is not None and data.validation_users is not None:
                unit = f"{recipe.unit_name or 'user'}s"
                held_out, rest = count_users(data.validation_users), count_users(data.train_users)
            yield (
                f"held out for validation, and not protected: {held_out:,} of {held_out + rest:,} {unit} of the training part, "
                f"drawn with split seed {recipe.split_seed}; validation_fraction = 0 holds out none"
            )
        else:
            yield "no example is held out for validation: validation_fraction is 0"
        if plan is not None and all(phase.trainable is None for phase in step.phases):
            trained = sum(parameter.numel() for parameter in step.model.parameters() if parameter.requires_grad)
            found = too_much_noise(plan, trained, recipe.unit_name or recipe.unit)
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

    @contextmanager
    def best_weights(self) -> Iterator[str]:
        """The model has averaged weights inside, if the recipe keeps an average; yields which weights these are."""
        average = self.trainer.average
        if average is None:
            yield "final weights"
            return
        with average.in_place_of(self.model):
            yield "averaged weights"

    def perplexity(self) -> float | None:
        """On the test texts, of a language model: exp of the mean cross-entropy of a token, over all tokens of all texts."""
        if not self.recipe.predicts_tokens:
            return None
        with self.best_weights():
            found = self._means({"nats": document_nats, "tokens": document_tokens})
        return math.exp(found["nats"] / found["tokens"])

    def final_weights_accuracy(self) -> float | None:
        """Accuracy on the test set of the weights after the last step, if the recipe also keeps an average; else None."""
        if self.trainer.average is None:
            return None
        with self.trainer.method.last_weights(self.model):
            return self._counts().accuracy

    def best_model(self) -> nn.Module:
        """A copy of the model with the weights that are evaluated: averaged ones if the recipe keeps an average."""
        with self.best_weights():
            return copy.deepcopy(self.model)

    def deployment(self) -> Deployment:
        """Raw inputs as the data source reads them, prepared as for evaluation."""
        data, prepare = self.data, Preparation(self.data)
        assert data.raw is not None, "texts are exported without a program"
        described = normalization_in_words(data.mean, data.std, pixels=data.images)
        return Deployment(data.raw, lambda inputs: prepare((inputs, inputs))[0], data.classes, described)

    def largest_difference(self, program: Callable[[Tensor], Tensor], count: int = _CHECKED) -> tuple[int, float]:
        """Compare a program with evaluation on the first test examples: how many, and the largest difference of a probability.

        The program gets what is in a file; evaluation goes its own way from the file to the probabilities.
        """
        model, prepare, test = for_deployment(self.best_model()), Preparation(self.data), self.data.test
        checked, largest = min(count, size_of(test)), 0.0
        assert self.data.raw is not None
        for index in range(checked):
            example = test[0][index] if isinstance(test, tuple) else test[index][0]
            raw = next(self.data.raw.read(test.path(index)))[1] if isinstance(test, ImageFolder) else example[None]
            with torch.no_grad():
                expected = model(prepare((example[None], example[None]))[0]).softmax(dim=1)
            largest = max(largest, float((program(raw) - expected).abs().max()))
        if not largest <= _TOLERANCE:
            raise DPMicroAdamError(
                f"the program's probabilities differ by {largest:.2g} from those of evaluation; nothing is exported, so "
                "use the weights alone, and report this"
            )
        return checked, largest

    def _counts(self) -> ClassCounts:
        if self.recipe.predicts_tokens:
            found = self._means({"hits": document_hits, "tokens": document_tokens})
            documents = size_of(self.data.test)
            return ClassCounts((round(found["hits"] * documents),), (round(found["tokens"] * documents),))
        (test,) = self._inputs(self.data.test)
        totals = torch.zeros(2, self.data.num_classes, dtype=torch.float64)

        def hits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            right, labels = class_hits(model, batch), batch[1].cpu()
            totals[0].index_add_(0, labels, right.cpu().double())
            totals[1].index_add_(0, labels, torch.ones(len(labels), dtype=torch.float64))
            return right

        measured = hits if self.features is None else self.features.on(hits)
        evaluate(self.model, test, {"accuracy": measured}, **self._evaluation())
        right, examples = torch.tensor(self.trainer.ranks.total(totals.flatten().tolist())).round().long().view(2, -1).tolist()
        return ClassCounts(tuple(right), tuple(examples))

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


def loading_code(recipe: Recipe, data: LabelledData, weights: str) -> str:
    """Python code that builds the model of a recipe, loads its exported weights and documents its inputs.

    Pretrained weights are not loaded again: the exported ones replace them.
    """
    options, shape = recipe.model_options, data.example_shape
    keywords = "".join(f", {key}={value!r}" for key, value in options.items() if key != "pretrained")
    scaled = f", as (value - mean) / std with mean {data.mean} and std {data.std}" if data.mean and data.std else ""
    pixels = ", pixels from 0 to 1" if data.images else ""
    needed = "  # adapters need pip install peft" if options.get("lora_rank") else ""
    # The model takes the rows of a table as images of one row.
    built_for = shape if data.images else (1, 1, *shape)
    return (
        "from safetensors.torch import load_file\n"
        "from dp_microadam.workbench import models\n\n"
        f'model = models.build("{recipe.model}", {data.num_classes}, {built_for}{keywords}){needed}\n'
        f'model.load_state_dict(load_file("{weights}"))\n'
        "model.eval()\n"
        f"# inputs: floats of shape [B, {', '.join(map(str, shape))}]{scaled}{pixels}"
    )
