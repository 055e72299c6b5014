"""Settings of steps and trainers given flat, sorted into their types, so that a test says in one line what it sets."""

from dataclasses import fields

import torch

from dp_microadam import PerformanceSettings, PrivacySettings, RecordSettings

_TYPES = {"privacy": PrivacySettings, "performance": PerformanceSettings, "record": RecordSettings}


def flat(**options):
    """Keyword arguments for a step or trainer; names that no type of settings has are passed on."""
    for name, kind in _TYPES.items():
        own = {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        if own:
            options[name] = kind(**own)
    return options


def idle(model):
    """An optimizer for steps whose gradients are only looked at."""
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
