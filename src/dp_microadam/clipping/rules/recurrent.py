"""Unfused LSTM, GRU and plain recurrent layers, which run step by step.

The fused kernels hide gates and steps. While a model is recorded its recurrent layers run as the sums and
products they consist of: one linear map over the whole sequence for the input, one per step for the state. Each is then
clipped like a linear layer, with the steps as positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.errors import InputError

State = tuple[Tensor, ...]


@contextmanager
def step_by_step(modules: Sequence[nn.RNNBase]) -> Iterator[None]:
    """Context manager in which these modules run as :func:`forward`."""
    try:
        for module in modules:
            module.forward = forward.__get__(module)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def forward(module: nn.RNNBase, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
    """The result of ``module.forward``, for tensors with a batch dimension."""
    if not isinstance(input, Tensor) or input.dim() != 3:
        what = f"a tensor of {input.dim()} dimensions" if isinstance(input, Tensor) else type(input).__name__
        raise InputError(
            f"{type(module).__name__} was given {what}; pass one tensor with a batch dimension, of sequences that are "
            "padded to a length which does not depend on the batch, and take each one's output at its own last step"
        )
    steps = input if module.batch_first else input.transpose(0, 1)
    initial = _initial_state(module, steps, hx)
    directions = 2 if module.bidirectional else 1
    final: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            own = tuple(part[layer * directions + direction] for part in initial)
            output, last = _one_direction(module, steps, own, f"l{layer}" + ("_reverse" if direction else ""))
            outputs.append(output)
            final.append(last)
        steps = torch.cat(outputs, 2) if directions > 1 else outputs[0]
        if module.dropout and layer < module.num_layers - 1:
            steps = F.dropout(steps, module.dropout, module.training)
    state = tuple(torch.stack(parts) for parts in zip(*final, strict=True))
    output = steps if module.batch_first else steps.transpose(0, 1)
    return output, state if isinstance(module, nn.LSTM) else state[0]


def _initial_state(module: nn.RNNBase, steps: Tensor, hx: Any) -> State:
    if hx is not None:
        return tuple(hx) if isinstance(module, nn.LSTM) else (hx,)
    layers = module.num_layers * (2 if module.bidirectional else 1)
    hidden = steps.new_zeros(layers, len(steps), module.proj_size or module.hidden_size)
    if not isinstance(module, nn.LSTM):
        return (hidden,)
    return hidden, steps.new_zeros(layers, len(steps), module.hidden_size)


def _one_direction(module: nn.RNNBase, steps: Tensor, state: State, suffix: str) -> tuple[Tensor, State]:
    def parameter(name: str) -> Any:
        return getattr(module, f"{name}_{suffix}", None)

    from_input = F.linear(steps, parameter("weight_ih"), parameter("bias_ih"))
    order = range(steps.shape[1])
    outputs: dict[int, Tensor] = {}
    for t in reversed(order) if suffix.endswith("reverse") else order:
        from_state = F.linear(state[0], parameter("weight_hh"), parameter("bias_hh"))
        state = _cell(module)(from_input[:, t], from_state, state)
        if module.proj_size:
            state = (F.linear(state[0], parameter("weight_hr")), *state[1:])
        outputs[t] = state[0]
    return torch.stack([outputs[t] for t in order], 1), state


def _cell(module: nn.RNNBase) -> Callable[[Tensor, Tensor, State], State]:
    if isinstance(module, nn.LSTM):
        return _lstm_cell
    if isinstance(module, nn.GRU):
        return _gru_cell
    activation = torch.relu if module.mode == "RNN_RELU" else torch.tanh
    return lambda from_input, from_state, state: (activation(from_input + from_state),)


def _lstm_cell(from_input: Tensor, from_state: Tensor, state: State) -> State:
    admit, forget, candidate, show = (from_input + from_state).chunk(4, 1)
    memory = forget.sigmoid() * state[1] + admit.sigmoid() * candidate.tanh()
    return show.sigmoid() * memory.tanh(), memory


def _gru_cell(from_input: Tensor, from_state: Tensor, state: State) -> State:
    reset_in, update_in, new_in = from_input.chunk(3, 1)
    reset_state, update_state, new_state = from_state.chunk(3, 1)
    new = torch.tanh(new_in + (reset_in + reset_state).sigmoid() * new_state)
    update = (update_in + update_state).sigmoid()
    return (new + update * (state[0] - new),)
