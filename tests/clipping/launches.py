"""Counts what would be launched on a GPU."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self._names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in function._schema.returns)
        if not views and "empty" not in str(function) and "_unsafe_view" not in str(function):
            self._names[str(function)] += 1
        return function(*args, **(kwargs or {}))

    def total(self) -> int:
        return sum(count for name, count in self._names.items() if "rand" not in name)
