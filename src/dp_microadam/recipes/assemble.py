"""From a recipe to what can be trained: data, model, optimizer, plan and trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dp_microadam import data as data_sources
from dp_microadam import models
from dp_microadam.data import ImageData
from dp_microadam.methods.registry import METHODS, build_optimizer
from dp_microadam.privacy.plan import PrivacyPlan
from dp_microadam.recipes.recipe import Recipe
from dp_microadam.training.evaluation import class_hits, class_loss, evaluate
from dp_microadam.training.run_folder import default_folder
from dp_microadam.training.schedules import Schedule
from dp_microadam.training.trainer import PrivateTrainer, RunResult, UnprotectedPlan


@dataclass
class Experiment:
    """A recipe with everything it names, ready to train."""

    recipe: Recipe
    data: ImageData
    model: nn.Module
    trainer: PrivateTrainer

    def fit(self) -> RunResult:
        """Train on the training part, with validation on the part held out of it."""
        return self.trainer.fit(
            (self.data.train_images, self.data.train_labels),
            validation=(self.data.validation_images, self.data.validation_labels),
        )

    def test_accuracy(self) -> tuple[float, str]:
        """Accuracy on the test set, of the averaged weights if the recipe averages, and which weights these are."""
        average = self.trainer.average
        if average is None:
            return self._accuracy(), "final weights"
        with average.in_place_of(self.model):
            return self._accuracy(), "averaged weights"

    def _accuracy(self) -> float:
        device = next(self.model.parameters()).device
        test = (self.data.test_images.to(device), self.data.test_labels.to(device))
        return evaluate(self.model, test, {"accuracy": class_hits}, prepare=Normalize(self.data))["accuracy"]


class Normalize:
    """uint8 images to floats, by public constants."""

    def __init__(self, data: ImageData) -> None:
        self._mean = torch.tensor(data.mean).view(1, -1, 1, 1) * 255
        self._scale = 1 / (torch.tensor(data.std).view(1, -1, 1, 1) * 255)

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        mean, scale = self._mean.to(images.device), self._scale.to(images.device)
        return images.float().sub_(mean).mul_(scale), labels


def assemble(
    recipe: Recipe,
    run_dir: str | Path | None = None,
    *,
    show_progress: bool = True,
    show_private_metrics: bool = False,
) -> Experiment:
    """Load what the recipe names and put it together. Nothing is written yet.

    Raises:
        InputError: if data cannot be found or read, or something does not fit.
    """
    data = data_sources.load(
        recipe.data, recipe.data_folder or None, validation_fraction=recipe.validation_fraction, split_seed=recipe.split_seed
    )
    plan = _plan(recipe, len(data.train_labels))
    if recipe.seed is not None:
        torch.manual_seed(recipe.seed)
    shape = data.train_images.shape
    model = models.build(recipe.model, data.num_classes, (shape[1], shape[2], shape[3]), **recipe.model_options)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    normalization = models.normalization_of(model)
    if normalization is not None:  # pretrained weights expect the constants they were trained with
        data = replace(data, mean=normalization.mean, std=normalization.std)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainer = PrivateTrainer(
        model,
        build_optimizer(recipe.method, trainable, recipe.resolved_learning_rate, recipe.optimizer),
        plan,
        class_loss,
        per_example_accuracy=class_hits,
        method="private" if METHODS[recipe.method].private else "non-private",
        max_grad_norm=recipe.max_grad_norm,
        clipping=recipe.clipping,
        physical_batch_size=recipe.physical_batch_size,
        prepare=Normalize(data),
        schedule=Schedule(recipe.schedule, plan.steps, recipe.warmup),
        ema_decay=recipe.ema_decay,
        max_steps=recipe.max_steps,
        evaluate_every=recipe.evaluate_every,
        diagnostics_every=recipe.diagnostics_every,
        checkpoint_every=recipe.checkpoint_every,
        checkpoint_minutes=recipe.checkpoint_minutes,
        keep_checkpoints=recipe.keep_checkpoints,
        run_dir=default_folder(recipe.name) if run_dir is None else run_dir,
        config=recipe.to_toml(),
        public=(
            "normalization constants of the input",
            f"which {recipe.validation_fraction:g} of {recipe.data} is held out (split seed {recipe.split_seed})",
        ),
        secure=recipe.secure,
        seed=recipe.seed,
        show_progress=show_progress,
        show_private_metrics=show_private_metrics,
    )
    return Experiment(recipe, data, model, trainer)


def _plan(recipe: Recipe, dataset_size: int) -> PrivacyPlan | UnprotectedPlan:
    if METHODS[recipe.method].private:
        return PrivacyPlan.solve(
            dataset_size=dataset_size,
            batch_size=recipe.batch_size,
            delta=recipe.delta,
            epsilon=recipe.epsilon,
            noise_multiplier=recipe.noise_multiplier,
            steps=recipe.steps,
            accountant=recipe.accountant,
        )
    assert recipe.steps is not None, "recipes without privacy must say how many steps they take"
    return UnprotectedPlan(dataset_size, recipe.batch_size, recipe.steps)
