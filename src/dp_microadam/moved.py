"""Modules that had another name in version 0.1: the old names work, with a DeprecationWarning, until the next release."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NEW_NAMES = {
    "dp_microadam.cli": "dp_microadam.apps.command_line.cli",
    "dp_microadam.commands": "dp_microadam.apps.command_line.commands",
    "dp_microadam.recipes": "dp_microadam.apps.recipes",
    "dp_microadam.reporting": "dp_microadam.apps.reporting",
    "dp_microadam.audit": "dp_microadam.apps.audit",
    "dp_microadam.experiments": "dp_microadam.apps.experiments",
    "dp_microadam.theory": "dp_microadam.apps.theory",
    "dp_microadam.training.procedure": "dp_microadam.training.deprecated",
}


class _MovedModules(MetaPathFinder, Loader):
    """Answers an import of an old name with the module of the new one."""

    def __init__(self) -> None:
        self._own_specs: dict[ModuleType, ModuleSpec | None] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _new_name(fullname) is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = str(_new_name(spec.name))
        warnings.warn(f"{spec.name} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._own_specs[module] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its own name, and keeps it: the import system has just given it the old one."""
        module.__spec__ = self._own_specs.pop(module)


def _new_name(old: str) -> str | None:
    for before, after in _NEW_NAMES.items():
        if old == before or old.startswith(f"{before}."):
            return after + old.removeprefix(before)
    return None


def answer_old_names() -> None:
    """Let imports of old names find the new ones; first of all finders, or submodules would be loaded a second time."""
    sys.meta_path.insert(0, _MovedModules())
