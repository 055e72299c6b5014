"""One forward and backward pass over a batch that yields squared per-example gradient norms and the means to sum them.

A parameter's gradient is the sum over its uses, and only the norm of that sum may be compared with the bound. Uses that
can be joined become one call with more positions. For others, and for scaled gradients, each example's gradient is
formed: a few examples at a time, once for the norm and, unless it could be kept, once more for the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dp_microadam.clipping.outer_product import (
    OF_POSITIONS,
    OF_SQUARES,
    OF_TERMS,
    Factors,
    OuterProductSum,
    any_flagged,
    piece_elements,
    squared_norms,
)
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed, OutputGradientHook, Recording, Use
from dp_microadam.clipping.rules.embedding import EmbeddingCall
from dp_microadam.clipping.rules.linear import LinearRule, positions
from dp_microadam.clipping.rules.rule import GradientRows, LayerCall, RuleCall, UnchangedInput, at_least_float32, sum_of
from dp_microadam.errors import InputError

# Elements of formed gradients that are kept between norms and sum: 128 MB in float32.
KEPT_ELEMENTS = 1 << 25


class Clippable(Protocol):
    """Gradients of some parameters, of which clipped sums can be taken."""

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]: ...

    def uncertain(self) -> Tensor | None: ...

    def recompute(self, rows: Tensor) -> Tensor: ...


@dataclass
class ParameterShare:
    """Some parameters' share of every example's gradient: squared norms, and the call that sums it.

    ``names`` maps the keys of ``call.clipped_sums`` to parameter names. ``squared`` is right after ``recompute_uncertain``.
    """

    call: Clippable
    names: Mapping[str, str]
    squared: Tensor


@dataclass(frozen=True)
class PendingUse:
    """A use and its output gradient, waiting for the other uses of its parameters."""

    use: Use
    gradient: Tensor


def gradient_shares(
    observed: Observed,
    losses_of_batch: Callable[[], Tensor],
    count: int,
    scales: Mapping[str, Tensor] = MappingProxyType({}),
    row_masks: Mapping[str, Tensor] = MappingProxyType({}),
    on_output_gradient: OutputGradientHook | None = None,
    weights: Tensor | None = None,
) -> tuple[list[ParameterShare], Tensor]:
    """Run a forward and backward pass; returns the shares of the gradients, and the losses of the ``count`` examples.

    The shares have no parameter in common, so that squared norms add up. Gradients are multiplied by ``scales``, and rows
    that ``row_masks`` leaves out are zero. ``on_output_gradient`` is called with every use and its output gradient. With
    ``weights``, (units, examples per unit), shares are those of units: the gradient of a unit is the weighted sum over its
    examples, which are consecutive. The gradients of an example of weight zero are zero, unless they are not finite.

    Formal guarantees: each trainable parameter's gradient, summed over all its uses and scaled, is in at most one share,
    and a parameter in none has had no output gradient. Row i of a share comes from unit i alone, if examples do not interact.
    """
    units, per_unit = (count, 1) if weights is None else weights.shape
    shares: list[ParameterShare] = []
    pending: list[PendingUse] = []
    factors = _combined(observed, scales, row_masks)

    def collect(use: Use, gradient: Tensor) -> None:
        names = set(use.names.values())
        with torch.no_grad(), full_precision(gradient.device):
            if on_output_gradient is not None:
                on_output_gradient(use, gradient)
            if any(recording.uses[name] > 1 for name in names):
                pending.append(PendingUse(use, gradient))
            elif not names.isdisjoint(scales) or not (use.call.masks_rows or names.isdisjoint(row_masks)):
                shares.append(_joint_share([PendingUse(use, gradient)], factors, units))
            else:
                use.call.row_masks = {key: row_masks[name] for key, name in use.names.items() if name in row_masks}
                shares.append(ParameterShare(use.call, use.names, _one_each(use, use.call.squared_norms(gradient), units)))

    with Recording(observed, count, collect, per_unit=per_unit) as recording:
        losses = losses_of_batch()
        if losses.requires_grad:  # every trainable layer may have been skipped at random
            recording.backward(losses, torch.ones_like(losses) if weights is None else weights.to(losses).flatten())
        with torch.no_grad(), full_precision(losses.device):
            for members in blocks_of([set(item.use.names.values()) for item in pending]):
                shares.append(_joint_share([pending[index] for index in members], factors, units))
        pending.clear()  # the closure above would keep activations alive until the next garbage collection
    return shares, losses.detach()


def blocks_of(groups: Sequence[set[str]]) -> list[list[int]]:
    """The finest partition of the groups, by index, in which groups that have something in common are together.

    >>> blocks_of([{"a"}, {"b", "c"}, {"c"}])
    [[0], [1, 2]]
    """
    blocks: list[tuple[set[str], list[int]]] = []
    for index, group in enumerate(groups):
        apart = [block for block in blocks if block[0].isdisjoint(group)]
        together = [block for block in blocks if not block[0].isdisjoint(group)]
        names = group.union(*(names for names, _ in together))
        blocks = [*apart, (names, [*(i for _, members in together for i in members), index])]
    return [members for _, members in blocks]


def _combined(observed: Observed, scales: Mapping[str, Tensor], row_masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scale and row mask of each parameter that has one, as one factor."""
    factors = dict(scales)
    for name, mask in row_masks.items():
        rows = mask.view(-1, *[1] * (observed.parameters[name].dim() - 1))
        factors[name] = factors[name] * rows if name in factors else rows
    return factors


def _one_each(use: Use, squared: Tensor, count: int) -> Tensor:
    if squared.shape != (count,):
        raise InputError(
            f"the rule of {use.label} returns {squared.numel()} norms for {count} examples or users with "
            f"{use.call.rows_per_example} rows each; a rule must add up the gradients of rows_per_example consecutive rows"
        )
    return squared


def _joint_share(members: list[PendingUse], scales: Mapping[str, Tensor], count: int) -> ParameterShare:
    members = _merged(members)
    names: dict[str, Any] = {name: name for member in members for name in member.use.names.values()}
    if scales.keys().isdisjoint(names):
        use = members[0].use
        if len(members) == 1:
            return ParameterShare(use.call, use.names, _one_each(use, use.call.squared_norms(members[0].gradient), count))
        tied = _tied(members)
        if tied is not None:
            call, use = tied
            return ParameterShare(call, use.names, _one_each(use, call.squared_norms(), count))
    joint = JointCall(members, scales, count)
    return ParameterShare(joint, names, joint.squared_norms())


def _merged(members: Sequence[PendingUse]) -> list[PendingUse]:
    """Uses of the same parameters by the same layer family as one use, where the family supports it."""
    kinds: dict[object, list[PendingUse]] = {}
    for item in members:
        family = type(getattr(item.use.call, "rule", None))
        kinds.setdefault((type(item.use.call), family, tuple(sorted(item.use.names.items()))), []).append(item)
    found = []
    for same in kinds.values():
        first = same[0].use
        both = first.call.joined([(item.use.call, item.gradient) for item in same]) if len(same) > 1 else None
        found.extend(same if both is None else [PendingUse(Use(both[0], first.names, first.label), both[1])])
    return found


class JointCall:
    """Norms and clipped sum of gradients to which several uses contribute, each scaled elementwise.

    Formal guarantees: what is added to the sum are the tensors whose norms were taken, times the coefficients, so
    that no example contributes more than the bound, up to the rounding of one multiplication.
    """

    def __init__(self, members: Sequence[PendingUse], scales: Mapping[str, Tensor], count: int) -> None:
        self._members = members
        self._scales = scales
        self._count = count
        self._kept: list[dict[str, Tensor]] | None = None
        self._step = 1

    def squared_norms(self) -> Tensor:
        size = sum(gradient[0].numel() for gradient in self._gradients(slice(0, 1)).values())
        self._step = max(1, 4 * piece_elements(self._members[0].gradient.device) // max(1, size))
        keep: list[dict[str, Tensor]] | None = [] if size * self._count <= KEPT_ELEMENTS else None
        norms = []
        for examples in self._pieces():
            gradients = self._gradients(examples)
            norms.append(sum_of([squared_norms(part.reshape(len(part), -1)) for part in gradients.values()]))
            if keep is not None:
                keep.append(gradients)
        self._kept = keep
        if keep is not None:
            self._members = []  # inputs and output gradients are free
        return torch.cat(norms)

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        return self.weighted(coefficients, lambda gradients: gradients)

    def weighted(self, coefficients: Tensor, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Σᵢ cᵢ·of(gᵢ), where ``of`` takes the gradients of several examples at once."""
        total: dict[str, Tensor] = {}
        for index, examples in enumerate(self._pieces()):
            gradients = self._gradients(examples) if self._kept is None else self._kept[index]
            for name, part in gradients.items():
                piece = torch.tensordot(coefficients[examples], of(part), dims=1)
                total[name] = piece if name not in total else total[name] + piece
        return total

    def uncertain(self) -> None:
        """No norm is uncertain: it is that of the tensor that is summed."""

    def recompute(self, rows: Tensor) -> Tensor:
        raise NotImplementedError("no norm is uncertain")

    def _pieces(self) -> Iterator[slice]:
        return (slice(start, min(start + self._step, self._count)) for start in range(0, self._count, self._step))

    def _gradients(self, examples: slice) -> dict[str, Tensor]:
        """The scaled gradients of these examples, by parameter name."""
        total: dict[str, Tensor] = {}
        for member in self._members:
            for key, part in member.use.call.per_example(member.gradient, examples).items():
                name = member.use.names[key]
                total[name] = part if name not in total else total[name] + part
        return {name: part * self._scales[name] if name in self._scales else part for name, part in total.items()}


class TiedCall:
    """Norms and clipped sum of a table that one linear layer and one embedding share.

    Formal guarantees: those of ``outer_product.py``. The three terms of a squared norm may cancel. Where their sum is below a
    fraction of what may have been cancelled, gᵢ is formed, its norm is taken from that tensor, and that tensor enters the sum.
    """

    def __init__(self, linear: RuleCall, of_linear: Tensor, embedding: EmbeddingCall, of_embedding: Tensor) -> None:
        self._linear, self._embedding = linear, embedding
        self._of_linear, self._of_embedding = of_linear, of_embedding
        inputs, rows = linear.read(), linear.rows_per_example
        assert inputs is not None, "the weight is trained"
        self._inputs, self._deltas = positions(inputs, rows), positions(at_least_float32(of_linear), rows)
        self._norms = self._least = torch.empty(0)
        self._formed: Sequence[Tensor] = ()  # the examples whose gradient is formed, one by one

    def squared_norms(self) -> Tensor:
        tokens, shifts = self._embedding.occurrences(self._of_embedding)
        looked_up = self._deltas.gather(2, tokens.unsqueeze(1).expand(-1, self._deltas.shape[1], -1))
        cross = (looked_up * (self._inputs @ shifts.transpose(1, 2))).sum((1, 2))
        of_inputs, of_shifts = (torch.linalg.vector_norm(part, dim=2) for part in (self._inputs, shifts))
        of_cross = (looked_up.abs() * of_inputs.unsqueeze(2) * of_shifts.unsqueeze(1)).sum((1, 2))
        own = self._linear.squared_norms(self._of_linear) + self._embedding.squared_norms(self._of_embedding)
        self._norms = own + 2 * cross
        of_positions = max(OF_TERMS, OF_POSITIONS / self._deltas.shape[1])
        self._least = (OF_SQUARES * own).maximum(2 * of_positions * of_cross)
        return self._norms

    def uncertain(self) -> Tensor | None:
        return any_flagged([self._norms < self._least, self._linear.uncertain()])

    def recompute(self, rows: Tensor) -> Tensor:
        self._formed = rows[self._deltas[rows].flatten(1).any(1)].split(1)  # a table each, as large as a small model
        for row in self._formed:
            squares = sum_of([squared_norms(part) for part in self._gradients(row).values()])
            self._norms = self._norms.index_copy(0, row, squares)
        return self._norms

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        ordinary = coefficients.index_fill(0, torch.cat(list(self._formed)), 0) if self._formed else coefficients
        totals = dict(self._linear.clipped_sums(ordinary))
        totals["weight"] = totals["weight"] + self._embedding.clipped_sums(ordinary)["weight"]
        for row in self._formed:
            for name, part in self._gradients(row).items():
                totals[name] = totals[name] + coefficients[row] * part[0]
        return totals

    def _gradients(self, row: Tensor) -> dict[str, Tensor]:
        """The gradients of one example, as a batch of one, by the linear layer's names."""
        only = slice(int(row), int(row) + 1)
        found = self._linear.rule.gradients(self._inputs[row], self._deltas[row], 1)
        found["weight"] = found["weight"] + self._embedding.per_example(self._of_embedding, only)["weight"]
        return found


def _tied(members: Sequence[PendingUse]) -> tuple[TiedCall, Use] | None:
    """The call of a table that one linear layer and one embedding share, and the linear layer's use; None for other members."""
    for head, table in (members, members[::-1]) if len(members) == 2 else ():
        linear, embedding = head.use.call, table.use.call
        if not isinstance(linear, RuleCall) or type(linear.rule) is not LinearRule or type(embedding) is not EmbeddingCall:
            continue
        if head.use.names.get("weight") == table.use.names["weight"]:
            return TiedCall(linear, head.gradient, embedding, table.gradient), head.use
    return None


class Norms(NamedTuple):
    """The norms of examples over all shares, how many are not finite, and whether the flag beside them was set."""

    of_examples: Tensor
    lost: int
    flagged: bool


def recompute_uncertain(shares: Sequence[ParameterShare], flag: Tensor) -> Norms:
    """Recompute uncertain norms; ``squared`` of every share, and the norms returned, are right afterwards.

    To ask a GPU whether any norm of a layer is uncertain means to wait until it has caught up. So no layer asks: the flags of
    all layers, and ``flag``, another one, are read together. The host waits once.

    Formal guarantees: afterwards no norm is smaller than that of what the share would add to the sum, up to the rounding that
    ``outer_product.py`` states.
    """
    squared = sum_of([share.squared for share in shares])
    asked = [(share, flags) for share in shares if (flags := share.call.uncertain()) is not None]
    # The norm's square, and not its root: a square that rounded below zero is uncertain, and recomputed.
    if flag.device.type == "cpu" != squared.device.type:  # written there, since a copy of it would wait
        flag = torch.full((), bool(flag), device=squared.device)
    counts = [(~torch.isfinite(squared)).sum().view(1), flag.to(squared.device, torch.long, non_blocking=True).view(1)]
    if asked:
        counts.append(torch.stack([flags for _, flags in asked]).sum(1))
    lost, flagged, *uncertain = torch.cat(counts).tolist()
    if any(uncertain):
        for (share, flags), count in zip(asked, uncertain, strict=True):
            if count:
                share.squared = share.call.recompute(flags.nonzero().flatten())
        squared = sum_of([share.squared for share in shares])
        lost = int((~torch.isfinite(squared)).sum())
    return Norms(squared.sqrt(), lost, bool(flagged))


_HOLDERS = (LayerCall, JointCall, TiedCall, PendingUse, Use, OuterProductSum, Factors, GradientRows, UnchangedInput)


def leave_out(shares: Sequence[ParameterShare], lost: Tensor) -> None:
    """Give examples whose norm is not finite a coefficient of zero, and zeros for their numbers: zero times NaN is NaN.

    Only such examples have numbers that are not finite, so nothing of the others changes: they add what they add without them.
    """
    for share in shares:
        share.squared = share.squared.masked_fill(lost, torch.inf)
        share.call = _finite(share.call)


def _finite(value: Any) -> Any:
    """The same with zeros for numbers that are not finite, in whatever a call keeps; rules and modules are not touched."""
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() or bool(value.isfinite().all())
        return value if whole else value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if isinstance(value, list | tuple):
        found = map(_finite, value)
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, _HOLDERS):
        for key, one in list(vars(value).items()):
            object.__setattr__(value, key, _finite(one))
        if isinstance(value, UnchangedInput):
            value.accept()
    return value
