"""Text models of ``transformers``: classifiers and causal language models, from a folder or a name on the Hugging Face hub, and
written as a folder that ``from_pretrained`` loads.

A batch of texts is one tensor of tokens [B, length]. Texts are padded on the right with ``PADDING`` to a constant length, never
to the longest of a batch, so that what a text is to the model does not depend on the others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.layers.fixed_norm import FixedNorm
from dp_microadam.validation import require_integer, require_one_of
from dp_microadam.workbench.models.lora import adapted
from dp_microadam.workbench.models.pretrained import (
    first_line,
    freeze_but,
    loaded,
    loaded_network,
    new_head,
    partly_trained,
    quiet,
    transformers,
)

PADDING = -1
"""Stands for no token. It is none of the model's own, so that the mask follows from the tokens."""

HEAD = "head.safetensors"
"""The file of a head that no class of ``transformers`` computes, beside an exported encoder."""

_ENCODED_AT_ONCE = 1024
_LONGEST = 1_000_000


class TextModel(nn.Module):
    """A model of ``transformers`` that takes one tensor of tokens, padded with ``PADDING``, and returns scores.

    Scores are [B, classes] for a classifier, and [B, length, vocabulary] for a language model.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        config: Any = network.config
        if config.pad_token_id is None:  # classifiers that read the last token find it by this
            end = config.eos_token_id
            config.pad_token_id = end if isinstance(end, int) else 0
        self._pad = int(config.pad_token_id)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens >= 0
        ids = torch.where(mask, tokens, self._pad).long()
        scores: Tensor = self.network(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return scores


class SentenceClassifier(nn.Module):
    """A linear head on an encoder of ``transformers``: on the mean of its last states over a text's tokens.

    That is what sentence encoders are trained for, where the first token's state need not say much. The mean is brought to a
    fixed norm. Tokens are those that :class:`TextModel` takes. An encoder of which nothing is trained runs without dropout.
    """

    def __init__(self, encoder: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.features = FixedNorm()
        self.head = new_head(encoder.config.hidden_size, num_classes)  # type: ignore[union-attr, arg-type]
        self.train()

    def train(self, mode: bool = True) -> SentenceClassifier:
        """A frozen encoder stays in evaluation mode, without dropout."""
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.encoder.parameters()):
            self.encoder.eval()
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens >= 0
        states = self.encoder(input_ids=torch.where(mask, tokens, 0).long(), attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        scores: Tensor = self.head(self.features((states * weights).sum(1) / weights.sum(1)))
        return scores


@dataclass(frozen=True)
class TextEncoder:
    """Turns texts into rows of ``max_length`` tokens: longer ones are cut at their end, shorter ones padded.

    Formal guarantees: every row is a function of its own text and of public things, the tokenizer and ``max_length``.
    """

    tokenizer: Any
    max_length: int

    def __call__(self, texts: Sequence[str]) -> Tensor:
        rows = torch.full((len(texts), self.max_length), PADDING, dtype=torch.int32)
        for start in range(0, len(texts), _ENCODED_AT_ONCE):
            chosen = list(texts[start : start + _ENCODED_AT_ONCE])
            found = self.tokenizer(chosen, truncation=True, max_length=self.max_length, padding=False)["input_ids"]
            for row, ids in enumerate(found, start):
                rows[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return rows


def text_encoder(pretrained: str, max_length: int) -> TextEncoder:
    """The tokenizer that belongs to a model, from its folder or the hub.

    Raises:
        InputError: if there is none, or ``max_length`` is more than the model takes.
    """
    require_integer("data_options.max_length", max_length, 2)
    tokenizer = loaded("AutoTokenizer", pretrained)
    longest = getattr(loaded("AutoConfig", pretrained), "max_position_embeddings", None)
    if isinstance(longest, int) and max_length > longest:
        raise InputError(f"data_options.max_length is {max_length}; {pretrained!r} takes at most {longest} tokens")
    tokenizer.truncation_side = "right"
    return TextEncoder(tokenizer, max_length)


def text_classifier(
    num_classes: int,
    *,
    pretrained: str = "",
    trainable: str = "all",
    pooling: str = "own",
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] = (),
) -> TextModel | SentenceClassifier:
    """A classifier of texts: ``AutoModelForSequenceClassification`` with a new head, unless the folder has one of this size.

    Args:
        pretrained: a folder written by ``save_pretrained``, or a name on the Hugging Face hub. The weights must be public:
            trained without the private data.
        trainable: ``"all"``; ``"biases"`` to freeze everything but these and the head; or ``"head"`` to freeze everything
            else, which then also runs without dropout.
        pooling: what the head gets: ``"own"``, what the class of ``transformers`` gives it, or ``"mean"``, the mean over a
            text's tokens at a fixed norm (:class:`SentenceClassifier`), for sentence encoders.
        lora_rank: above 0 the pretrained weights are frozen, and low-rank adapters and the head are trained
            (:func:`~dp_microadam.workbench.models.with_lora`, also for the other two).
    """
    if require_one_of("pooling", pooling, ("own", "mean")) == "mean":
        encoder = partly_trained(_sentence_encoder(pretrained), trainable, lora_rank, lora_alpha, lora_targets)
        return SentenceClassifier(encoder, num_classes)
    network = loaded_network("AutoModelForSequenceClassification", pretrained, num_labels=num_classes)
    freeze_but(network.base_model, trainable, lora_rank)
    if trainable == "head":
        for part in network.children():  # dropout between the two has no parameters
            part.train(any(parameter.requires_grad for parameter in part.parameters()))
    return TextModel(adapted(network, lora_rank, lora_alpha, lora_targets))


def saved_classifier(folder: Path) -> tuple[TextModel | SentenceClassifier, TextEncoder, tuple[str, ...], str]:
    """The classifier in a folder that ``save_text_model`` has written, its encoder, names of classes and column of texts."""
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds adapters without the model they belong to; load them as its README.md says, "
            "or export a run of dp-microadam train without --adapters"
        )
    config = loaded("AutoConfig", str(folder))
    head_beside = (folder / HEAD).is_file()
    if not head_beside and not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        raise InputError(
            f"{folder} holds no AutoModelForSequenceClassification; give such a folder, or the run of a classifier"
        )
    names = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    # Tokenizers that no length was given to have one of 1e30.
    length = min(loaded("AutoTokenizer", str(folder)).model_max_length, getattr(config, "max_position_embeddings", math.inf))
    if length > _LONGEST:
        raise InputError(f"{folder} does not say how long texts may be; set model_max_length in its tokenizer_config.json")
    model = (
        _with_saved_head(folder, len(names))
        if head_beside
        else TextModel(loaded_network("AutoModelForSequenceClassification", str(folder)))
    )
    column = str(getattr(config, "text_column", "text"))
    return model.eval(), text_encoder(str(folder), int(length)), names, column


def _with_saved_head(folder: Path, num_classes: int) -> SentenceClassifier:
    model = SentenceClassifier(_sentence_encoder(str(folder)).requires_grad_(False), num_classes)
    try:
        model.head.load_state_dict(load_file(folder / HEAD))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(f"{folder / HEAD} cannot be read, export the model again: {first_line(error)}") from error
    return model


def language_model(
    *,
    pretrained: str = "",
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] = (),
) -> TextModel:
    """A causal language model, ``AutoModelForCausalLM``; arguments are those of :func:`text_classifier`."""
    network = loaded_network("AutoModelForCausalLM", pretrained)
    return TextModel(adapted(network, lora_rank, lora_alpha, lora_targets))


def _sentence_encoder(source: str) -> Any:
    encoder = loaded_network("AutoModel", source)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # unused, and random where pretrained weights have none
    return encoder


def save_text_model(
    model: TextModel | SentenceClassifier,
    encoder: TextEncoder,
    folder: Path,
    *,
    classes: tuple[str, ...] = (),
    column: str | None = None,
    adapters_alone: bool = False,
) -> None:
    """Write configuration, weights and tokenizer.

    LoRA weights are merged into those they adapt, so that ``transformers`` alone loads the result. With ``adapters_alone`` the
    folder holds just the adapters and the head, which ``peft`` puts on the pretrained model. The head of a
    :class:`SentenceClassifier` is a file of its own: no class of ``transformers`` computes it.
    """
    if isinstance(model, SentenceClassifier):
        save_file({name: value.contiguous() for name, value in model.head.state_dict().items()}, folder / HEAD)
    network: Any = model.encoder if isinstance(model, SentenceClassifier) else model.network
    network.config.id2label = dict(enumerate(classes)) or network.config.id2label
    if column is not None:
        network.config.text_column = column  # of tables that predict reads
    network.config.label2id = {name: number for number, name in enumerate(classes)} or network.config.label2id
    if hasattr(network, "merge_and_unload") and not adapters_alone:
        network = copy.deepcopy(network).merge_and_unload()
    with quiet(transformers("text models")):
        network.save_pretrained(folder)
        encoder.tokenizer.model_max_length = encoder.max_length  # by which saved_classifier cuts texts as in training
        encoder.tokenizer.save_pretrained(folder)


def text_loading_code(
    model: TextModel | SentenceClassifier, kind: str, pretrained: str, max_length: int, *, adapters_alone: bool
) -> str:
    """Python code that loads such a folder, for the model card; ``kind`` is the class of ``transformers``."""
    if isinstance(model, SentenceClassifier):
        return (
            "from pathlib import Path\n\nfrom dp_microadam.workbench.models.hugging_face import saved_classifier\n\n"
            'model, encoder, classes, _ = saved_classifier(Path("."))\n# scores of the classes: model(encoder(texts))'
        )
    load = f'model = {kind}.from_pretrained(".")'
    names = f"from transformers import {kind}, AutoTokenizer"
    if adapters_alone:
        kind = kind.replace("AutoModel", "AutoPeftModel")
        names = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
        load = f'model = {kind}.from_pretrained(".")  # on top of {pretrained}'
    return (
        f'{names}\n\n{load}\ntokenizer = AutoTokenizer.from_pretrained(".")\n'
        f"# trained on texts of at most {max_length} tokens: tokenizer(text, truncation=True, max_length={max_length})"
    )
