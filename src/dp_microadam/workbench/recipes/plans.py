"""The plan of a recipe: solved for its budget, with as many bands as suit it, or proposed (``plan = "auto"``).

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dp_microadam.errors import InputError
from dp_microadam.plan.advice import Proposal, advise, best
from dp_microadam.plan.bands import DEFAULT_NOISE_MEMORY_GIB
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.workbench.recipes.recipe import Recipe

_GAIN_FROM_BANDS = ("dp-threshold", "dp-walk", "dp-microadam", "dp-sgd", "dp-adam", "dp-adamw")


def plan_of(recipe: Recipe, dataset_size: int, parameters: int | None = None) -> PrivacyPlan:
    """The privacy plan of a recipe for ``dataset_size`` training examples or users and a number of trainable ``parameters``.

    For a recipe that declares a search, it is the plan of each run, whose ε covers the search.
    """
    refuse_larger_batch(recipe, dataset_size)
    search = {name: recipe.tune[name] for name in ("expected_runs", "distribution") if recipe.tune}
    return (SelectionPlan if recipe.tune else PrivacyPlan).solve(
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
        examples_per_user=recipe.examples_per_user,
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

    Raises:
        InputError: for a recipe without privacy or ε, or with settings that batch size, steps and bands must fit.
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
