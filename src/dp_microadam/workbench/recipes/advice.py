"""``plan = "auto"`` in a recipe: batch size, steps and bands by predicted noise, for the computing that the recipe allows.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dp_microadam.errors import InputError
from dp_microadam.plan.advice import Proposal, advise, best
from dp_microadam.plan.band_choice import DEFAULT_NOISE_MEMORY_GIB
from dp_microadam.workbench.recipes.recipe import Recipe

_GAIN_FROM_BANDS = ("dp-threshold", "dp-walk", "dp-microadam", "dp-sgd", "dp-adam", "dp-adamw")


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
    refuse_unadvisable(recipe)
    if steps_for is None:
        if recipe.steps is None:
            raise InputError("steps is not given; steps times batch_size must say how many examples can be afforded")
        affordable = recipe.steps * recipe.batch_size
        steps_for = lambda batch_size: affordable / batch_size  # noqa: E731
    assert recipe.epsilon is not None
    proposals = advise(
        dataset_size=dataset_size,
        epsilon=recipe.epsilon,
        delta=recipe.delta,
        steps_for=steps_for,
        parameters=parameters,
        bands=bands_of(recipe) == "auto",
        fixed_rate=recipe.resolved_distance is None,
        noise_memory_gib=noise_memory_of(recipe),
        accountant=recipe.resolved_accountant,
    )
    taken = best(proposals)
    changed = replace(
        recipe,
        plan=None,
        noise_multiplier=None,
        steps=taken.steps,
        batch_size=taken.batch_size,
        bands=taken.bands,
    )
    return changed, proposals, taken


def refuse_unadvisable(recipe: Recipe) -> None:
    """Raise an InputError if there is nothing to advise on."""
    for what, unsuitable in (
        (f"method is {recipe.method!r}", not recipe.protected),
        ("epsilon is not given", recipe.protected and recipe.epsilon is None),
        (f"bands is {recipe.bands!r}", recipe.bands not in (None, "auto", 1)),
        (f"max_batch_size is {recipe.max_batch_size}", recipe.max_batch_size is not None),
        ("[tune] is given", bool(recipe.tune)),
    ):
        if unsuitable:
            raise InputError(
                f"{what}, but plan is 'auto': a proposal needs epsilon, is for a single private run, and chooses batch size, "
                "steps and bands itself; change one of them"
            )
