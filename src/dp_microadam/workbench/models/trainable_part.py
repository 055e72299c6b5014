"""Which part of a pretrained encoder is trained, clipped and gets noise besides the head."""

from __future__ import annotations

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import require_one_of

PARTS = ("all", "biases", "head")
"""All weights; biases, as DP-BiTFiT does (Bu et al., 2024); or nothing besides the head."""


def require_part(trainable: str, lora_rank: int) -> None:
    """Raise InputError if there is no such part, or adapters are to be trained in its place."""
    require_one_of("trainable", trainable, PARTS)
    if lora_rank and trainable != "all":
        raise InputError(f"trainable is {trainable!r} and lora_rank is {lora_rank}; with LoRA leave trainable out")


def freeze_but(encoder: nn.Module, trainable: str) -> None:
    """Leave the part of the encoder that is called ``trainable`` to be trained, and freeze the rest of it.

    >>> encoder = nn.Linear(2, 3)
    >>> freeze_but(encoder, "biases")
    >>> encoder.weight.requires_grad, encoder.bias.requires_grad
    (False, True)

    What is frozen already, such as fixed position embeddings, stays so.

    Raises:
        InputError: if biases are to be trained and there are none.
    """
    if trainable == "all":
        return
    for name, parameter in encoder.named_parameters():
        if trainable == "head" or not name.endswith("bias"):
            parameter.requires_grad_(False)
    if trainable == "biases" and not any(parameter.requires_grad for parameter in encoder.parameters()):
        raise InputError("trainable is 'biases', but the encoder has none; use 'head', 'all', or adapters (lora_rank)")
