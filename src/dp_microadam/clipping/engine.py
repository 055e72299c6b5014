"""The exact sum of clipped per-example gradients from one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.batches import batch_size, detached, padded, padded_size, require_weights, signature
from dp_microadam.clipping.clip_check import check_clip
from dp_microadam.clipping.coefficients import clipping_coefficients, per_layer_coefficients
from dp_microadam.clipping.factors import checked_row_masks, checked_scale
from dp_microadam.clipping.families import observe, refuse_batch_statistics, refuse_torchscript
from dp_microadam.clipping.independence import check_independence, check_independence_again, check_independence_at_size
from dp_microadam.clipping.layer_bounds import layer_bounds, layer_of
from dp_microadam.clipping.losses import PerExampleLoss, losses_of
from dp_microadam.clipping.model_state import StateSnapshot
from dp_microadam.clipping.module_attributes import put_back_tensors
from dp_microadam.clipping.passes import Clippable, Part, parts_of
from dp_microadam.clipping.precision import autocasting, full_precision
from dp_microadam.clipping.recording import Observed
from dp_microadam.clipping.rows import RowTable
from dp_microadam.clipping.settling import Settled, settle
from dp_microadam.clipping.strategy_table import strategy_table
from dp_microadam.clipping.synthetic_examples import CHECK_SIZE, SyntheticExamples
from dp_microadam.clipping.unit_check import check_units
from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer, require_one_of

# Squares of other numbers may vanish or overflow in float32, and with them the norm that is to be compared with the bound.
_SMALLEST_NORM, _LARGEST_NORM = 1e-12, 1e15

FIRST_REPETITION = 16
"""The first call, and power of two, at which a look is taken again."""

# Into so many sizes a GPU's chunks are padded. With one size, the last chunk of a step would cost as much as a full one; with
# eight, padding adds a sixteenth of a chunk on average.
_SIZES_ON_GPU = 8


@dataclass
class _Checked:
    """What the check learned about the model, how its examples were drawn, and which sizes of batches and units it covers.

    ``due`` says that a look must be taken again before the next pass.
    """

    observed: Observed
    source: SyntheticExamples
    largest: int
    per_unit: set[int]
    due: bool = False


class ClippedGradients:
    """The sum of clipped per-example gradients Σᵢ clip(gᵢ, C) over the examples of one step; gᵢ is example i's gradient.

    Formal guarantees: for batches that differ by adding or removing one example, ``sums``, read as one vector over all
    parameters, differ by at most ``sensitivity`` in L2 norm, however the batch was cut into chunks; up to rounding,
    which is a relative 1e-5 in what the example itself adds, and that of a float32 sum over all examples. It holds for
    models in which examples do not interact. A randomized numerical check on synthetic data before the first step
    (``independence.py``) refuses other models, and the clip itself is checked on such data too (``clip_check.py``). The
    check can miss interactions on values, at sizes, by random draws or after numbers of calls that it does not try;
    ``independence.py`` and the documentation list these. A model that changes its own buffers or parameters while examples
    pass through it is refused at every call, and tensors that modules keep in plain attributes are put back. An example
    whose gradient is not finite, or whose squared norm overflows, contributes nothing. What ``accumulate`` returns, and
    ``sums`` before noise, are private. With ``scale`` or ``row_masks``
    all of this holds for the scaled gradients s⊙gᵢ: ``sums`` is Σᵢ clip(s⊙gᵢ, C) and ``sensitivity`` is its sensitivity.
    Noise must be added to ``sums`` as they are, before anything is divided by s.

    With ``weights`` in ``accumulate``, all of this holds for users instead of examples: for adding or removing a user with all
    their examples, whose gradient is the weighted sum over these. If the gradient of one of them is not finite, the user
    contributes nothing.

    An example's gradient is the sum over all uses of a parameter, be it a layer that is called several times, a weight
    that layers share, or several rows of one example (views of an image, windows of an attention).

    Args:
        model: any module; its parameters that require gradients are the ones that are clipped and summed.
        per_example_loss: ``per_example_loss(model, batch)`` returns one loss per example, shape (B,).
        max_grad_norm: the clipping norm C.
        clipping: ``"flat"`` clips the whole gradient to C; ``"per-layer"`` clips every layer's to C_l with Σ C_l² = C².
        layer_weights: for per-layer clipping, C_l in proportion to these numbers by layer name; all equal by default.
        strategy: how norms and sums are computed: ``"ghost"`` (ghost norms), ``"keep"`` (per-example gradients are formed and
            kept) or ``"drop"`` (formed for their norms and dropped), for all layers that have a choice. By default each layer
            takes its cheapest.
        scale: factors s that gradients are multiplied by before they are clipped, by parameter name, each of the parameter's
            shape. They must not depend on the examples of the step. Per-example gradients of these parameters are formed.
        row_masks: which rows of a weight are trained, by parameter name; one entry per row (the first dimension). Gradients
            of other rows are zero and do not count in the norm.
        autocast: run forward and backward pass in this precision (``torch.bfloat16``); norms and sums stay float32.
        tensor_cores: compute norms and sums of linear layers by exact products of bfloat16 numbers that are added up in float32
            (``split_bf16.py``), on CUDA devices of compute capability 8.0 or more; elsewhere it changes nothing. It is meant
            for bfloat16 autocast, where one product does instead of a slow one in float32. Errors are bounded as above by
            what is known of tensor cores' sums; not verified on a GPU, therefore not the default.
        synthetic_batch: examples for the independence check, for models that do not accept random ones; at least four,
            and never private data.
        padded_sizes: chunks are padded with rows of weight zero, so that they come in this many sizes: even parts of the
            largest seen. 1 gives all chunks the same shape, as CUDA graphs need; 0 turns it off. Kernels are chosen and memory
            is laid out anew for every shape on a GPU, where the default is 8; on the CPU, where rows cost more than
            shapes, it is 0.
        repeat_check: take a look again at calls 16, 32, 64, …, in case the model begins to mix examples later. False if the
            caller decides when, by :meth:`check_again`: the number of calls is private where chunks follow from samples.

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
        layer_weights: Mapping[str, float] | None = None,
        strategy: str | None = None,
        scale: Mapping[str, Tensor] | None = None,
        row_masks: Mapping[str, Tensor] | None = None,
        autocast: torch.dtype | None = None,
        tensor_cores: bool = False,
        synthetic_batch: Any = None,
        padded_sizes: int | None = None,
        repeat_check: bool = True,
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
        refuse_torchscript(model)
        refuse_batch_statistics(model)
        self._device = next(iter(self._trainable.values())).device
        self._loss = autocasting(per_example_loss, self._device, autocast)
        self._precision = 0.0 if autocast is None else torch.finfo(autocast).eps
        self._observed = observe(model, strategy, tensor_cores)
        self._layers = list(dict.fromkeys(layer_of(name) for name in self._trainable))
        self._layer_bounds = layer_bounds(self._layers, self._bound, layer_weights) if clipping == "per-layer" else None
        if layer_weights is not None and clipping == "flat":
            raise InputError("layer_weights is given, but clipping is 'flat'; pass clipping='per-layer'")
        self._synthetic_batch = synthetic_batch
        usual = _SIZES_ON_GPU if self._device.type == "cuda" else 0
        self._padded_sizes = usual if padded_sizes is None else require_integer("padded_sizes", padded_sizes, 0)
        # By structure of the batch: the largest number of examples so far.
        self._largest: dict[Any, int] = {}
        # By structure of the batch and modes of the modules.
        self._checks: dict[Any, _Checked] = {}
        self._calls = 0
        self._repeats = repeat_check
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
        self._scale = checked_scale(scale or {}, self._trainable)

    @property
    def row_masks(self) -> Mapping[str, Tensor] | None:
        """Which rows of weights are trained; may be set between steps."""
        return self._row_masks or None

    @row_masks.setter
    def row_masks(self, row_masks: Mapping[str, Tensor] | None) -> None:
        self._refuse_within_step("row_masks")
        self._row_masks = checked_row_masks(row_masks or {}, self._trainable)

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

    def __enter__(self) -> ClippedGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            self._calls += 1
            if self._repeats and self._calls >= FIRST_REPETITION and self._calls.bit_count() == 1:
                self.check_again()
            size = self._size_for(batch, count, per_unit)
            batch = batch if size == count else padded(batch, size)
            if weights is not None and size > count:
                weights = padded(weights, size // per_unit)
            observed = self._checked_model(batch, size, per_unit=per_unit)
            return self._add(observed, batch, size, (size - count) // per_unit, weights)[: count // per_unit]

    def _size_for(self, batch: Any, count: int, per_unit: int) -> int:
        """The number of examples that a chunk of ``count`` is padded to; ``per_unit`` of them belong together."""
        largest = max(count, self._largest.get(signature(batch), 0))
        self._largest[signature(batch)] = largest
        if not self._padded_sizes:
            return count
        return per_unit * padded_size(count // per_unit, largest // per_unit, self._padded_sizes)

    def _add(self, observed: Observed, batch: Any, count: int, padding: int = 0, weights: Tensor | None = None) -> Tensor:
        losses_of_batch = partial(losses_of, self._model, self._loss, batch)
        state = StateSnapshot(self._model, copy_large=False)
        try:
            with put_back_tensors(self._model, observed.caches):
                factors, masks = self._factors(), self._row_masks
                parts, losses = parts_of(observed, losses_of_batch, count, factors, masks, padding=padding, weights=weights)
            with torch.no_grad(), full_precision(self._device):
                settled = settle(parts, [state.altered()]) if parts else None
            if settled is None or settled.raised[0]:
                state.refuse_changes()
        except BaseException:
            state.restore()
            raise
        if settled is None:
            return torch.zeros(count if weights is None else len(weights), device=losses.device)
        self._accumulated = True
        with torch.no_grad(), full_precision(self._device):
            return self._add_clipped(parts, settled)

    def check_independence(self, batch: Any, seed: int | None = None, *, rows_per_unit: Sequence[int] = ()) -> None:
        """Check that examples are independent, as the first ``accumulate`` would otherwise do; raises ``InputError`` if not.

        This is a randomized numerical check on synthetic examples shaped like those of ``batch``, with new examples and
        random numbers every time. ``independence.py`` lists what it checks and what it can miss. A trainer calls it to refuse
        a model before it creates any file.

        Args:
            batch: a batch as large as the largest chunk, so that ``accumulate`` need not check larger sizes later. Only its
                structure, shapes and types are used, no values.
            seed: repeats a check that refused the model; the refusal names it.
            rows_per_unit: how many examples users may have in a batch, whose clip is checked too (``unit_check.py``).
        """
        self._refuse_changes()
        if seed is not None:
            self._checks.clear()
        count = batch_size(batch)
        self._largest[signature(batch)] = max(count, self._largest.get(signature(batch), 0))
        with torch.enable_grad():
            self._checked_model(detached(batch), count, seed)
            for per_unit in rows_per_unit:
                self._checked_model(detached(batch), count, per_unit=per_unit)

    def check_again(self) -> None:
        """Take a look again at the next ``accumulate``, on new synthetic examples: a model may begin to mix examples later.

        A look is a small part of the check (``check_independence_again``), and sizes that were checked stay so.
        """
        for checked in self._checks.values():
            checked.due = True

    def explain(self) -> str:
        """Print, and return, a table of the layers: the strategy on their device, its estimated cost, the memory it keeps."""
        table = strategy_table(self._observed, self._device)
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

    def _checked_model(self, batch: Any, count: int, seed: int | None = None, *, per_unit: int = 1) -> Observed:
        """What is observed of the model, checked for batches of this structure and size, and for units of so many examples."""
        modes = tuple(module.training for module in self._model.modules())
        key = (signature(batch), modes)
        if key not in self._checks:
            refuse_batch_statistics(self._model)
            observed = replace(self._observed, table=RowTable(), caches=set())
            source = check_independence(self._model, self._loss, observed, batch, self._synthetic_batch, self._precision, seed)
            check_clip(self, observed, batch, self._synthetic_batch, self._precision)
            self._checks[key] = _Checked(observed, source, CHECK_SIZE, {1})
        checked = self._checks[key]
        size = max(count, self._largest.get(signature(batch), 0))
        if checked.due:
            sized = batch if size == count else padded(batch, size)
            check_independence_again(
                self._model, self._loss, checked.observed, sized, self._synthetic_batch, self._precision, checked.source
            )
            checked.due = False
        if count > checked.largest:
            sized = batch if size == count else padded(batch, size)
            check_independence_at_size(
                self._model, self._loss, checked.observed, sized, self._synthetic_batch, self._precision, checked.source
            )
            checked.largest = size
        if per_unit not in checked.per_unit:
            check_units(self, checked.observed, batch, per_unit, size, self._synthetic_batch, self._precision)
            checked.per_unit.add(per_unit)
        return checked.observed

    def _add_clipped(self, parts: list[Part], settled: Settled) -> Tensor:
        norms, removed, _ = settled
        coefficients = self._coefficients_of_parts(parts, norms)
        totals: dict[str, Tensor] = {}
        while parts:
            part = parts.pop()  # its memory is free once its sum is taken
            if removed is not None:
                part.call.remove(removed)
            for key, total in self._sums_of(part.call, coefficients.pop().to(part.squared.dtype)).items():
                totals[part.names[key]] = total
        # All of them or, on an error above, none; and in one launch on a GPU.
        torch._foreach_add_([self._sums[name] for name in totals], list(totals.values()))
        return norms

    def _factors(self) -> Mapping[str, Tensor]:
        """The factors of parameters whose per-example gradients are formed and multiplied, by parameter name."""
        return self._scale

    def _coefficients_of_parts(self, parts: list[Part], norms: Tensor) -> list[Tensor]:
        if self._layer_bounds is None:
            return [self._coefficients(norms, self._bound, torch.isfinite(norms))] * len(parts)
        return per_layer_coefficients(parts, norms, self._layer_bounds, self._coefficients)

    _coefficients = staticmethod(clipping_coefficients)

    def _sums_of(self, call: Clippable, coefficients: Tensor) -> Mapping[str, Tensor]:
        return call.clipped_sums(coefficients)
