"""One observed forward and backward pass: parameters frozen, hooks in place, and everything put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dp_microadam.clipping.rule import LayerCall, LayerRule
from dp_microadam.errors import InputError

Arrival = Callable[[LayerRule, LayerCall, Tensor], None]


class _Source(torch.autograd.Function):
    """Makes the first observed output part of the graph, so that output gradients are computed although no parameter
    requires one; reports the gradient that arrives there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, report: Callable[[Tensor], None]) -> Tensor:
        ctx.report = report
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.report(gradient)
        return None, torch.zeros(()), None


class Recording:
    """Context in which a model's forward is observed; ``backward`` then delivers output gradients layer by layer.

    Within it no parameter requires a gradient, so the backward pass computes output gradients and nothing else. Hooks
    exist only within it: between two recordings the model can be saved, copied and evaluated like any other.
    """

    def __init__(self, rules: Mapping[str, LayerRule], batch_size: int, on_arrival: Arrival) -> None:
        self._rules = rules
        self._batch_size = batch_size
        self._on_arrival = on_arrival
        self._handles: list[RemovableHandle] = []
        self._installed: list[LayerRule] = []
        self._parameters: list[nn.Parameter] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._in_backward = False
        self.seen: set[str] = set()

    def __enter__(self) -> Recording:
        try:
            for rule in self._rules.values():
                rule.install()
                self._installed.append(rule)
                self._handles.append(rule.module.register_forward_hook(self._hook_for(rule), with_kwargs=True))
                for key in rule.trainable:
                    parameter = rule.module.get_parameter(key)
                    parameter.requires_grad_(False)
                    self._parameters.append(parameter)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        for rule in self._installed:
            rule.uninstall()
        for parameter in self._parameters:
            parameter.requires_grad_(True)

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        """Backpropagate Σ weights·losses; every observed layer's output gradient arrives on the way."""
        self._in_backward = True
        torch.autograd.grad(losses, [self._anchor], grad_outputs=weights, allow_unused=True)

    def _hook_for(self, rule: LayerRule) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
            if self._in_backward:  # a rule repeats the forward of its own module
                return None
            self._refuse_unusable(rule, output)
            self.seen.add(rule.name)
            call = rule.observe(args, kwargs, output)

            def arrived(gradient: Tensor) -> None:
                self._on_arrival(rule, call, gradient)

            if output.requires_grad:
                output.register_hook(arrived)
                return None
            return _Source.apply(output.detach(), self._anchor, arrived)

        return hook

    def _refuse_unusable(self, rule: LayerRule, output: Any) -> None:
        what = f"layer {rule.name!r} ({type(rule.module).__name__})"
        if rule.name in self.seen:
            raise InputError(
                f"{what} is used twice in one forward pass, which is not supported yet; use one layer per call, or "
                "freeze it with requires_grad_(False)"
            )
        if not isinstance(output, Tensor):
            raise InputError(
                f"{what} returns {type(output).__name__}, not a tensor; wrap it so that its parameters sit in "
                "layers that return one tensor, or freeze it with requires_grad_(False)"
            )
        if output.dim() == 0 or len(output) != self._batch_size:
            raise InputError(
                f"{what} returns shape {tuple(output.shape)} for a batch of {self._batch_size}; its first dimension "
                "must be the batch (for sequences use batch_first=True)"
            )
