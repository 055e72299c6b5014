"""Which rule serves which module, and what is refused before anything runs."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from dp_microadam.clipping.batchnorm import is_batchnorm
from dp_microadam.clipping.convolution import ConvolutionRule
from dp_microadam.clipping.embedding import EmbeddingRule
from dp_microadam.clipping.generic import GenericRule
from dp_microadam.clipping.linear import LinearRule
from dp_microadam.clipping.normalization import ChannelNormalizationRule, FeatureNormalizationRule
from dp_microadam.clipping.rule import LayerRule
from dp_microadam.clipping.weight_standardized import WeightStandardizedRule
from dp_microadam.errors import InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

_RULES: dict[type[nn.Module], type[LayerRule]] = {
    WeightStandardizedConv2d: WeightStandardizedRule,
    nn.Linear: LinearRule,
    nn.Conv1d: ConvolutionRule,
    nn.Conv2d: ConvolutionRule,
    nn.Conv3d: ConvolutionRule,
    nn.GroupNorm: ChannelNormalizationRule,
    nn.InstanceNorm1d: ChannelNormalizationRule,
    nn.InstanceNorm2d: ChannelNormalizationRule,
    nn.InstanceNorm3d: ChannelNormalizationRule,
    nn.LayerNorm: FeatureNormalizationRule,
    nn.RMSNorm: FeatureNormalizationRule,
    nn.Embedding: EmbeddingRule,
}


def rule_class(module: nn.Module) -> type[LayerRule]:
    """The family's rule, if the module computes what the family computes: a subclass with its own forward may not."""
    for family, rule in _RULES.items():
        same_forward = isinstance(module, family) and type(module).forward is family.forward
        # Weight norm, pruning and parametrizations compute the weight from parameters with other names.
        if same_forward and {name for name, _ in module.named_parameters()} <= {"weight", "bias", "gain"}:
            return rule
    return GenericRule


def build_rules(model: nn.Module, way: str | None) -> dict[str, LayerRule]:
    """One rule per module that owns trainable parameters, by the module's name."""
    refuse_shared_parameters(model)
    rules = {}
    for name, module in model.named_modules():
        own = tuple(key for key, parameter in module.named_parameters(recurse=False) if parameter.requires_grad)
        if not own:
            continue
        if any(True for _ in module.children()):
            names = ", ".join(repr(f"{name}.{key}" if name else key) for key in own)
            raise InputError(
                f"module {name!r} ({type(module).__name__}) holds {names} beside layers of its own; move such "
                "parameters into a module without children, or freeze them with requires_grad_(False)"
            )
        rules[name] = rule_class(module)(name, module, own, way)
    return rules


def refuse_shared_parameters(model: nn.Module) -> None:
    """A parameter that two modules hold would have to be clipped over both of them together."""
    holders: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and holders.setdefault(id(parameter), name) != name:
            raise InputError(
                f"parameter {name!r} is the same as {holders[id(parameter)]!r}; give each layer a weight of its "
                "own, or freeze it with requires_grad_(False)"
            )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Layers whose forward mixes examples, or stores statistics of them, in the mode the model is in now."""
    for name, module in model.named_modules():
        if is_batchnorm(module):
            frozen = not any(parameter.requires_grad for parameter in module.parameters())
            if module.training or module.running_mean is None or not frozen:
                raise InputError(
                    f"module {name!r} is {type(module).__name__}, which mixes the examples of a batch; use "
                    "dp_microadam.replace_batchnorm(model), which puts GroupNorm in its place, or freeze it and "
                    "call its eval()"
                )
        elif isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise InputError(
                f"module {name!r} is {type(module).__name__} with track_running_stats=True, which stores statistics of "
                "private examples without noise; build it with track_running_stats=False"
            )
