"""Loads networks of ``transformers`` from a folder or the Hugging Face hub, and freezes what of them is not trained."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import require_one_of
from dp_microadam.workbench.models.lora import adapted

PARTS = ("all", "biases", "head")
"""What is trained, clipped and gets noise: all weights; biases, as DP-BiTFiT does (Bu et al., 2024), and the head; the head."""

_HUB_TIMEOUT = 10.0


def transformers(who: str = "vision transformers") -> ModuleType:
    """The package ``transformers``, imported on first use because that takes seconds; ``who`` needs it."""
    try:
        import transformers
    except ImportError:
        raise InputError(
            f"{who} need the package transformers, which is not installed; run pip install 'dp-microadam[transformers]'"
        ) from None
    return transformers


@contextmanager
def quiet(library: ModuleType) -> Iterator[None]:
    """Silence the messages and progress bars of ``transformers`` while loading."""
    logging = library.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """The beginning of another library's message, which may run over many lines."""
    runs_code = any(option in str(error) for option in ("weights_only", "trust_remote_code"))
    if isinstance(error, pickle.UnpicklingError) or runs_code:
        return "it holds more than tensors, perhaps code, which is never run"  # theirs says how to run it
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def loaded(kind: str, source: str, **options: Any) -> Any:
    """``transformers.KIND.from_pretrained(source)``, from a folder, the local cache of the hub, or the hub itself."""
    if not isinstance(source, str) or not source:
        raise InputError(f"pretrained is {source!r}; it must be a folder or a name on the Hugging Face hub")
    library = transformers("pretrained models")
    path = Path(source).expanduser()
    folder, reason = path.is_dir(), ""
    if folder and not (path / "config.json").is_file():
        raise InputError(f"pretrained is {source!r}, a folder without config.json; make it with save_pretrained")
    if not folder and (path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1):
        raise InputError(f"pretrained is {source!r}, which does not exist; it must be a folder or a name on the hub")
    for local in [True] if folder else [True, False]:  # what was fetched before is used without a request
        if not local:
            _require_reachable(source)
        elif kind.startswith("AutoModel"):  # else adapters are looked for on the hub all the same
            options["adapter_kwargs"] = {"local_files_only": True}
        try:
            with quiet(library):
                return getattr(library, kind).from_pretrained(
                    str(path) if folder else source, local_files_only=local, trust_remote_code=False, **options
                )
        except Exception as error:  # transformers, its readers and the network raise many types
            reason = first_line(error)
            options.pop("adapter_kwargs", None)
    what = "tokenizer" if kind == "AutoTokenizer" else "model"
    raise InputError(
        f"pretrained is {source!r}, from which no {what} can be loaded ({reason}); give a folder or a name of the hub that "
        "has one"
    )


def loaded_network(kind: str, source: str, **options: Any) -> Any:
    """A network in training mode, all of whose tensors come from ``source`` but those of a classifier and of a pooler."""
    options = {**options, "dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    network, report = loaded(kind, source, **options)
    of_the_body = "" if kind == "AutoModel" else f"{network.base_model_prefix}."
    for name in sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        if kind == "AutoModelForCausalLM" or (name.startswith(of_the_body) and "pooler." not in name):
            raise InputError(
                f"pretrained is {source!r}, whose weights lack the tensor {name} or have it in another shape; "
                "give weights of this architecture"
            )
    return network.train()


def _require_reachable(name: str) -> None:
    """Fail fast if the hub cannot be reached: loading would retry for most of a minute."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except Exception as error:  # network errors of any kind
        raise InputError(
            f"pretrained is {name!r}, which is neither here nor could be fetched from the Hugging Face hub "
            f"({first_line(error)}); give a folder or a file with the weights"
        ) from None


def freeze_but(encoder: nn.Module, trainable: str, lora_rank: int = 0) -> None:
    """Leave the part of the encoder that is called ``trainable`` to be trained, and freeze the rest of it.

    >>> encoder = nn.Linear(2, 3)
    >>> freeze_but(encoder, "biases")
    >>> encoder.weight.requires_grad, encoder.bias.requires_grad
    (False, True)

    What is frozen already, such as fixed position embeddings, stays so.
    """
    require_one_of("trainable", trainable, PARTS)
    if lora_rank and trainable != "all":
        raise InputError(f"trainable is {trainable!r} and lora_rank is {lora_rank}; with LoRA leave trainable out")
    for name, parameter in encoder.named_parameters():
        if trainable == "head" or (trainable == "biases" and not name.endswith("bias")):
            parameter.requires_grad_(False)
    if trainable == "biases" and not any(parameter.requires_grad for parameter in encoder.parameters()):
        raise InputError("trainable is 'biases', but the encoder has none; use 'head', 'all', or adapters (lora_rank)")


def partly_trained(encoder: Any, trainable: str, rank: int, alpha: float | None, targets: str | Sequence[str]) -> Any:
    """The encoder with adapters, or with the rest of it frozen."""
    freeze_but(encoder, trainable, rank)
    return adapted(encoder, rank, alpha, targets)


def new_head(width: int, num_classes: int) -> nn.Linear:
    """A classifier, N(0, 0.02²) with bias 0."""
    head = nn.Linear(width, num_classes)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head
