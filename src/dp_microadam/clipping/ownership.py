"""The proof, before the first step, that every row belongs to one example and that every gradient is accounted for.

Formal guarantees: after :func:`prove` has returned, on synthetic input of the batch's shape,

- changing one example left every other example's loss as it was, so no layer, loss or statistic mixes examples, and no
  buffer stores what it saw;
- the loss of one example alone had an output gradient in its own row of every observed layer and in no other row, so
  row i of what a layer reports is the gradient of example i;
- the unclipped sum that the engine forms equals the gradient that autograd computes, for every trainable parameter,
  so no parameter is used outside the layer calls that are observed.

Clipping rows then bounds what adding or removing one example changes. A model that decides by its input's values to mix
examples on some inputs only is outside this proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.batches import batch_size, rows_of, synthetic, with_another_example
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Recording
from dp_microadam.clipping.rule import LayerCall, LayerRule
from dp_microadam.clipping.undisturbed import Rewind, undisturbed
from dp_microadam.errors import InputError

PerExampleLoss = Callable[[nn.Module, Any], Tensor]

_FEWEST = 4

# A block may be skipped at random in training (stochastic depth): a layer counts as unused after this many passes.
_PASSES_TO_BE_SEEN = 16


def losses_of(model: nn.Module, per_example_loss: PerExampleLoss, batch: Any) -> Tensor:
    """The loss of each example, refused unless it is one value per example."""
    count = batch_size(batch)
    losses = per_example_loss(model, batch)
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(
            f"per_example_loss returned {what} for a batch of {count}; it must return one value per example, shape "
            f"({count},), for instance with reduction='none' and a mean over everything but the batch"
        )
    return losses


def prove(
    model: nn.Module, per_example_loss: PerExampleLoss, rules: Mapping[str, LayerRule], batch: Any, given: Any = None
) -> None:
    """Raise :class:`InputError` unless examples are independent and every trainable parameter is observed.

    Runs on synthetic examples of the batch's shape, or on those ``given``; leaves random streams and buffers as they
    were.
    """
    examples = synthetic(batch, max(_FEWEST, batch_size(batch)), seed=0) if given is None else given
    count = batch_size(examples)
    if count < _FEWEST:
        raise InputError(f"synthetic_batch holds {count} examples; it must hold at least {_FEWEST}")
    proof = _Proof(model, per_example_loss, rules)
    row = (count // 2 - 1) | 1  # odd, so that it differs from the row before it, and with neighbours on both sides
    with undisturbed(model) as rewind:
        proof.examples_do_not_mix(examples, row, rewind)
        proof.every_parameter_is_seen(examples, rewind)
        proof.rows_are_owned(examples, row, rewind)
        # A different batch size: what has one row per example by coincidence in one run has not in the other.
        proof.sums_are_gradients(rows_of(examples, _FEWEST - 1), rewind)


class _Proof:
    def __init__(self, model: nn.Module, per_example_loss: PerExampleLoss, rules: Mapping[str, LayerRule]) -> None:
        self._model = model
        self._loss = per_example_loss
        self._rules = rules

    def examples_do_not_mix(self, batch: Any, row: int, rewind: Rewind) -> None:
        """Change one example: the other losses stay, and so does every buffer."""
        results = []
        for version in (batch, with_another_example(batch, row)):
            rewind(0)
            with torch.no_grad():
                losses = losses_of(self._model, self._loss, version)
            if not bool(torch.isfinite(losses).all()):
                raise InputError(
                    "per_example_loss is not finite on synthetic examples (uniform in [0, 1), whole numbers 0 or "
                    "1), so that independence cannot be proved; pass synthetic_batch= with examples the model accepts"
                )
            results.append((losses, {name: buffer.clone() for name, buffer in self._model.named_buffers()}))
        (before, buffers), (after, other_buffers) = results
        others = torch.arange(len(before), device=before.device) != row
        tolerance = 1e-5 * float(before.abs().max())
        if bool(((before - after)[others].abs() > tolerance).any()):
            raise InputError(
                "per_example_loss mixes examples: changing one example of a batch changed the loss of others; "
                "remove batch statistics and losses between examples (use GroupNorm or LayerNorm, and a loss of "
                "each example alone)"
            )
        for name, buffer in buffers.items():
            if not torch.equal(buffer, other_buffers[name]):
                raise InputError(
                    f"buffer {name!r} stores what the examples of a batch contain, without noise; use a layer that "
                    "keeps no statistics, or call its eval()"
                )

    def every_parameter_is_seen(self, batch: Any, rewind: Rewind) -> None:
        seen: set[str] = set()
        for seed in range(_PASSES_TO_BE_SEEN):
            rewind(seed)
            with Recording(self._rules, batch_size(batch), _ignore) as recording:
                losses_of(self._model, self._loss, batch)
            seen |= recording.seen
            if len(seen) == len(self._rules):
                return
        name = next(name for name in self._rules if name not in seen)
        rule = self._rules[name]
        parameter = f"{name}.{rule.trainable[0]}" if name else rule.trainable[0]
        raise InputError(
            f"parameter {parameter!r} is trainable, but its module was never called; call the module itself (not "
            "its weight through a function), or freeze it with requires_grad_(False)"
        )

    def rows_are_owned(self, batch: Any, row: int, rewind: Rewind) -> None:
        def check(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
            others = torch.arange(len(gradient), device=gradient.device) != row
            if bool((gradient[others] != 0).any()):
                raise InputError(
                    f"layer {rule.name!r} ({type(rule.module).__name__}) mixes examples: the loss of one example has a "
                    "gradient in rows of others; its first dimension must be the batch, and no operation after it may "
                    "combine examples"
                )

        rewind(0)
        with Recording(self._rules, batch_size(batch), check) as recording:
            losses = self._differentiable(losses_of(self._model, self._loss, batch))
            one = torch.zeros_like(losses)
            one[row] = 1
            recording.backward(losses, one)

    def sums_are_gradients(self, batch: Any, rewind: Rewind) -> None:
        sums: dict[str, Tensor] = {}

        def unclipped(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
            with torch.no_grad(), full_precision(gradient.device):
                ones = torch.ones_like(call.squared_norms(gradient))
                for key, total in call.clipped_sums(ones).items():
                    sums[f"{rule.name}.{key}" if rule.name else key] = total

        rewind(0)
        with Recording(self._rules, batch_size(batch), unclipped) as recording:
            losses = self._differentiable(losses_of(self._model, self._loss, batch))
            recording.backward(losses, torch.ones_like(losses))
        rewind(0)
        trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        total_loss = losses_of(self._model, self._loss, batch).sum()
        gradients = torch.autograd.grad(total_loss, list(trainable.values()), allow_unused=True)
        expected = dict(zip(trainable, gradients, strict=True))
        scale = sum(float(g.float().square().sum()) for g in gradients if g is not None) ** 0.5
        rounding = 100 * torch.finfo(losses.dtype).eps * float(losses.detach().abs().sum())
        for name, parameter in trainable.items():
            reference = expected[name]
            reference = torch.zeros_like(parameter) if reference is None else reference
            found = sums.get(name, torch.zeros_like(parameter))
            error = float((found.to(reference.dtype) - reference).float().norm())
            if not error <= 1e-2 * float(reference.float().norm()) + 1e-4 * scale + rounding:
                raise InputError(
                    f"parameter {name!r} is used outside the call of its own layer (tied to another layer, or "
                    "passed to a function), so its gradient would be clipped in part only; give each use a layer of "
                    "its own, or freeze it with requires_grad_(False)"
                )

    def _differentiable(self, losses: Tensor) -> Tensor:
        if not losses.requires_grad:
            raise InputError(
                "per_example_loss does not depend on any trainable parameter; check that it calls the model it is "
                "given and neither detaches nor disables gradients"
            )
        return losses


def _ignore(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
    """A forward pass without a backward one."""
