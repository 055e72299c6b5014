"""Builds data, model, optimizer, privacy plan and trainer from a recipe."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.methods.defaults import default_distance
from dp_microadam.methods.registry import build, refuse_bad_options
from dp_microadam.plan.band_choice import DEFAULT_NOISE_MEMORY_GIB
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.plan.unprotected import UnprotectedPlan
from dp_microadam.training.distributed import Ranks, ranks_here
from dp_microadam.training.evaluation import (
    PerExample,
    class_hits,
    class_loss,
    next_token_hits,
    next_token_loss,
    over_views,
    weighted_class_loss,
)
from dp_microadam.training.method import Method
from dp_microadam.training.rates import Schedule
from dp_microadam.training.run_folder import default_folder
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, RecordSettings
from dp_microadam.training.trainer import PrivateTrainer
from dp_microadam.workbench import models
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.augmentation import Augmentation
from dp_microadam.workbench.data.dataset import LabelledData, count_users, size_of
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.data.sources import load
from dp_microadam.workbench.recipes.advice import bands_of, noise_memory_of, refuse_unadvisable, with_advice
from dp_microadam.workbench.recipes.canaries import Canaries, add_canaries, canaries_in_words, with_canary_key
from dp_microadam.workbench.recipes.experiment import Experiment
from dp_microadam.workbench.recipes.kept_features import features_of
from dp_microadam.workbench.recipes.pretrained import located_options
from dp_microadam.workbench.recipes.public_part import public_examples
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.stated import stated
from dp_microadam.workbench.recipes.texts import text_arguments, texts_in_words


def assemble(
    recipe: Recipe,
    run_dir: str | Path | None = None,
    *,
    data: LabelledData | None = None,
    show_progress: bool = True,
    show_private_metrics: bool = False,
    ranks: Ranks | None = None,
    features_folder: str | Path | None = None,
) -> Experiment:
    """Load the data of a recipe and build its model and trainer. Nothing is written to disk yet.

    ``data`` replaces the data set that the recipe names. ``ranks`` is passed to the trainer. ``features_folder`` is where
    a recipe with ``cache_features`` keeps features, by default in the user's cache.

    Raises:
        InputError: if data cannot be found or read, or something does not fit.
    """
    ranks = ranks_here() if ranks is None else ranks
    refuse_bad_options(recipe.algorithm, recipe.optimizer, lr=recipe.resolved_learning_rate, distance=recipe.resolved_distance)
    if data is None:
        with ranks.one_per_machine_first():
            data = load_data(recipe)
    recipe = with_canary_key(recipe, ranks)
    own = data.train
    data, canaries = add_canaries(recipe, data)
    augment = _augmentation(recipe, data)
    _refuse_named_examples(recipe, data)
    count = number_of_units(recipe, data)
    if recipe.plan is not None:
        refuse_unadvisable(recipe)
    plan = plan_of(recipe, count)  # refused before anything takes long
    if recipe.seed is not None:
        torch.manual_seed(recipe.seed)
    model = model_of(recipe, data)
    if recipe.plan is not None:
        recipe, _, _ = with_advice(recipe, count, trainable_parameters(model))
        plan = plan_of(recipe, count)
    elif plan is None or bands_of(recipe) == "auto":  # how much noise can be kept depends on the model
        plan = plan_of(recipe, count, trainable_parameters(model))
    recipe = stated(_with_distance(recipe, model), plan.bands)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    normalization = models.normalization_of(model)
    if normalization is not None:  # pretrained weights expect the constants they were trained with
        data = replace(data, mean=normalization.mean, std=normalization.std)
    method = _method(recipe, model, replace(data, train=own), Schedule(recipe.schedule, plan.steps, recipe.warmup))
    loss = _loss(recipe, data)
    features = features_of(
        recipe, model, loss, prepare=Preparation(data), folder=features_folder, show_progress=show_progress and ranks.main
    )
    measured = features.on if features is not None else partial(over_views, example_shape=data.example_shape)
    trainer = PrivateTrainer(
        model,
        method,
        plan,
        measured(loss),
        accuracy=measured(_hits(recipe)),
        run_dir=default_folder(recipe.name) if run_dir is None else run_dir,
        privacy=_privacy_settings(recipe, data, canaries, show_private_metrics),
        performance=PerformanceSettings(
            physical_batch_size=recipe.physical_batch_size,
            num_workers=recipe.num_workers,
            noise_history=recipe.noise_history or "device",
            noise_memory_gib=recipe.noise_memory_gib or DEFAULT_NOISE_MEMORY_GIB,
        ),
        record=RecordSettings(
            evaluate_every=recipe.evaluate_every,
            checkpoint_every=recipe.checkpoint_every,
            checkpoint_minutes=recipe.checkpoint_minutes,
            keep_checkpoints=recipe.keep_checkpoints,
            diagnostics_every=recipe.diagnostics_every,
            config=recipe.to_toml(),
            show_progress=show_progress,
        ),
        prepare=Preparation(data) if features is None else None,
        augment=augment,
        max_steps=recipe.max_steps,
        ranks=ranks,
    )
    return Experiment(recipe, data, model, trainer, canaries, features)


def _privacy_settings(
    recipe: Recipe, data: LabelledData, canaries: Canaries | None, show_private_metrics: bool
) -> PrivacySettings:
    return PrivacySettings(
        max_grad_norm=recipe.max_grad_norm,
        clipping=recipe.clipping,
        secure=recipe.secure,
        seed=recipe.seed,
        unit_name=recipe.unit_name or "",
        show_private_metrics=show_private_metrics,
        public=(
            *(texts_in_words(recipe) or [_inputs_in_words(recipe)]),
            *_held_out_in_words(recipe, data),
            *([] if recipe.predicts_tokens else ["number and names of the classes"]),
            *_weights_in_words(recipe),
            *([canaries_in_words(canaries)] if canaries is not None else []),
            *([f"the pretrained weights {pretrained!r}"] if (pretrained := recipe.model_options.get("pretrained")) else []),
        ),
    )


def _with_distance(recipe: Recipe, model: nn.Module) -> Recipe:
    """The recipe with the default distance for its model, if it leaves it to the default."""
    if recipe.distance is not None or recipe.resolved_distance is None or recipe.tune:
        return recipe
    return replace(recipe, distance=default_distance(model, pretrained="pretrained" in recipe.model_options))


def _inputs_in_words(recipe: Recipe) -> str:
    return "kinds, ranges and values of the columns" if recipe.columns else "normalization constants of the input"


def _hits(recipe: Recipe) -> PerExample:
    return next_token_hits if recipe.predicts_tokens else class_hits


def _loss(recipe: Recipe, data: LabelledData) -> PerExample:
    if recipe.predicts_tokens:
        return next_token_loss
    if recipe.class_weights is None:
        return class_loss
    if len(recipe.class_weights) != data.num_classes:
        raise InputError(
            f"class_weights has {len(recipe.class_weights)} numbers, but {recipe.data} has {data.num_classes} classes; it must "
            "have one for each"
        )
    return weighted_class_loss(recipe.class_weights)


def _held_out_in_words(recipe: Recipe, data: LabelledData) -> list[str]:
    drawn = f"which {recipe.train_size} examples of {recipe.data} are trained on (split seed {recipe.split_seed})"
    used = [] if recipe.train_size is None else [drawn]
    if not size_of(data.validation):
        return used
    share = recipe.validation_size or f"{recipe.validation_fraction:g}"
    whole = recipe.data if data.train_users is None else f"the {recipe.unit_name or 'user'}s of {recipe.data}"
    verb = "are" if recipe.validation_size else "is"
    return [*used, f"which {share} of {whole} {verb} held out (split seed {recipe.split_seed})"]


def _weights_in_words(recipe: Recipe) -> list[str]:
    if recipe.class_weights is None:
        return []
    return [f"weights of the classes in the loss ({', '.join(f'{weight:g}' for weight in recipe.class_weights)})"]


def _method(recipe: Recipe, model: nn.Module, data: LabelledData, schedule: Schedule) -> Method:
    options = dict(recipe.optimizer)
    if "public" in options:
        options["public"] = public_examples(recipe, data, options["public"])
    rate, distance = recipe.resolved_learning_rate, recipe.resolved_distance
    method = build(recipe.algorithm, model, options, lr=rate, distance=distance)
    return method.configure(schedule=schedule, average=recipe.resolved_ema_decay)


def load_data(recipe: Recipe) -> LabelledData:
    """The data that a recipe names."""
    return load(recipe.data, recipe.data_folder or None, **load_settings(recipe), **text_arguments(recipe))


def load_settings(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says about loading and checking its data; texts need an encoder besides."""
    same = ("validation_fraction", "validation_size", "train_size", "test_size", "split_seed", "image_size", "columns")
    return {
        **{name: getattr(recipe, name) for name in same},
        "verify": recipe.verify_data,
        "memory_gib": recipe.data_memory_gib,
        "labelled": not recipe.predicts_tokens,
        **recipe.data_options,
    }


def _augmentation(recipe: Recipe, data: LabelledData) -> Augmentation | None:
    """The augmentation of training images on the device; None if there is none."""
    augments = bool(recipe.crop_padding or recipe.flip or recipe.resized_crop)
    if not data.images and (augments or recipe.multiplicity > 1):
        raise InputError(
            f"data is {recipe.data!r}, not images; crop_padding, flip, resized_crop and multiplicity are for images, leave "
            "them out"
        )
    if not augments:
        if recipe.multiplicity > 1:
            raise InputError(
                f"multiplicity is {recipe.multiplicity}, but without crop_padding, flip or resized_crop all views are the "
                "same; set one of them"
            )
        return None
    height, width = data.example_shape[-2:]
    augmentation = Augmentation(
        recipe.crop_padding, recipe.flip, recipe.resized_crop, recipe.multiplicity, size=(height, width)
    )
    if isinstance(data.train, ImageFolder) and recipe.resized_crop:
        return Augmentation(flip=recipe.flip)
    return augmentation


def model_of(recipe: Recipe, data: LabelledData) -> nn.Module:
    """The model that a recipe names, for the shape and classes of its data."""
    return models.build(recipe.model, data.num_classes, _model_shape(recipe, data), **located_options(recipe))


def trainable_parameters(model: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _model_shape(recipe: Recipe, data: LabelledData) -> tuple[int, ...]:
    if data.tokens:
        return data.example_shape
    if data.images:
        channels, height, width = data.example_shape
        return channels, height, width
    if recipe.model != "mlp":
        raise InputError(f"model is {recipe.model!r}, which takes images; for the rows of a table it must be 'mlp'")
    return 1, 1, data.example_shape[0]


def _refuse_named_examples(recipe: Recipe, data: LabelledData) -> None:
    """Refuse to call an example by the name of a unit that has several, if the data say whose each example is."""
    users = data.train_users
    if recipe.unit == "example" and recipe.unit_name and users is not None and count_users(users) < len(users):
        raise InputError(
            f"unit_name is {recipe.unit_name!r} and unit is 'example', but some have several examples; set unit = 'user' "
            "and examples_per_user, which protects each with all they have"
        )


def number_of_units(recipe: Recipe, data: LabelledData) -> int:
    """The number of training examples, or of users if these are the recipe's unit."""
    if recipe.unit == "example":
        return size_of(data.train)
    if data.train_users is None:
        raise InputError(f"unit is 'user', but nothing says whose each example of {data.name} is; its data need ids of users")
    return count_users(data.train_users)


def plan_of(recipe: Recipe, dataset_size: int, parameters: int | None = None) -> PrivacyPlan | UnprotectedPlan:
    """The privacy plan of a recipe for ``dataset_size`` training examples or users and a number of trainable ``parameters``.

    For a recipe that declares a search, it is the plan of each run, whose ε covers the search.
    """
    if recipe.batch_size > dataset_size:
        raise InputError(
            f"batch_size is {recipe.batch_size}, more than the {dataset_size} {recipe.unit_name or recipe.unit}s to train on, "
            f"validation and test parts aside; it must be at most {dataset_size}"
        )
    if recipe.protected:
        search = {name: recipe.tune[name] for name in ("expected_runs", "distribution") if recipe.tune}
        solve = SelectionPlan.solve if recipe.tune else PrivacyPlan.solve
        return solve(
            dataset_size=dataset_size,
            batch_size=recipe.batch_size,
            delta=recipe.delta,
            epsilon=recipe.epsilon,
            noise_multiplier=recipe.noise_multiplier,
            steps=recipe.steps,
            accountant=recipe.resolved_accountant,
            bands=bands_of(recipe),
            parameters=parameters,
            noise_memory_gib=noise_memory_of(recipe),
            max_batch_size=recipe.max_batch_size,
            unit=recipe.unit,
            examples_per_user=recipe.examples_per_user,
            **search,
        )
    assert recipe.steps is not None, "recipes without privacy must say how many steps they take"
    return UnprotectedPlan(
        dataset_size, recipe.batch_size, recipe.steps, recipe.unit, recipe.examples_per_user, recipe.max_batch_size
    )
