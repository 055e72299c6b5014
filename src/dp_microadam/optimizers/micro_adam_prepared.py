"""The table of addresses that MicroAdam's kernel takes, kept from one step to the next.

Checking a parameter and its state from scratch and entering them into the table takes longer than the kernel takes for a small
one. A :class:`PreparedGroup` is made after such a step. Later steps compare all that its addresses rest on with what it was,
and go through all checks again where anything differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dp_microadam.optimizers.bias import scales
from dp_microadam.optimizers.micro_adam_checks import is_plain, version_of
from dp_microadam.optimizers.micro_adam_fused import gradients_within, table_row, update_rows
from dp_microadam.optimizers.micro_adam_state import StateFormat
from dp_microadam.optimizers.quantization import derive_key
from dp_microadam.optimizers.tensor_moment import averaged

_PLAIN_TYPES = (torch.nn.Parameter, Tensor)
_CPU = torch.device("cpu")


class _Entry(NamedTuple):
    """A tensor of a state, and what it was."""

    name: str
    tensor: Tensor
    address: int
    shape: torch.Size
    dtype: torch.dtype


class _Known(NamedTuple):
    """A parameter with a gradient, and what it was."""

    param: Tensor
    address: int
    shape: torch.Size
    state: dict[str, Any]
    entries: tuple[_Entry, ...]
    indices: Tensor
    version: int


class PreparedGroup:
    """The parameters of a group that have gradients, all of them plain float32 on the CPU, as a table for the kernel.

    Guarantees: if :meth:`unchanged` is true, every address of the table is that of a tensor with the dtype, size and memory
    layout that it had when it was last checked, and the kernel touches no other memory.
    """

    def __init__(self, group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> None:
        self.form = form = StateFormat.of(group)
        self.params: list[Tensor] = list(group["params"])
        self.known = [
            _known(param, states[param]) if param.grad is not None and param.numel() > 0 else None for param in self.params
        ]
        present = [known for known in self.known if known is not None]
        self.gradients: list[Tensor] = [known.param.grad for known in present]  # type: ignore[misc]
        layouts = [form.layout(known.param.numel()) for known in present]
        self.rows = np.array(
            [
                table_row(known.param, gradient, known.state, layout, 0)
                for known, gradient, layout in zip(present, self.gradients, layouts, strict=True)
            ],
            dtype=np.int64,
        )
        self.steps = np.array([known.state["step"].data_ptr() for known in present], dtype=np.int64)
        self.seconds = [known.state["second_moment"] for known in present if "second_moment" in known.state]
        self.keys = [int(known.state["rounding_key"]) if "rounding_key" in known.state else None for known in present]

    def unchanged(self, group: dict[str, Any], form: StateFormat, states: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether the table still holds, except for the addresses of gradients, which this enters. Runs in every step."""
        params, known = group["params"], self.known
        if group["fused"] is False or form != self.form or len(params) != len(known):
            return False
        gradients = []
        for param, before, seen in zip(params, self.params, known, strict=True):
            given = param.grad
            if param is not before:
                return False
            if seen is None:
                if given is not None and param.numel() > 0:
                    return False
                continue
            if given is None or states.get(param) is not seen.state or len(seen.state) != len(seen.entries):
                return False
            if not (_usable(param, seen.shape) and _usable(given, seen.shape) and param.data_ptr() == seen.address):
                return False
            for name, tensor, address, shape, dtype in seen.entries:
                if (
                    seen.state.get(name) is not tensor
                    or tensor.data_ptr() != address
                    or tensor.shape != shape
                    or tensor.dtype is not dtype
                    or not tensor.is_contiguous()
                ):
                    return False
            if version_of(seen.indices) != seen.version:
                return False
            gradients.append(given)
        self.gradients = gradients
        self.rows[:, 1] = [given.data_ptr() for given in gradients]
        return True

    def gradients_within(self, limit: float) -> bool:
        """Whether all gradients are finite and of magnitude at most ``limit``."""
        return gradients_within(self.rows, limit)

    def run(self, group: dict[str, Any]) -> None:
        """Update every parameter."""
        from dp_microadam.optimizers.micro_adam_kernel import KEY, STEP, advance

        steps = advance(self.steps)
        self.rows[:, STEP] = steps
        factors = self._factors(steps.tolist(), group)
        for number, (step, key) in enumerate(zip(steps.tolist(), self.keys, strict=True)):
            if key is not None:
                self.rows[number, KEY] = derive_key(key, step)
        update_rows(
            self.rows.copy(),
            np.array(factors, dtype=np.float32),
            group,
            1 - float(group["lr"]) * group["weight_decay"],
            [self, *self.gradients],
        )

    def _factors(self, steps: list[int], group: dict[str, Any]) -> list[list[float]]:
        """The scales of each parameter; those with one second moment for the tensor have it brought up to date."""
        if not self.seconds:
            by_step = {step: scales(step, group, None) for step in set(steps)}
            return [by_step[step] for step in steps]
        moments = averaged(self.gradients, self.seconds, group["betas"][1])
        torch._foreach_copy_(self.seconds, list(torch.tensor(moments).split(1)))
        return [scales(step, group, moment) for step, moment in zip(steps, moments, strict=True)]


def prepare(group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> PreparedGroup | None:
    """The table of a group all of whose parameters the kernel has just updated; None if some of them need more than that."""
    present = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
    for param in present:
        tensors = states[param].values()
        if not (_usable(param, param.shape) and _usable(param.grad, param.shape)):
            return None
        if any(type(tensor) is not Tensor or tensor.device != _CPU for tensor in tensors):
            return None
        if version_of(states[param]["indices"]) < 0:  # created in inference mode: changes would not be noticed
            return None
    return PreparedGroup(group, states) if present else None


def _known(param: Tensor, state: dict[str, Any]) -> _Known:
    entries = tuple(_Entry(name, value, value.data_ptr(), value.shape, value.dtype) for name, value in state.items())
    return _Known(param, param.data_ptr(), param.shape, state, entries, state["indices"], version_of(state["indices"]))


def _usable(tensor: Tensor, shape: torch.Size) -> bool:
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.shape == shape
        and is_plain(tensor)
        and tensor.data_ptr() != 0
    )
