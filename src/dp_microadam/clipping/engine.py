"""The exact sum of clipped per-example gradients from one forward and one backward pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.clipping.batches import PerExampleLoss, batch_size, detached, losses_of, require_weights, select, signature
from dp_microadam.clipping.checks.autograd import check_against_autograd
from dp_microadam.clipping.checks.examples import CHECK_SIZE, SyntheticExamples, new_seed
from dp_microadam.clipping.checks.independence import IndependenceCheck
from dp_microadam.clipping.checks.state import StateSnapshot, put_back_attributes
from dp_microadam.clipping.cost import strategy_table
from dp_microadam.clipping.passes import (
    Clippable,
    JointCall,
    ParameterShare,
    blocks_of,
    gradient_shares,
    leave_out,
    recompute_uncertain,
)
from dp_microadam.clipping.precision import autocasting, full_precision
from dp_microadam.clipping.recording import Observed, RowTable
from dp_microadam.clipping.rules.families import observe, refuse_batch_statistics, refuse_unsupported
from dp_microadam.clipping.rules.rule import sum_of
from dp_microadam.errors import InputError
from dp_microadam.validation import require_one_of

# Squares of other numbers may vanish or overflow in float32, and with them the norm that is to be compared with the bound.
_SMALLEST_NORM, _LARGEST_NORM = 1e-12, 1e15


@dataclass
class _Checked:
    """A check that was made, and which sizes of batches and numbers of examples per user it covers."""

    check: IndependenceCheck
    largest: int
    per_unit: set[int]


class ClippedGradients:
    """The sum of clipped per-example gradients Σᵢ clip(gᵢ, C) over the examples of one step; gᵢ is example i's gradient.

    Formal guarantees: for batches that differ by adding or removing one example, ``sums``, read as one vector over all
    parameters, differ by at most ``sensitivity`` in L2 norm, however the batch was cut into chunks; up to rounding,
    which is a relative 1e-5 in what the example itself adds, and that of a float32 sum over all examples. It holds for
    models in which examples do not interact. A randomized numerical check on synthetic data before the first step
    (``checks/independence.py``) refuses other models, and the clip itself is compared with autograd on such data
    (``checks/autograd.py``). The check can miss interactions on values, at sizes, by random draws or after numbers of calls
    that it does not try; ``checks/independence.py`` and the documentation list these. A model that changes its own buffers or
    parameters while examples pass through it is refused at every call, and plain attributes of modules are put back. An
    example whose gradient is not finite, or whose squared norm overflows, contributes nothing. What ``accumulate`` returns,
    and ``sums`` before noise, are private. With ``scale`` or ``row_masks`` all of this holds for the scaled gradients s⊙gᵢ:
    ``sums`` is Σᵢ clip(s⊙gᵢ, C) and ``sensitivity`` is its sensitivity. Noise must be added to ``sums`` as they are, before
    anything is divided by s.

    With ``weights`` in ``accumulate``, all of this holds for users instead of examples: for adding or removing a user with all
    their examples, whose gradient is the weighted sum over these. If the gradient of one of them is not finite, the user
    contributes nothing.

    An example's gradient is the sum over all uses of a parameter, be it a layer that is called several times, a weight
    that layers share, or several rows of one example (views of an image, windows of an attention).

    Args:
        model: any module; its parameters that require gradients are the ones that are clipped and summed.
        per_example_loss: ``per_example_loss(model, batch)`` returns one loss per example, shape (B,).
        max_grad_norm: the clipping norm C.
        clipping: ``"flat"`` clips the whole gradient to C; ``"per-layer"`` clips that of each of L layers to C/√L.
        strategy: how norms and sums are computed: ``"ghost"`` (ghost norms), ``"keep"`` (per-example gradients are formed and
            kept) or ``"drop"`` (formed for their norms and dropped), for all layers that have a choice. By default each layer
            takes its cheapest.
        scale: factors s that gradients are multiplied by before they are clipped, by parameter name, each of the parameter's
            shape. They must not depend on the examples of the step. Per-example gradients of these parameters are formed.
        row_masks: which rows of a weight are trained, by parameter name; one entry per row (the first dimension). Gradients
            of other rows are zero and do not count in the norm.
        autocast: run forward and backward pass in this precision (``torch.bfloat16``); norms and sums stay float32.
        synthetic_batch: examples for the independence check, for models that do not accept random ones; at least four,
            and never private data.

    >>> model = nn.Linear(3, 2)
    >>> engine = ClippedGradients(model, lambda model, x: model(x).square().sum(1), max_grad_norm=1.0)
    >>> norms = engine.accumulate(torch.ones(4, 3))
    >>> norms.shape, sorted(engine.sums), engine.sensitivity
    (torch.Size([4]), ['bias', 'weight'], 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        *,
        max_grad_norm: float,
        clipping: str = "flat",
        strategy: str | None = None,
        scale: Mapping[str, Tensor] | None = None,
        row_masks: Mapping[str, Tensor] | None = None,
        autocast: torch.dtype | None = None,
        synthetic_batch: Any = None,
    ) -> None:
        if not _SMALLEST_NORM <= max_grad_norm <= _LARGEST_NORM:
            raise InputError(f"max_grad_norm is {max_grad_norm}; it must be from {_SMALLEST_NORM:g} to {_LARGEST_NORM:g}")
        require_one_of("clipping", clipping, ("flat", "per-layer"))
        if strategy is not None:
            require_one_of("strategy", strategy, ("ghost", "keep", "drop"))
        self._model = model
        self._bound = float(max_grad_norm)
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._trainable:
            raise InputError("model has no trainable parameter; call requires_grad_(True) on those to be trained")
        refuse_unsupported(model)
        refuse_batch_statistics(model)
        self._device = next(iter(self._trainable.values())).device
        self._loss = autocasting(per_example_loss, self._device, autocast)
        self._precision = 0.0 if autocast is None else torch.finfo(autocast).eps
        self._observed = observe(model, strategy)
        self._layer_bounds = _layer_bounds(self._trainable, self._bound) if clipping == "per-layer" else None
        # Which parameters are clipped together, and to what norm; of the last chunk.
        self._clipped_together: list[tuple[set[str], float]] = []
        self._synthetic_batch = synthetic_batch
        # By structure of the batch: the largest number of examples so far.
        self._largest: dict[Any, int] = {}
        # By structure of the batch and modes of the modules.
        self._checks: dict[Any, _Checked] = {}
        self._sums: dict[str, Tensor] = {}
        self._scale: dict[str, Tensor] = {}
        self._row_masks: dict[str, Tensor] = {}
        self._closed = False
        self.reset()
        self.scale, self.row_masks = scale, row_masks

    @property
    def sensitivity(self) -> float:
        """The L2 sensitivity of ``sums`` to adding or removing one example: C, for flat and for per-layer clipping."""
        return self._bound

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sums of clipped gradients since the last ``reset``, by parameter name; zeros before any example."""
        return self._sums

    @property
    def layer_bounds(self) -> dict[str, float] | None:
        """The clipping norms C_l by layer name for per-layer clipping, otherwise None."""
        return None if self._layer_bounds is None else dict(self._layer_bounds)

    @property
    def scale(self) -> Mapping[str, Tensor] | None:
        """The factors that gradients are multiplied by before they are clipped; may be set between steps."""
        return self._scale or None

    @scale.setter
    def scale(self, scale: Mapping[str, Tensor] | None) -> None:
        self._refuse_within_step("scale")
        self._scale = _checked_factors("scale", scale or {}, self._trainable, rows=False)

    @property
    def row_masks(self) -> Mapping[str, Tensor] | None:
        """Which rows of weights are trained; may be set between steps."""
        return self._row_masks or None

    @row_masks.setter
    def row_masks(self, row_masks: Mapping[str, Tensor] | None) -> None:
        self._refuse_within_step("row_masks")
        given = _checked_factors("row_masks", row_masks or {}, self._trainable, rows=True)
        self._row_masks = {name: (values != 0).to(values.dtype) for name, values in given.items()}

    def _refuse_within_step(self, what: str) -> None:
        if self._accumulated:
            raise InputError(
                f"{what} was set in the middle of a step; call reset() first, because the sums would mix both values"
            )

    def reset(self) -> None:
        """Set the sums to zero for the next step."""
        self._accumulated = False
        self._sums = {name: self._zeros(p) for name, p in self._trainable.items()}

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)

    def close(self) -> None:
        """Release the model and the sums. The model needs no clean-up: hooks exist only while ``accumulate`` runs."""
        self._closed = True
        self._checks = {}
        self._sums = {}

    def accumulate(self, batch: Any, weights: Tensor | None = None) -> Tensor:
        """Add the clipped gradients of these examples to ``sums``; returns the norms before clipping.

        May be called once per physical chunk of a batch; a chunk may be empty. The norms are private.

        With ``weights``, of shape (U, r), the examples are those of U users, r consecutive ones of each. A user's gradient is
        the sum over their r examples' gradients, times the weights, and it is clipped as a whole; norms are those of users.
        An example of weight zero only fills up. It should be a copy of another of the same user: its gradient must be finite.
        """
        self._refuse_changes()
        count = batch_size(batch)
        per_unit = 1 if weights is None else require_weights(weights, count)
        if count == 0:
            return torch.zeros(0, device=self._device)
        batch = detached(batch)
        with torch.enable_grad():
            self._largest[signature(batch)] = max(count, self._largest.get(signature(batch), 0))
            return self._add(self._checked_model(batch, per_unit=per_unit), batch, count, weights)

    def _add(self, observed: Observed, batch: Any, count: int, weights: Tensor | None = None) -> Tensor:
        losses_of_batch = partial(losses_of, self._model, self._loss, batch)
        state = StateSnapshot(self._model)
        try:
            with put_back_attributes(self._model):
                factors, masks = self._factors(), self._row_masks
                shares, losses = gradient_shares(observed, losses_of_batch, count, factors, masks, weights=weights)
            with torch.no_grad(), full_precision(self._device):
                found = recompute_uncertain(shares, state.altered()) if shares else None
            if found is None or found.flagged:
                state.refuse_changes()
        except BaseException:
            state.restore()
            raise
        if found is None:
            return torch.zeros(count if weights is None else len(weights), device=losses.device)
        with torch.no_grad(), full_precision(self._device):
            if found.lost:
                leave_out(shares, torch.isfinite(found.of_examples).logical_not_())
            added = self._add_clipped(shares, found.of_examples.nan_to_num(nan=torch.inf), sure=not found.lost)
        return found.of_examples if added else self._add_finite(observed, batch, found.of_examples, weights)

    def _add_finite(self, observed: Observed, batch: Any, norms: Tensor, weights: Tensor | None) -> Tensor:
        """Once more without the examples, or users, whose norm is not finite, where their gradients could not be left out.

        The others get new random numbers then.
        """
        units = torch.isfinite(norms).nonzero().flatten()
        rows = torch.arange(batch_size(batch), device=units.device).view(len(norms), -1)[units].flatten()
        if len(rows):
            own = None if weights is None else weights[units.to(weights.device)]
            norms[units] = self._add(observed, select(batch, rows), len(rows), own)
        return norms

    def check_independence(self, batch: Any, seed: int | None = None, *, rows_per_unit: Sequence[int] = ()) -> None:
        """Check that examples are independent, as the first ``accumulate`` would otherwise do; raises ``InputError`` if not.

        This is a randomized numerical check on synthetic examples shaped like those of ``batch``, with new examples and
        random numbers every time. ``checks/independence.py`` lists what it checks and what it can miss. A trainer calls it to
        refuse a model before it creates any file.

        Args:
            batch: a batch as large as the largest chunk, so that ``accumulate`` need not check larger sizes later. Only its
                structure, shapes and types are used, no values.
            seed: repeats a check that refused the model; the refusal names it.
            rows_per_unit: how many examples users may have in a batch, whose clip is checked too (``checks/autograd.py``).
        """
        self._refuse_changes()
        if seed is not None:
            self._checks.clear()
        self._largest[signature(batch)] = max(batch_size(batch), self._largest.get(signature(batch), 0))
        with torch.enable_grad():
            self._checked_model(detached(batch), seed)
            for per_unit in rows_per_unit:
                self._checked_model(detached(batch), per_unit=per_unit)

    def explain(self) -> str:
        """Print, and return, a table of the layers: the strategy, its estimated cost, the memory it keeps."""
        table = strategy_table(self._observed)
        print(table)
        return table

    def _refuse_changes(self) -> None:
        if self._closed:
            raise InputError("this ClippedGradients is closed; make a new one")
        now = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if now.keys() != self._trainable.keys() or any(now[name] is not p for name, p in self._trainable.items()):
            name = next(iter(now.keys() ^ self._trainable.keys()), next(iter(now), ""))
            raise InputError(
                f"parameter {name!r} was frozen, unfrozen or replaced since this ClippedGradients was made; make a new one"
            )

    def _checked_model(self, batch: Any, seed: int | None = None, *, per_unit: int = 1) -> Observed:
        """What is observed of the model, checked for batches of this structure and size, and for units of so many examples."""
        modes = tuple(module.training for module in self._model.modules())
        key, size = (signature(batch), modes), batch_size(batch)
        if key not in self._checks:
            refuse_batch_statistics(self._model)
            source = SyntheticExamples(_shape_of(batch), self._synthetic_batch, new_seed() if seed is None else seed)
            check = IndependenceCheck(
                self._model, self._loss, replace(self._observed, table=RowTable()), source, self._precision
            )
            check.check()
            check_against_autograd(self, check.observed, check.source.simple())
            self._checks[key] = _Checked(check, CHECK_SIZE, {1})
        checked = self._checks[key]
        if size > checked.largest:
            checked.check.check_at_size(size)
            checked.largest = size
        if per_unit not in checked.per_unit:
            largest = max(size, self._largest.get(signature(batch), 0))
            check_against_autograd(self, checked.check.observed, checked.check.source.simple(), per_unit, largest)
            checked.per_unit.add(per_unit)
        return checked.check.observed

    def _with_bound(self, bound: float) -> ClippedGradients:
        """A copy with another clipping norm and sums of its own, which shares the model and what was learned about it."""
        other = copy.copy(self)
        other._bound = bound
        if self._layer_bounds is not None:
            other._layer_bounds = _layer_bounds(self._trainable, bound)
        other.reset()
        return other

    def _add_clipped(self, shares: list[ParameterShare], norms: Tensor, *, sure: bool) -> bool:
        """Add the clipped sums; nothing, and False, if they are not finite although they should be."""
        coefficients = self._coefficients_of(shares, norms)
        totals: dict[str, Tensor] = {}
        while shares:
            share = shares.pop()  # its memory is free once its sum is taken
            for key, total in self._sums_of(share.call, coefficients.pop().to(share.squared.dtype)).items():
                totals[share.names[key]] = total
        if not sure and not all(bool(total.isfinite().all()) for total in totals.values()):
            return False
        self._accumulated = True
        # All of them or, on an error above, none; and in one launch on a GPU.
        torch._foreach_add_([self._sums[name] for name in totals], list(totals.values()))
        return True

    def _coefficients_of(self, shares: list[ParameterShare], norms: Tensor) -> list[Tensor]:
        """The clipping coefficients of every share. Per layer, layers that have a share in common are clipped as one block."""
        if self._layer_bounds is None:
            self._clipped_together = [(set(self._trainable), self._bound)]
            return [self._coefficients(norms, self._bound)] * len(shares)
        found: list[Tensor] = [norms] * len(shares)
        self._clipped_together = []
        for members in blocks_of([set(map(_layer_of, share.names.values())) for share in shares]):
            own = [shares[index] for index in members]
            names = {name for share in own for name in share.names.values()}
            bound = sum(self._layer_bounds[layer] ** 2 for layer in set(map(_layer_of, names))) ** 0.5
            self._clipped_together.append((names, bound))
            coefficients = self._coefficients(sum_of([share.squared for share in own]).sqrt(), bound)
            for index in members:
                found[index] = coefficients
        return found

    @staticmethod
    def _coefficients(norms: Tensor, bound: float) -> Tensor:
        """min(1, C/‖g‖)."""
        return bound / norms.clamp(min=bound)

    def _factors(self) -> Mapping[str, Tensor]:
        """The factors of parameters whose per-example gradients are formed and multiplied, by parameter name."""
        return self._scale

    def _factor(self, name: str) -> Tensor:
        """What a parameter's gradient is multiplied by before it is clipped."""
        factor = self._scale.get(name, torch.ones((), device=self._device))
        if name in self._row_masks:
            factor = factor * self._row_masks[name].view(-1, *[1] * (self._trainable[name].dim() - 1))
        return factor

    def _sums_of(self, call: Clippable, coefficients: Tensor) -> Mapping[str, Tensor]:
        return call.clipped_sums(coefficients)

    def _contributions(self, gradients: Tensor) -> Tensor:
        """What clipped gradients of a parameter, (examples, *shape), add to the sum, each by itself."""
        return gradients


class ClippedRowNorms(ClippedGradients):
    """Σᵢ ‖row r of clip(gᵢ, C)‖ for every row r, the first dimension, of every trainable parameter.

    Used like :class:`ClippedGradients`, whose arguments it takes; ``sums`` holds one number per row. Every example's gradient
    is formed, so a pass costs more than one of ``ClippedGradients``.

    Formal guarantees: for batches that differ by adding or removing one example, ``sums``, read as one vector over all
    rows of all parameters, differ by at most ``sensitivity`` = C in L2 norm. The difference is the vector of row norms of that
    example's clipped gradient, and its squared norm is Σᵣ ‖row r‖² = ‖clip(gᵢ, C)‖² ≤ C². So the Gaussian mechanism that
    protects the sum of clipped gradients protects these sums too, with the same noise per number, and a step that publishes
    them instead of the gradients costs the same. Everything else is as for ``ClippedGradients``.

    >>> model = nn.Linear(2, 3, bias=False)
    >>> engine = ClippedRowNorms(model, lambda model, x: model(x).square().sum(1), max_grad_norm=1.0)
    >>> norms = engine.accumulate(torch.ones(4, 2))
    >>> engine.sums["weight"].shape, engine.sensitivity
    (torch.Size([3]), 1.0)
    """

    def __init__(self, model: nn.Module, per_example_loss: PerExampleLoss, *, max_grad_norm: float, **options: Any) -> None:
        super().__init__(model, per_example_loss, max_grad_norm=max_grad_norm, **options)
        for name, parameter in self._trainable.items():
            if parameter.dim() == 0:
                raise InputError(f"parameter {name!r} is a single number and has no rows; freeze it with requires_grad_(False)")
        self._ones = {name: torch.ones_like(parameter, requires_grad=False) for name, parameter in self._trainable.items()}

    def _factors(self) -> Mapping[str, Tensor]:
        # A factor of one has every example's gradient formed, whatever the layer's cheapest strategy would be.
        return {**self._ones, **self._scale}

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        return super()._zeros(parameter).new_zeros(len(parameter) if parameter.dim() else 1)

    def _sums_of(self, call: Clippable, coefficients: Tensor) -> Mapping[str, Tensor]:
        assert isinstance(call, JointCall), "scaled gradients are always formed"
        return call.weighted(coefficients, self._contributions)

    def _contributions(self, gradients: Tensor) -> Tensor:
        return torch.linalg.vector_norm(gradients.reshape(*gradients.shape[:2], -1), dim=2)


def _layer_bounds(parameters: Iterable[str], bound: float) -> dict[str, float]:
    """The clipping norms C_l of the parameters' layers, all equal, with Σ C_l² = C²."""
    layers = dict.fromkeys(map(_layer_of, parameters))
    return dict.fromkeys(layers, bound / math.sqrt(len(layers)))


def _layer_of(parameter: str) -> str:
    """The name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


def _shape_of(batch: Any) -> Any:
    """No more than structure, shapes and types of a batch: it must not be kept."""
    return tree_map(lambda leaf: leaf.new_empty(()).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf, batch)


def _checked_factors(
    what: str, given: Mapping[str, Tensor], trainable: Mapping[str, nn.Parameter], *, rows: bool
) -> dict[str, Tensor]:
    """Factors by parameter name, each of the parameter's shape, or one per row, on its device and in float32 or wider."""
    found = {}
    for name, values in given.items():
        if name not in trainable:
            raise InputError(
                f"{what} names {name!r}, which is not a trainable parameter of the model; name one of model.named_parameters()"
            )
        parameter = trainable[name]
        shape = parameter.shape[:1] if rows else parameter.shape
        if values.shape != shape:
            raise InputError(f"{what}[{name!r}] has shape {tuple(values.shape)}; it must have shape {tuple(shape)}")
        found[name] = values.detach().to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        if not bool(torch.isfinite(found[name]).all()):
            raise InputError(f"{what}[{name!r}] holds values that are not finite; all values must be finite")
    return found
