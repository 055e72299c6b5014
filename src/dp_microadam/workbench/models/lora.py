"""Low-rank adapters (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021), through ``peft``."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer, require_positive

HEADS = ("classifier", "score", "head", "classification_head")
"""What classifiers of ``transformers`` call their heads."""


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
        config = library.LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen or None, **_kind_of(network))
        with_adapters: nn.Module = library.get_peft_model(network, config)
    except ValueError as error:
        if not chosen:
            raise InputError(
                "lora_targets is empty, and peft has no default for this model; name some of its layers "
                f"{_linear_in(network)}, or 'all-linear'"
            ) from None
        raise InputError(
            f"lora_targets is {targets!r}, which does not fit this model ({str(error).splitlines()[0]}); name layers of "
            "the model, or 'all-linear'"
        ) from None
    return with_adapters


def adapted(network: nn.Module, rank: int, alpha: float | None, targets: str | Sequence[str]) -> nn.Module:
    """The model with adapters (:func:`with_lora`) if ``rank`` is above 0, else as it is.

    Raises:
        InputError: if the other two are given without a rank.
    """
    if rank:
        return with_lora(network, rank, alpha, targets)
    for name, value in (("lora_alpha", alpha), ("lora_targets", targets or None)):
        if value is not None:
            raise InputError(f"{name} is {value!r}, but lora_rank is 0, which means no adapters; give lora_rank too")
    return network


def _kind_of(network: Any) -> dict[str, Any]:
    """What ``peft`` has to know to call the model's forward pass as it wants to be called, and to train its head."""
    if getattr(network, "can_generate", lambda: False)():
        return {"task_type": "CAUSAL_LM"}
    heads = [name for name, _ in network.named_children() if name in HEADS]
    if getattr(network, "main_input_name", "input_ids") != "input_ids":  # images go through as they are
        return {"modules_to_save": heads or None}
    headless = not heads and getattr(network, "base_model", None) is network
    return {"task_type": "FEATURE_EXTRACTION" if headless else "SEQ_CLS"}


def _linear_in(network: nn.Module) -> str:
    """The last parts of the names of linear layers, in the order in which they come."""
    found = dict.fromkeys(name.rpartition(".")[2] for name, module in network.named_modules() if isinstance(module, nn.Linear))
    return ", ".join(map(repr, found))
