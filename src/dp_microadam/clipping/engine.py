"""The exact sum of clipped per-example gradients from one forward and one backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.batches import batch_size, detached, signature
from dp_microadam.clipping.families import build_rules, refuse_batch_statistics
from dp_microadam.clipping.kept_state import refuse_kept_examples
from dp_microadam.clipping.ownership import PROVED_AT_FIRST, PerExampleLoss, losses_of, prove, prove_size
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Recording
from dp_microadam.clipping.rule import LayerCall, LayerRule
from dp_microadam.errors import InputError
from dp_microadam.validation import require_one_of

# Squares of smaller numbers may vanish in float32, and with them the norm that is to be compared with the bound.
_SMALLEST_NORM = 1e-12


class ClippedGradients:
    """Σᵢ clip(gᵢ, C) over the examples of one step, where gᵢ is the gradient of example i's loss.

    Formal guarantees: for batches that differ by adding or removing one example, ``sums``, read as one vector over all
    parameters, differ by at most ``sensitivity`` in L2 norm (up to a relative 1e-5 of rounding), however the batch
    was cut into chunks. It holds for models in which examples do not interact; that is proved on synthetic data
    before the first step (``ownership.py``), and such models are refused otherwise. Not proved is that they never
    interact on values, at sizes or after numbers of calls that the proof does not try; ``ownership.py`` lists these. A
    model that changes its own buffers or parameters while examples pass through it is refused at every call. An
    example whose gradient is not finite, or whose squared norm overflows, contributes nothing. What ``accumulate``
    returns, and ``sums`` before noise, are private.

    Args:
        model: any module; its parameters that require gradients are the ones that are clipped and summed.
        per_example_loss: ``per_example_loss(model, batch)`` returns one loss per example, shape (B,).
        max_grad_norm: C.
        clipping: ``"flat"`` clips the whole gradient to C; ``"per-layer"`` clips every layer's to C_l with Σ C_l² = C².
        layer_weights: for per-layer clipping, C_l in proportion to these numbers by layer name; all equal by default.
        way: ``"ghost"``, ``"keep"`` or ``"drop"`` for all layers that have a choice; by default each layer takes its
            cheapest.
        synthetic_batch: examples to prove independence on, for models that do not accept random ones; at least four,
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
        layer_weights: Mapping[str, float] | None = None,
        way: str | None = None,
        synthetic_batch: Any = None,
    ) -> None:
        if not (math.isfinite(max_grad_norm) and max_grad_norm >= _SMALLEST_NORM):
            raise InputError(
                f"max_grad_norm is {max_grad_norm}; it must be a finite number of at least {_SMALLEST_NORM}"
            )
        require_one_of("clipping", clipping, ("flat", "per-layer"))
        if way is not None:
            require_one_of("way", way, ("ghost", "keep", "drop"))
        self._model = model
        self._loss = per_example_loss
        self._bound = float(max_grad_norm)
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._trainable:
            raise InputError("model has no trainable parameter; call requires_grad_(True) on those to be trained")
        refuse_batch_statistics(model)
        self._rules = build_rules(model, way)
        self._layer_bounds = self._share_out(layer_weights) if clipping == "per-layer" else None
        if layer_weights is not None and clipping == "flat":
            raise InputError("layer_weights is given, but clipping is 'flat'; pass clipping='per-layer'")
        self._synthetic_batch = synthetic_batch
        self._proved: dict[Any, int] = {}
        self._calls = 0
        self._sums: dict[str, Tensor] = {}
        self._closed = False
        self.reset()

    @property
    def sensitivity(self) -> float:
        """How far one example can move ``sums``: C, for flat and for per-layer clipping."""
        return self._bound

    @property
    def sums(self) -> dict[str, Tensor]:
        """Σ of clipped gradients since the last ``reset``, by parameter name; zeros before any example."""
        return self._sums

    @property
    def layer_bounds(self) -> dict[str, float] | None:
        """C_l by layer name for per-layer clipping."""
        return None if self._layer_bounds is None else dict(self._layer_bounds)

    def reset(self) -> None:
        """Start the next step's sums at zero."""
        self._sums = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
            for name, p in self._trainable.items()
        }

    def close(self) -> None:
        """Let go of the model. Nothing of the engine is left on it: hooks exist only while ``accumulate`` runs."""
        self._closed = True
        self._rules = {}
        self._sums = {}

    def __enter__(self) -> ClippedGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accumulate(self, batch: Any) -> Tensor:
        """Add the clipped gradients of these examples to ``sums``; returns the norms of the unclipped ones.

        May be called once per physical chunk of a batch; a chunk may be empty. The norms are private.
        """
        self._refuse_changes()
        count = batch_size(batch)
        device = next(iter(self._trainable.values())).device
        if count == 0:
            return torch.zeros(0, device=device)
        batch = detached(batch)
        with torch.enable_grad():
            self._calls += 1
            if self._calls >= 16 and self._calls.bit_count() == 1:
                self._proved.clear()  # a model may begin to mix later: look again at calls 16, 32, 64, …
            self._prove_once(batch)
            with refuse_kept_examples(self._model):
                norms, calls = self._norms(batch, count)
            with torch.no_grad(), full_precision(device):
                return self._add_clipped(norms, calls)

    def prove(self, batch: Any) -> None:
        """Prove now, on synthetic examples shaped like those of ``batch``, what ``accumulate`` would prove first.

        A trainer can so refuse a model before it creates anything. Give it a batch as large as the largest chunk:
        ``accumulate`` then repeats nothing for chunks of up to that size. No value of the batch is looked at.
        """
        self._refuse_changes()
        with torch.enable_grad():
            self._prove_once(detached(batch))

    def explain(self) -> str:
        """Print, and return, a table of the layers: the way taken, its estimated cost and what it keeps."""
        header = ("layer", "type", "way", "cost ×", "kept kB/example")
        rows = [header]
        for name, rule in self._rules.items():
            estimate = rule.estimate
            kind = type(rule.module).__name__
            if estimate is None:
                rows.append((name, kind, "keep", "-", "-"))
            else:
                cost = "-" if math.isnan(estimate.cost) else f"{estimate.cost / max(1.0, estimate.ordinary):.2f}"
                rows.append((name, kind, estimate.way, cost, f"{estimate.kept_bytes / 1e3:.1f}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        table = "\n".join(lines)
        print(table)
        return table

    def _refuse_changes(self) -> None:
        if self._closed:
            raise InputError("this ClippedGradients is closed; make a new one")
        now = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if now.keys() != self._trainable.keys() or any(now[name] is not p for name, p in self._trainable.items()):
            name = next(iter(now.keys() ^ self._trainable.keys()), next(iter(now), ""))
            raise InputError(
                f"parameter {name!r} was frozen, unfrozen or replaced since this ClippedGradients was made; make a "
                "new one"
            )

    def _prove_once(self, batch: Any) -> None:
        modes = tuple(module.training for module in self._model.modules())
        key = (signature(batch), modes)
        if key not in self._proved:
            refuse_batch_statistics(self._model)
            prove(self._model, self._loss, self._rules, batch, self._synthetic_batch)
            self._proved[key] = PROVED_AT_FIRST
        if batch_size(batch) > self._proved[key]:
            prove_size(self._model, self._loss, self._rules, batch, self._synthetic_batch)
            self._proved[key] = batch_size(batch)

    def _norms(self, batch: Any, count: int) -> tuple[dict[str, Tensor], dict[str, LayerCall]]:
        """Squared norms and kept call of every layer that took part."""
        norms: dict[str, Tensor] = {}
        calls: dict[str, LayerCall] = {}

        def arrived(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
            with torch.no_grad(), full_precision(gradient.device):
                norms[rule.name] = call.squared_norms(gradient)
            calls[rule.name] = call

        with Recording(self._rules, count, arrived) as recording:
            losses = losses_of(self._model, self._loss, batch)
            if losses.requires_grad:  # every trainable layer may have been skipped at random
                recording.backward(losses, torch.ones_like(losses))
        if not norms:
            norms[""] = torch.zeros(count, device=losses.device)
        return norms, calls

    def _add_clipped(self, squared: dict[str, Tensor], calls: dict[str, LayerCall]) -> Tensor:
        norms = torch.stack(list(squared.values())).sum(0).sqrt()
        usable = torch.isfinite(norms)
        removed = torch.nonzero(~usable).flatten()
        flat = self._coefficients(norms, self._bound, usable)
        totals: dict[str, Tensor] = {}
        for name in list(calls):
            call = calls.pop(name)  # its memory is free once its sum is taken
            if len(removed):
                call.remove(removed)
            bounds = self._layer_bounds
            coefficients = flat if bounds is None else self._coefficients(squared[name].sqrt(), bounds[name], usable)
            for key, total in call.clipped_sums(coefficients.to(squared[name].dtype)).items():
                totals[f"{name}.{key}" if name else key] = total
        for name, total in totals.items():  # all of them or, on an error above, none
            self._sums[name] += total
        return norms

    @staticmethod
    def _coefficients(norms: Tensor, bound: float, usable: Tensor) -> Tensor:
        """min(1, C/‖g‖), and zero for examples that are removed."""
        return torch.where(usable, bound / norms.clamp(min=bound), torch.zeros_like(norms))

    def _share_out(self, weights: Mapping[str, float] | None) -> dict[str, float]:
        """C_l in proportion to the weights with Σ C_l² = C²."""
        given = dict.fromkeys(self._rules, 1.0) if weights is None else dict(weights)
        if given.keys() != self._rules.keys():
            wrong = sorted(given.keys() ^ self._rules.keys())[0]
            raise InputError(f"layer_weights must name exactly the trainable layers; {wrong!r} is missing or unknown")
        for name, weight in given.items():
            if not (math.isfinite(weight) and weight > 0):
                raise InputError(f"layer_weights[{name!r}] is {weight}; it must be a finite number above 0")
        scale = self._bound / math.sqrt(sum(weight**2 for weight in given.values()))
        return {name: weight * scale for name, weight in given.items()}
