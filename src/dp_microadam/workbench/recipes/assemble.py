"""Builds data, model, method, privacy plan and trainer from a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from dp_microadam.errors import InputError
from dp_microadam.methods.defaults import default_distance
from dp_microadam.methods.registry import build, refuse_bad_options
from dp_microadam.methods.scaling import PublicExamples
from dp_microadam.plan.advice import Proposal, advise, best
from dp_microadam.plan.bands import DEFAULT_NOISE_MEMORY_GIB
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.training.distributed import Ranks, ranks_here
from dp_microadam.training.evaluation import PerExample, class_hits, class_loss
from dp_microadam.training.frozen_features import FrozenFeatures
from dp_microadam.training.method import Method
from dp_microadam.training.progress import Fraction
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
from dp_microadam.workbench.recipes import keys
from dp_microadam.workbench.recipes.canaries import Canaries, add_canaries, canaries_in_words, with_canary_key
from dp_microadam.workbench.recipes.experiment import Experiment
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import located_options
from dp_microadam.workbench.recipes.texts import encoder_of, next_token_hits, next_token_loss, texts_in_words

_GAIN_FROM_BANDS = ("dp-threshold", "dp-walk", "dp-microadam", "dp-sgd", "dp-adam", "dp-adamw")
"""Methods that gain from several bands by default."""

_LARGEST_BATCH = 32
"""Examples that go through a frozen part at once. Its activations are far larger than the features a step runs on."""


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
    count = number_of_units(recipe, data)
    refuse_larger_batch(recipe, count)  # before anything takes long
    if recipe.seed is not None:
        torch.manual_seed(recipe.seed)
    model = model_of(recipe, data)
    parameters = trainable_parameters(model)
    if recipe.plan is not None:
        recipe, _, _ = with_advice(recipe, count, parameters)
    plan = plan_of(recipe, count, parameters) if recipe.protected else unprotected_plan_of(recipe, count)
    recipe = _with_defaults(recipe, plan, model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    normalization = models.normalization_of(model)
    if normalization is not None:  # pretrained weights expect the constants they were trained with
        data = replace(data, mean=normalization.mean, std=normalization.std)
    loss, hits = _loss(recipe, data), next_token_hits if recipe.predicts_tokens else class_hits
    features = None
    if recipe.cache_features:
        trained = [name.replace(".", "/") for name, parameter in model.named_parameters() if parameter.requires_grad]
        features = FrozenFeatures(
            model,
            os.path.commonpath(os.path.dirname(name) for name in trained).replace("/", "."),
            loss,
            prepare=Preparation(data),
            folder=features_folder,
            physical_batch_size=min(recipe.physical_batch_size, _LARGEST_BATCH),
            num_workers=recipe.num_workers,
            tell=Fraction("features computed").tell if show_progress and ranks.main else None,
        )
    measured = features.on if features is not None else partial(over_views, example_shape=data.example_shape)
    trainer = PrivateTrainer(
        model,
        _method(recipe, model, replace(data, train=own), plan.steps),
        plan,
        measured(loss),
        accuracy=measured(hits),
        run_dir=default_folder(recipe.name) if run_dir is None else run_dir,
        privacy=PrivacySettings(
            **_same(recipe, "max_grad_norm", "clipping", "secure", "seed"),
            unit_name=recipe.unit_name or "",
            show_private_metrics=show_private_metrics,
            public=tuple(_public_facts(recipe, data, canaries)),
        ),
        performance=PerformanceSettings(
            **_same(recipe, "physical_batch_size", "num_workers"),
            noise_memory_gib=recipe.noise_memory_gib or DEFAULT_NOISE_MEMORY_GIB,
        ),
        record=RecordSettings(
            **_same(recipe, "evaluate_every", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints"),
            config=recipe.to_toml(),
            show_progress=show_progress,
        ),
        prepare=Preparation(data) if features is None else None,
        augment=augment,
        max_steps=recipe.max_steps,
        ranks=ranks,
    )
    return Experiment(recipe, data, model, trainer, canaries, features)


def _same(recipe: Recipe, *names: str) -> dict[str, Any]:
    """Keys of the recipe that are called the same where they go."""
    return {name: getattr(recipe, name) for name in names}


def _with_defaults(recipe: Recipe, plan: PrivacyPlan | UnprotectedPlan, model: nn.Module) -> Recipe:
    """The recipe with the values of all that it left out, as they are kept in its run folder."""
    distance = recipe.resolved_distance
    if distance is not None and recipe.distance is None and not recipe.tune:
        distance = default_distance(model, pretrained="pretrained" in recipe.model_options)
    return replace(
        recipe,
        learning_rate=recipe.resolved_learning_rate,
        distance=distance,
        ema_decay=recipe.resolved_ema_decay,
        accountant=recipe.resolved_accountant,
        bands=plan.bands,
        model_options=recipe.resolved_model_options,
    )


def _public_facts(recipe: Recipe, data: LabelledData, canaries: Canaries | None) -> Iterator[str]:
    """What the privacy statement lists as public."""
    inputs = "kinds, ranges and values of the columns" if recipe.columns else "normalization constants of the input"
    yield from texts_in_words(recipe) or [inputs]
    if recipe.train_size is not None:
        yield f"which {recipe.train_size} examples of {recipe.data} are trained on (split seed {recipe.split_seed})"
    if size_of(data.validation):
        share = recipe.validation_size or f"{recipe.validation_fraction:g}"
        whole = recipe.data if data.train_users is None else f"the {recipe.unit_name or 'user'}s of {recipe.data}"
        verb = "are" if recipe.validation_size else "is"
        yield f"which {share} of {whole} {verb} held out (split seed {recipe.split_seed})"
    if not recipe.predicts_tokens:
        yield "number and names of the classes"
    if recipe.class_weights is not None:
        yield f"weights of the classes in the loss ({', '.join(f'{weight:g}' for weight in recipe.class_weights)})"
    if canaries is not None:
        yield canaries_in_words(canaries)
    if pretrained := recipe.model_options.get("pretrained"):
        yield f"the pretrained weights {pretrained!r}"


def _loss(recipe: Recipe, data: LabelledData) -> PerExample:
    if recipe.class_weights is None:
        return next_token_loss if recipe.predicts_tokens else class_loss
    if len(recipe.class_weights) != data.num_classes:
        raise InputError(
            f"class_weights has {len(recipe.class_weights)} numbers, but {recipe.data} has {data.num_classes} classes; it must "
            "have one for each"
        )
    return weighted_class_loss(recipe.class_weights)


def _method(recipe: Recipe, model: nn.Module, data: LabelledData, steps: int) -> Method:
    options = dict(recipe.optimizer)
    if "public" in options:
        options["public"] = public_examples(recipe, data, options["public"])
    rate, distance = recipe.resolved_learning_rate, recipe.resolved_distance
    method = build(recipe.algorithm, model, options, lr=rate, distance=distance)
    return method.configure(schedule=Schedule(recipe.schedule, steps, recipe.warmup), average=recipe.resolved_ema_decay)


def public_examples(recipe: Recipe, data: LabelledData, chosen: Any) -> PublicExamples:
    """The first ``chosen`` of those that are held out, which the guarantee does not cover anyway."""
    if isinstance(chosen, list):
        raise InputError(f"optimizer.public is {chosen}; it must be a number: how many of the held-out examples are public")
    if chosen > (held_out := size_of(data.validation)):
        raise InputError(f"optimizer.public is {chosen}; only {held_out} examples are held out, it must be at most that")
    loss = next_token_loss if recipe.predicts_tokens else class_loss
    if isinstance(data.validation, tuple):
        inputs, labels = data.validation
        return PublicExamples((inputs[:chosen], labels[:chosen]), loss, Preparation(data))
    return PublicExamples(Subset(data.validation, range(chosen)), loss, Preparation(data))


def load_data(recipe: Recipe) -> LabelledData:
    """The data that a recipe names."""
    encode = encoder_of(recipe) if recipe.data in keys.TEXT_SETS else None
    return load(recipe.data, recipe.data_folder or None, encode=encode, **load_settings(recipe))


def load_settings(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says about loading and checking its data; texts need an encoder besides."""
    return {
        **_same(recipe, "validation_fraction", "validation_size", "train_size", "test_size"),
        **_same(recipe, "split_seed", "image_size", "columns"),
        "verify": recipe.verify_data,
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
    if not augments and recipe.multiplicity > 1:
        raise InputError(
            f"multiplicity is {recipe.multiplicity}, but without crop_padding, flip or resized_crop all views are the same; "
            "set one of them"
        )
    if not augments:
        return None
    height, width = data.example_shape[-2:]
    own = Augmentation(recipe.crop_padding, recipe.flip, recipe.resized_crop, recipe.multiplicity, size=(height, width))
    cropped = isinstance(data.train, ImageFolder) and recipe.resized_crop  # right after decoding
    return Augmentation(flip=recipe.flip) if cropped else own


def model_of(recipe: Recipe, data: LabelledData) -> nn.Module:
    """The model that a recipe names, for the shape and classes of its data."""
    shape = data.example_shape
    if not data.tokens and not data.images:
        if recipe.model != "mlp":
            raise InputError(f"model is {recipe.model!r}, which takes images; for the rows of a table it must be 'mlp'")
        shape = (1, 1, shape[0])
    return models.build(recipe.model, data.num_classes, shape, **located_options(recipe))


def trainable_parameters(model: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def number_of_units(recipe: Recipe, data: LabelledData) -> int:
    """The number of training examples, or of users if these are the recipe's unit."""
    users = data.train_users
    if recipe.unit == "example" and recipe.unit_name and users is not None and count_users(users) < len(users):
        raise InputError(
            f"unit_name is {recipe.unit_name!r} and unit is 'example', but some have several examples; set unit = 'user' "
            "and examples_per_user, which protects each with all they have"
        )
    if recipe.unit == "example":
        return size_of(data.train)
    if users is None:
        raise InputError(f"unit is 'user', but nothing says whose each example of {data.name} is; its data need ids of users")
    return count_users(users)


def unprotected_plan_of(recipe: Recipe, dataset_size: int) -> UnprotectedPlan:
    """What stands for the plan of a run without privacy."""
    assert recipe.steps is not None, "recipes without privacy must say how many steps they take"
    limits = recipe.examples_per_user, recipe.max_batch_size
    return UnprotectedPlan(dataset_size, recipe.batch_size, recipe.steps, *limits)


def plan_of(recipe: Recipe, dataset_size: int, parameters: int | None = None) -> PrivacyPlan:
    """The privacy plan of a recipe for ``dataset_size`` training examples or users and a number of trainable ``parameters``.

    For a recipe that declares a search, it is the plan of each run, whose ε covers the search.
    """
    refuse_larger_batch(recipe, dataset_size)
    search = {name: recipe.tune[name] for name in ("expected_runs", "distribution") if recipe.tune}
    return (SelectionPlan if recipe.tune else PrivacyPlan).solve(
        dataset_size=dataset_size,
        **_same(recipe, "batch_size", "delta", "epsilon", "noise_multiplier", "steps", "max_batch_size", "examples_per_user"),
        accountant=recipe.resolved_accountant,
        bands=bands_of(recipe),
        parameters=parameters,
        noise_memory_gib=noise_memory_of(recipe),
        **search,
    )


def refuse_larger_batch(recipe: Recipe, dataset_size: int) -> None:
    """Raise InputError for a batch of more than there are to train on."""
    if recipe.batch_size > dataset_size:
        raise InputError(
            f"batch_size is {recipe.batch_size}, more than the {dataset_size} {recipe.unit_name or recipe.unit}s to train on, "
            f"validation and test parts aside; it must be at most {dataset_size}"
        )


def bands_of(recipe: Recipe) -> int | str:
    """The recipe's bands. Automatic ones are one for methods that do not gain from them, or were not measured with them.

    Scales that change from step to step keep correlated noise from cancelling, and so does MicroAdam's residual of four bits.
    """
    if recipe.bands is not None and recipe.bands != "auto":
        return recipe.bands
    quantized = recipe.algorithm == "dp-microadam" and recipe.optimizer.get("quantize", True)
    gains = recipe.algorithm in _GAIN_FROM_BANDS and not quantized
    return "auto" if gains and not recipe.tune else 1


def noise_memory_of(recipe: Recipe) -> float:
    """Memory in GiB that noise may take, counted in float32: noise of a secure generator is kept in float64."""
    return (recipe.noise_memory_gib or DEFAULT_NOISE_MEMORY_GIB) / (2 if recipe.secure else 1)


def with_advice(
    recipe: Recipe, dataset_size: int, parameters: int, steps_for: Callable[[int], float] | None = None
) -> tuple[Recipe, tuple[Proposal, ...], Proposal]:
    """The recipe with the proposed batch size, steps and bands, all proposals, and the one that was taken.

    ``steps_for`` tells how many steps of a batch size can be afforded; by default as many as process the examples of the
    recipe's own steps and batch size.
    """
    recipe = replace(recipe, plan="auto")  # which refuses what does not fit
    if steps_for is None and recipe.steps is None:
        raise InputError("steps is not given; steps times batch_size must say how many examples can be afforded")
    affordable = (recipe.steps or 0) * recipe.batch_size
    assert recipe.epsilon is not None
    proposals = advise(
        dataset_size=dataset_size,
        epsilon=recipe.epsilon,
        delta=recipe.delta,
        steps_for=steps_for or (lambda batch_size: affordable / batch_size),
        parameters=parameters,
        bands=bands_of(recipe) == "auto",
        fixed_rate=recipe.resolved_distance is None,
        noise_memory_gib=noise_memory_of(recipe),
        accountant=recipe.resolved_accountant,
    )
    taken = best(proposals)
    changed = replace(
        recipe, plan=None, noise_multiplier=None, batch_size=taken.batch_size, steps=taken.steps, bands=taken.bands
    )
    return changed, proposals, taken


def weighted_class_loss(weights: Sequence[float]) -> PerExample:
    """Cross-entropy of each example times the weight of its class, in training; in evaluation mode it is :func:`class_loss`.

    Formal guarantees: none are needed. A weight multiplies an example's loss, and so its gradient, before that is clipped: the
    example adds at most the clipping norm to the sum, whatever its weight. The weights themselves must be public numbers. Ones
    that are computed from the labels of the training data, such as one over the size of each class, would reveal those sizes.
    """
    table = torch.tensor(weights)

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal table
        losses = class_loss(model, batch)
        table = table.to(losses)  # copied to a device once: every copy waits for it
        return losses * table[batch[1]] if model.training else losses

    return weighted


def over_views(measure: PerExample, example_shape: Sequence[int]) -> PerExample:
    """``measure`` averaged over the views of each example, for batches of (inputs [B, K, *example_shape], labels [B]).

    Averaging happens per example, before clipping. Batches without a dimension of views, as in evaluation, are measured as
    they are.
    """
    dimensions = 1 + len(example_shape)

    def averaged(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        if inputs.dim() == dimensions:
            return measure(model, batch)
        views = inputs.shape[1]
        return measure(model, (inputs.flatten(0, 1), labels.repeat_interleave(views))).view(-1, views).mean(1)

    return averaged
