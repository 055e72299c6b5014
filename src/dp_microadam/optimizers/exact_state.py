"""What our optimizers share: a state that survives saving to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """What ``closure`` returns, evaluated with gradients on; ``None`` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class ExactStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``load_state_dict`` restores every tensor as it was saved.

    The base class casts state tensors to their parameter's dtype, which turns packed codes, indices and keys into floats.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state exactly, dtypes included, and without sharing memory with ``state_dict``.

        The originals take the place of the base class' casts after the hooks that prepare a state dict and before those that
        follow its loading.
        """
        prepared: dict[str, Any] = {}

        def look_at(_: Any, given: dict[str, Any]) -> None:
            self._refuse_to_load(given)
            prepared.update(given)

        take = self.register_load_state_dict_pre_hook(look_at)
        put = self.register_load_state_dict_post_hook(lambda _: self._restore(prepared), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            take.remove()
            put.remove()

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        """Raise if a state dict, as hooks have prepared it, is not one that this optimizer can go on from."""

    def _restore(self, saved: dict[str, Any]) -> None:
        names = [name for group in saved["param_groups"] for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for name, param in zip(names, params, strict=True):
            if name in saved["state"]:
                self.state[param] = {
                    # Scalars stay on the CPU, where the loop reads them.
                    key: value.to(param.device if value.dim() else "cpu", copy=True).contiguous()
                    for key, value in saved["state"][name].items()
                }
