"""Writes a text model as a folder that ``from_pretrained`` loads, with its tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dp_microadam.workbench.models.hugging_face import HEAD, SentenceClassifier, TextEncoder, TextModel
from dp_microadam.workbench.models.pretrained import quiet, transformers


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


def sentence_loading_code(
    model: SentenceClassifier, pretrained: str, max_length: int, classes: tuple[str, ...], *, adapters_alone: bool
) -> str:
    """Python code that loads the folder of a :class:`SentenceClassifier` and computes its scores, for the model card."""
    names, load = "from transformers import AutoModel, AutoTokenizer", 'AutoModel.from_pretrained(".").eval()'
    about = "a pooler that is reported as missing is not used"
    if adapters_alone:
        names = "from peft import AutoPeftModelForFeatureExtraction\nfrom transformers import AutoTokenizer"
        load = 'AutoPeftModelForFeatureExtraction.from_pretrained(".").eval()'
        about = f"adapters on top of {pretrained}"
    return f"""from safetensors.torch import load_file
{names}

# {about}
encoder, tokenizer = {load}, AutoTokenizer.from_pretrained(".")
head = load_file("{HEAD}")


classes = {list(classes)!r}


def scores(texts):
    inputs = tokenizer(texts, truncation=True, max_length={max_length}, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].unsqueeze(-1)
    states = encoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    features = (states * mask).sum(1) / mask.sum(1)
    features = {model.features.norm:g} * features / features.norm(dim=1, keepdim=True)
    return features @ head["weight"].T + head["bias"]"""


def text_loading_code(kind: str, pretrained: str, max_length: int, *, adapters_alone: bool) -> str:
    """Python code that loads such a folder, for the model card; ``kind`` is the class of ``transformers``.

    >>> print(text_loading_code("AutoModelForCausalLM", "gpt2", 64, adapters_alone=False))
    from transformers import AutoModelForCausalLM, AutoTokenizer
    <BLANKLINE>
    model = AutoModelForCausalLM.from_pretrained(".")
    tokenizer = AutoTokenizer.from_pretrained(".")
    # trained on texts of at most 64 tokens: tokenizer(text, truncation=True, max_length=64)
    """
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
