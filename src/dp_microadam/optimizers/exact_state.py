"""Base class of our optimizers: options are checked, and ``load_state_dict`` restores the state bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dp_microadam.optimizers.shards import local_shard
from dp_microadam.validation import require_in_closed_open, require_non_negative, require_positive


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Call ``closure`` with gradients enabled and return its result; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class ExactStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``load_state_dict`` restores every tensor exactly as it was saved.

    torch's base class casts state tensors to the dtype of their parameter, which would turn packed codes, indices and keys
    into floats.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._validate({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _validate(self, options: dict[str, Any]) -> None:
        """Raise an InputError for an option that is out of range; those that several optimizers have are checked here."""
        require_non_negative("lr", float(options["lr"]))
        require_non_negative("weight_decay", options["weight_decay"])
        for name, beta in zip(("betas[0]", "betas[1]"), options.get("betas", ()), strict=False):
            require_in_closed_open(name, beta, 0.0, 1.0)
        if "beta" in options:
            require_in_closed_open("beta", options["beta"], 0.0, 1.0)
        if "eps" in options:
            require_positive("eps", options["eps"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state exactly, including dtypes, without sharing memory with ``state_dict``.

        Tensors that the base class has cast are replaced by the saved ones, after all pre-hooks and before any post-hook of
        ``load_state_dict``.
        """
        prepared: dict[str, Any] = {}

        def check_and_keep(_: Any, given: dict[str, Any]) -> None:
            self._refuse_to_load(given)
            prepared.update(given)

        before = self.register_load_state_dict_pre_hook(check_and_keep)
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(prepared), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def state_bytes(self) -> int:
        """Size of the optimizer state in this process, in bytes."""
        values = (local_shard(value) for state in self.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in values)

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        """Raise if this optimizer cannot continue from a state dict, as it is after all pre-hooks."""

    def _restore(self, saved: dict[str, Any]) -> None:
        names = [name for group in saved["param_groups"] for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for name, param in zip(names, params, strict=True):
            if name in saved["state"]:
                self.state[param] = {
                    # Scalars stay on the CPU, where step() reads them.
                    key: value.to(param.device if value.dim() else "cpu", copy=True).contiguous()
                    for key, value in saved["state"][name].items()
                }
