"""Reads the theorem's constants from a run folder; it does not contain L, σ_g and f(θ₁) − f*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError


def numbers_of_run(run_dir: Path) -> dict[str, Any]:
    """Planned steps, updates done, noise, batch size, clipping norm, parameter sizes and the options of a run with MicroAdam.

    All of them are public: the plan, the recipe, and the shapes of the weights.

    Raises:
        InputError: if ``run_dir`` is not a run folder, or the run has another optimizer.
    """
    from dp_microadam.ledger.ledger import read_ledger
    from dp_microadam.training.checkpoint import CheckpointFolder
    from dp_microadam.training.run_folder import CHECKPOINTS, CONFIG
    from dp_microadam.workbench.recipes.stated import recipe_of_run

    config = run_dir / CONFIG
    if not config.is_file():
        raise InputError(f"run is {str(run_dir)!r}, which is not a run folder: it has no {CONFIG}")
    recipe = recipe_of_run(config.read_text(encoding="utf-8"))
    if recipe.algorithm != "dp-microadam":
        raise InputError(f"run has method {recipe.algorithm!r}; the theorem is about dp-microadam")
    steps, noise_multiplier = recipe.steps, 0.0
    if recipe.protected:
        plan = read_ledger(run_dir).plan
        steps, noise_multiplier = plan.steps, plan.noise_multiplier
    _, content, _ = CheckpointFolder(run_dir / CHECKPOINTS).newest()
    sizes = [value.numel() for value in content["model"].values() if value.is_floating_point()]
    trained = sum(len(group["params"]) for group in content["optimizer"]["param_groups"])
    return {
        "steps": steps,
        "updates": content["updates"],
        "noise_multiplier": noise_multiplier,
        "batch_size": recipe.batch_size,
        "max_grad_norm": recipe.max_grad_norm,
        # A checkpoint does not record which tensors of a partly frozen model are trained.
        "sizes": sizes if len(sizes) == trained else None,
        **{name: value for name, value in recipe.optimizer.items() if name in _OPTIONS},
    }


_OPTIONS = ("betas", "eps", "density", "scope", "quantize", "error_feedback")
