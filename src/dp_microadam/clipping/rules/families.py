"""Assigns a clipping rule to each module, and refuses unsupported modules before anything runs."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dp_microadam.clipping.recording import Observed, RowTable
from dp_microadam.clipping.rules.convolution import ConvolutionRule, TransposedConvolutionRule
from dp_microadam.clipping.rules.embedding import EmbeddingBagRule, EmbeddingRule
from dp_microadam.clipping.rules.linear import LinearRule, TransposedLinearRule
from dp_microadam.clipping.rules.normalization import ChannelNormalizationRule, FeatureNormalizationRule
from dp_microadam.clipping.rules.rule import LayerRule
from dp_microadam.clipping.rules.weight_standardized import WeightStandardizedRule
from dp_microadam.errors import InputError
from dp_microadam.layers.batchnorm import is_batchnorm
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

_RULES: dict[type[nn.Module], type[LayerRule]] = {
    WeightStandardizedConv2d: WeightStandardizedRule,
    nn.Linear: LinearRule,
    nn.Conv1d: ConvolutionRule,
    nn.Conv2d: ConvolutionRule,
    nn.Conv3d: ConvolutionRule,
    nn.ConvTranspose1d: TransposedConvolutionRule,
    nn.ConvTranspose2d: TransposedConvolutionRule,
    nn.ConvTranspose3d: TransposedConvolutionRule,
    nn.GroupNorm: ChannelNormalizationRule,
    nn.InstanceNorm1d: ChannelNormalizationRule,
    nn.InstanceNorm2d: ChannelNormalizationRule,
    nn.InstanceNorm3d: ChannelNormalizationRule,
    _BatchNorm: ChannelNormalizationRule,  # with fixed statistics; others are refused below
    nn.LayerNorm: FeatureNormalizationRule,
    nn.RMSNorm: FeatureNormalizationRule,
    nn.Embedding: EmbeddingRule,
    nn.EmbeddingBag: EmbeddingBagRule,
}


_REGISTERED: dict[type[nn.Module], type[LayerRule]] = {}


def register_rule(family: type[nn.Module], rule: type[LayerRule]) -> None:
    """Use ``rule`` to clip layers of type ``family`` in every :class:`ClippedGradients` created from now on.

    A layer without a rule is clipped exactly too, but its forward pass is repeated for each example. A registered rule takes
    precedence over the built-in ones. It applies to modules that have the family's own ``forward`` and only parameters named
    in the rule's ``parameter_names``. A wrong rule is refused before the first step: on synthetic examples its norms and sums
    must equal those of autograd. ``examples/custom_layer.py`` shows a rule.

    Raises:
        InputError: if ``family`` is not a subclass of ``torch.nn.Module``, or ``rule`` not one of ``LayerRule``.
    """
    if not (isinstance(family, type) and issubclass(family, nn.Module)):
        raise InputError(f"family is {family!r}; it must be a subclass of torch.nn.Module")
    if not (isinstance(rule, type) and issubclass(rule, LayerRule)):
        raise InputError(f"rule is {rule!r}; it must be a subclass of LayerRule")
    _REGISTERED[family] = rule


def rule_class(module: nn.Module) -> type[LayerRule] | None:
    """The rule of the module's family, or None; a subclass with a forward of its own has none."""
    known = {**_RULES, **_rules_of_transformers()}
    for family, rule in {**_REGISTERED, **{key: rule for key, rule in known.items() if key not in _REGISTERED}}.items():
        same_forward = isinstance(module, family) and type(module).forward is family.forward
        # Weight norm, pruning and parametrizations compute the weight from parameters with other names.
        if same_forward and {name for name, _ in module.named_parameters()} <= rule.parameter_names:
            return rule
    return None


def _rules_of_transformers() -> dict[type[nn.Module], type[LayerRule]]:
    """Rules of layers that ``transformers`` has of its own; a model that holds one has imported it."""
    layers = sys.modules.get("transformers.pytorch_utils")
    return {} if layers is None else {layers.Conv1D: TransposedLinearRule}


def observe(model: nn.Module, strategy: str | None) -> Observed:
    """What is to be observed of a model: rules of layers, and every trainable parameter with the modules that hold it."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    holders: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in parameters}
    rules: dict[str, LayerRule] = {}
    recurrent = []
    for name, module in model.named_modules():
        own = {key: name_of[id(p)] for key, p in module._parameters.items() if p is not None and id(p) in name_of}
        for key, full_name in own.items():
            holders[full_name].append((module, key))
        family = rule_class(module)
        if own and family is not None:
            rules[name] = family(name, module, tuple(own), strategy)
            rules[name].full_names = own
        if own and isinstance(module, nn.RNNBase):
            recurrent.append(module)
    return Observed(rules, parameters, holders, recurrent, strategy, RowTable(), {})


def refuse_unsupported(model: nn.Module) -> None:
    """Raise :class:`InputError` for modules whose operations cannot be observed, by name, with what to do instead."""
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "model"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{what} is a TorchScript module, whose operations cannot be observed; pass the nn.Module that "
                "torch.jit.script or torch.jit.trace was given, and compile it after training"
            )
        if type(module).__name__ == "TrainableTokensLayer" and any(p.requires_grad for p in module.parameters()):
            raise InputError(
                f"{what} trains single rows of a table (trainable_token_indices of peft), which cannot be clipped; leave "
                "trainable_token_indices out, or train the whole table with modules_to_save"
            )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise :class:`InputError` for layers that mix examples, or store statistics of them, in the model's current mode."""
    for name, module in model.named_modules():
        if is_batchnorm(module):
            if module.training or module.running_mean is None:
                raise InputError(
                    f"module {name!r} is {type(module).__name__}, which mixes the examples of a batch; use "
                    "dp_microadam.replace_batchnorm(model), which puts GroupNorm in its place, or call its "
                    "eval(), if its running statistics are of public data"
                )
        elif isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise InputError(
                f"module {name!r} is {type(module).__name__} with track_running_stats=True, which stores statistics of "
                "private examples without noise; build it with track_running_stats=False"
            )
