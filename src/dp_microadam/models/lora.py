"""Low-rank adapters (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021), through ``peft``."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer, require_positive


def peft() -> ModuleType:
    """The package ``peft``, imported on first use because that takes seconds."""
    try:
        import peft
    except ImportError:
        raise InputError("LoRA needs the package peft, which is not installed; run pip install 'dp-microadam[lora]'") from None
    return peft


def with_lora(network: nn.Module, rank: int = 8, alpha: float | None = None, targets: str | Sequence[str] = ()) -> nn.Module:
    """A model of ``transformers`` with its weights W frozen and W + (alpha / rank)·B·A in place of those of ``targets``.

    A and B are trained, and the head of a classifier. B starts at zero, so that the model starts as it was. Only what is
    trained is clipped and gets noise. Of an encoder without a head, such as ``BertModel``, the adapters alone are trained.

    Args:
        rank: the number of rows of A and columns of B.
        alpha: the factor of the product is alpha / rank. None: twice the rank.
        targets: names of the layers, or ``"all-linear"``; empty: those that ``peft`` takes for this kind of model.

    Raises:
        InputError: if a value cannot be used, no such layers exist, or ``peft`` is not installed.
    """
    require_integer("lora_rank", rank, 1)
    alpha = require_positive("lora_alpha", 2.0 * rank if alpha is None else alpha)
    library = peft()
    if hasattr(network, "peft_config"):
        raise InputError(
            f"lora_rank is {rank}, but the model has adapters already; leave it out, or give the model without them"
        )
    chosen: Any = targets if isinstance(targets, str) else list(targets)
    try:
        config = library.LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen or None, task_type=_task(network))
        adapted: nn.Module = library.get_peft_model(network, config)
    except ValueError as error:
        raise InputError(
            f"lora_targets is {targets!r}, which does not fit this model ({str(error).splitlines()[0]}); name layers of "
            "the model, or 'all-linear'"
        ) from None
    return adapted


def _task(network: Any) -> str | None:
    """What ``peft`` calls the use of a model; the arguments of its forward pass and whether a head trains depend on it."""
    if getattr(network, "can_generate", lambda: False)():
        return "CAUSAL_LM"
    encoder: Any = getattr(network, "base_model", None)
    if encoder is not network:
        return "SEQ_CLS"  # an encoder inside a model with a head, which is trained, too
    return "FEATURE_EXTRACTION" if encoder.main_input_name == "input_ids" else None  # None: images go through as they are
