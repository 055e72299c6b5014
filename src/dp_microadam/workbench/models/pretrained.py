"""Loads pretrained weights of vision transformers from a file, a folder, or the Hugging Face hub."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.workbench.models import timm_weights
from dp_microadam.workbench.models.normalization import Normalization
from dp_microadam.workbench.models.timm_weights import first_line
from dp_microadam.workbench.models.transformer_size import TransformerSize

if TYPE_CHECKING:
    from transformers import ViTConfig

_HUB_TIMEOUT = 10.0
_HUB_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_FILE_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")


class PretrainedWeights(NamedTuple):
    """Content of a checkpoint: encoder state dict, classifier state dict if there is one, and configuration."""

    config: ViTConfig
    encoder: dict[str, Tensor]
    head: dict[str, Tensor] | None
    normalization: Normalization


def transformers(who: str = "vision transformers") -> ModuleType:
    """The package ``transformers``, imported on first use because that takes seconds; ``who`` needs it."""
    try:
        import transformers
    except ImportError:
        raise InputError(
            f"{who} need the package transformers, which is not installed; run pip install 'dp-microadam[transformers]'"
        ) from None
    return transformers


def config_of(size: TransformerSize, patch_size: int, resolution: int) -> ViTConfig:
    """Configuration of an encoder of this size, with the LayerNorm ε of timm and the original code."""
    return transformers().ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        patch_size=patch_size,
        image_size=resolution,
        layer_norm_eps=timm_weights.LAYER_NORM_EPS,
    )


def pretrained_weights(
    source: str, family: str, size: TransformerSize, patch_size: int, normalization: Normalization
) -> PretrainedWeights:
    """Load the weights at ``source``, and check that they are finite and belong to an encoder of this size.

    ``normalization`` is the default of the model family; a ``preprocessor_config.json`` at ``source`` takes precedence.

    Raises:
        InputError: if there are no weights at ``source``, or they cannot be used.
    """
    weights = _find(source, family, size, patch_size, normalization)
    for name, value in (*weights.encoder.items(), *(weights.head or {}).items()):
        if not bool(torch.isfinite(value).all()):
            raise InputError(
                f"pretrained is {source!r}, whose tensor {name} is not finite; the weights are damaged, fetch them again"
            )
    return weights


def _find(source: str, family: str, size: TransformerSize, patch_size: int, normalization: Normalization) -> PretrainedWeights:
    path = Path(source)
    if path.is_file():
        encoder, head = timm_weights.encoder_and_head(timm_weights.read_tensors(path), path, size, patch_size)
        patches = encoder["embeddings.position_embeddings"].shape[1] - 1
        config = config_of(size, patch_size, patch_size * math.isqrt(patches))
        return PretrainedWeights(config, encoder, head, normalization)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"pretrained is {source!r}, a folder without config.json; make it with save_pretrained")
        return _from_transformers(source, family, size, patch_size, normalization, local_files_only=True)
    if path.suffix in _FILE_ENDINGS or path.is_absolute() or source.count("/") != 1:
        raise InputError(
            f"pretrained is {source!r}, which does not exist; it must be a file, a folder, or a name on the Hugging Face "
            "hub such as 'facebook/deit-tiny-patch16-224'"
        )
    fetched = is_fetched(source)
    if not fetched:
        require_reachable(source)
    return _from_transformers(source, family, size, patch_size, normalization, local_files_only=fetched)


def is_fetched(name: str) -> bool:
    """Whether the files are in the local cache of the Hugging Face hub; they are then used without a request."""
    transformers()  # for its message: the hub's package comes with it
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config, *weights = (isinstance(try_to_load_from_cache(name, file), str) for file in _HUB_FILES)
    except HFValidationError:
        return False
    return config and any(weights)


def require_reachable(name: str) -> None:
    """Fail fast if the hub cannot be reached: loading would retry for most of a minute."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except Exception as error:  # network errors of any kind
        raise InputError(
            f"pretrained is {name!r}, which is neither here nor could be fetched from the Hugging Face hub "
            f"({first_line(error)}); give a folder or a file with the weights"
        ) from None


def _from_transformers(
    source: str, family: str, size: TransformerSize, patch_size: int, normalization: Normalization, **where: bool
) -> PretrainedWeights:
    library = transformers()
    try:
        found, _ = library.ViTConfig.get_config_dict(source, **where)
        _require_config(source, found, family, size, patch_size)
        with quiet(library):
            options = {"ignore_mismatched_sizes": True, "output_loading_info": True, "trust_remote_code": False, **where}
            model, report = library.ViTForImageClassification.from_pretrained(source, dtype=torch.float32, **options)
    except InputError:
        raise
    except Exception as error:  # transformers, its readers and the network raise many types
        raise InputError(
            f"pretrained is {source!r}, which cannot be loaded ({first_line(error)}); check the name, or give a file"
        ) from None
    _require_complete(source, report)
    has_head = "classifier.weight" not in report["missing_keys"]
    head = model.classifier.state_dict() if has_head else None
    return PretrainedWeights(model.config, model.vit.state_dict(), head, _normalization_at(source, normalization, **where))


def _require_complete(source: str, report: dict[str, Any]) -> None:
    """Raise InputError unless all tensors were loaded; only the classifier may be missing, and only a pooler be unused."""
    for name, found, wanted in report["mismatched_keys"]:
        raise InputError(
            f"pretrained is {source!r}, whose tensor {name} has shape {tuple(found)}; its configuration says "
            f"{tuple(wanted)}, fetch both again"
        )
    for name in sorted(set(report["missing_keys"]) - {"classifier.weight", "classifier.bias"}):
        raise InputError(f"pretrained is {source!r}, whose weights lack the tensor {name}; give those of a complete ViT")
    for name in sorted(report["unexpected_keys"]):
        if "pooler." not in name:
            raise InputError(
                f"pretrained is {source!r}, whose weights hold {name}; an image ViT has no such tensor, give the weights of one"
            )


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


def _require_config(source: str, found: dict[str, Any], family: str, size: TransformerSize, patch_size: int) -> None:
    if found.get("model_type") == "deit":
        raise InputError(
            f"pretrained is {source!r}, a distilled DeiT with two classifiers; give the weights trained without "
            "distillation, such as 'facebook/deit-tiny-patch16-224'"
        )
    if found.get("model_type") != "vit":
        hint = "; of timm's repositories, download model.safetensors and give that file" if "architecture" in found else ""
        raise InputError(f"pretrained is {source!r}, a model of type {found.get('model_type')!r}; it must be 'vit'{hint}")
    wanted = {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "patch_size": patch_size,
    }
    config = transformers().ViTConfig.from_dict(found)
    for key, value in wanted.items():
        if getattr(config, key) != value:
            raise InputError(
                f"pretrained is {source!r}, whose {key} is {getattr(config, key)}; this {family} has {value}, choose "
                "the model that matches the weights"
            )


def _normalization_at(source: str, default: Normalization, **where: bool) -> Normalization:
    """The constants in ``preprocessor_config.json``, or ``default`` if it has none."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        found, _ = ImageProcessingMixin.get_image_processor_dict(source, **where)
    except OSError:
        return default
    if "image_mean" not in found and "image_std" not in found:
        return default
    constants = []
    for key in ("image_mean", "image_std"):
        try:
            values = tuple(map(float, found[key]))
        except (KeyError, TypeError, ValueError):
            values = ()
        if len(values) != 3 or not all(map(math.isfinite, values)) or (key == "image_std" and min(values) <= 0):
            raise InputError(
                f"pretrained is {source!r}, whose preprocessor_config.json gives {key} as {found.get(key)!r}; it must be "
                "three finite numbers, above 0 for image_std"
            )
        constants.append(values)
    return Normalization(*constants)
