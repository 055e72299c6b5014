"""A model under the independence check: passes that start from equal conditions, and what each shows of every example."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_microadam.clipping.batches import batch_size, in_precision
from dp_microadam.clipping.check_errors import is_about_precision, is_out_of_memory
from dp_microadam.clipping.families import observe
from dp_microadam.clipping.identical_random_rows import identical_random_rows
from dp_microadam.clipping.losses import PerExampleLoss, losses_of
from dp_microadam.clipping.model_state import StateSnapshot
from dp_microadam.clipping.no_side_effects import SeedAll, SeedWatch, python_random_state, torch_random_state
from dp_microadam.clipping.passes import parts_of
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.reading import read_together
from dp_microadam.clipping.recording import Observed, Use
from dp_microadam.clipping.rule import at_least_float32
from dp_microadam.clipping.settling import settle
from dp_microadam.errors import InputError, PrivacyWarning


@dataclass(frozen=True)
class PassResult:
    """What one forward and backward pass shows of each example: row i of every tensor belongs to example i.

    The tensors are on the CPU, where comparing them waits for nothing.

    Attributes:
        losses: one per example.
        norms: of each example's gradient, by layer.
        projections: of each example's output gradient on a random direction, by use of a parameter.
        used_torch_random: whether the pass drew random numbers from torch.
        used_random: whether it drew any, also from Python or NumPy.
    """

    losses: Tensor
    norms: dict[str, Tensor]
    projections: dict[str, Tensor]
    used_torch_random: bool
    used_random: bool

    def is_finite(self) -> bool:
        values = (self.losses, *self.norms.values(), *self.projections.values())
        return all(bool(torch.isfinite(value).all()) for value in values)


class CheckedModel:
    """A model whose passes all start from one seed, and which must not change while examples pass through it.

    Attributes:
        precision: relative error of the products in the model, if it is coarser than that of its parameters.
        seed: what passes start from; may be set between them.
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        observed: Observed,
        seed_all: SeedAll,
        precision: float,
    ) -> None:
        self.model = model
        self.loss = per_example_loss
        self.observed = observed
        self.seed_all = seed_all
        self.precision = precision
        self.seed = 0
        self._state = StateSnapshot(model, copy_large=True)
        self._directions: dict[Any, Tensor] = {}
        self._seeds = SeedWatch(model, "the model or per_example_loss")

    @property
    def in_double(self) -> bool:
        """Whether all of the model is in double precision."""
        return all(p.dtype == torch.float64 for p in self.model.parameters() if p.is_floating_point())

    @contextmanager
    def one_pass(self, seed: int | None = None) -> Iterator[None]:
        """Seeds all random streams; raises :class:`InputError` if the pass changes the model's state or sets a seed.

        The state is restored then.
        """
        seed = self.seed if seed is None else seed
        self.seed_all(seed)
        with self._state.unchanged():
            yield
            self._seeds.refuse_seeding(seed)

    def losses(self, batch: Any, seed: int) -> Tensor:
        """The losses of a forward pass, on the CPU."""
        with self.one_pass(seed):
            return losses_of(self.model, self.loss, batch).detach().cpu()

    def run(self, batch: Any, *, identical_rows: bool = False) -> PassResult:
        """One forward and backward pass; with ``identical_rows`` random tensors have the same numbers for every example."""
        projections: dict[str, Tensor] = {}

        def project(use: Use, gradient: Tensor) -> None:
            rows = at_least_float32(gradient).reshape(batch_size(batch), -1)
            projections[f"{use.label}, use {len(projections) + 1}"] = rows @ self._direction(rows)

        with self.one_pass(), identical_random_rows() if identical_rows else nullcontext():
            start, python_start = torch_random_state(self.model), python_random_state()
            losses = partial(losses_of, self.model, self.loss, batch)
            parts, values = parts_of(self.observed, losses, batch_size(batch), on_output_gradient=project)
            if parts:
                with torch.no_grad(), full_precision(values.device):
                    settle(parts)
            norms = {f"parameter {', '.join(sorted(part.names.values()))!r}": part.squared.sqrt() for part in parts}
            used_torch = torch_random_state(self.model) != start
            used_random = used_torch or python_random_state() != python_start
        losses_read, *others = read_together([values, *norms.values(), *projections.values()])
        norms = dict(zip(norms, others, strict=False))
        projections = dict(zip(projections, others[len(norms) :], strict=True))
        return PassResult(losses_read, norms, projections, used_torch, used_random)

    def _direction(self, rows: Tensor) -> Tensor:
        kind = rows.shape[1], rows.dtype, rows.device
        if kind not in self._directions:
            generator = torch.Generator().manual_seed(0)
            self._directions[kind] = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64).to(rows)
        return self._directions[kind]


def precise_copy(own: CheckedModel, examples: Any) -> tuple[CheckedModel, Callable[[Any], Any]]:
    """A copy of the model in double precision, and the function that casts batches for it.

    A model that does not run in double precision throughout is returned as it is; if it has weights in half precision, a copy
    in float32 is returned, unless autocast would round there too. If a copy fails for another reason, as for want of memory,
    a :class:`PrivacyWarning` says that the check is weaker.
    """
    halves = any(p.is_floating_point() and p.element_size() < 4 for p in own.model.parameters()) and not own.precision
    for dtype in (torch.float64, torch.float32) if halves else (torch.float64,):
        cast = partial(in_precision, dtype=dtype)
        try:
            model = _without_zeros(copy.deepcopy(own.model).to(dtype))
            observed = replace(observe(model, own.observed.strategy), table=own.observed.table)
            twin = CheckedModel(model, own.loss, observed, own.seed_all, precision=0.0)  # autocast leaves double alone
            with _RoundingDetector(dtype) as rounding:
                losses = twin.run(cast(examples)).losses
        except InputError:
            raise
        except Exception as error:
            if not is_about_precision(error):
                warnings.warn(_weakened(error), PrivacyWarning, stacklevel=2)
                break
            continue
        if losses.dtype == dtype and not rounding.seen:
            return twin, cast
    return own, lambda batch: batch


def _weakened(error: Exception) -> str:
    what = "there is not enough memory" if is_out_of_memory(error) else f"that raises {type(error).__name__}"
    return (
        "the independence check could not run on a copy of the model in double precision, because "
        f"{what}, so that it only finds mixing stronger than the rounding of the model's own precision (1e-5 of the losses and "
        "1e-3 of the gradients in float32); check the same model on a machine with more memory, or make it one that can be "
        "copied and called in double precision"
    )


def _without_zeros(model: nn.Module) -> nn.Module:
    """A head or a gain that starts at zero would hide what happens in the layers before it."""
    generator = torch.Generator().manual_seed(0)
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    with torch.no_grad():
        filled = read_together([parameter.any() for parameter in floating])
        for parameter in (parameter for parameter, some in zip(floating, filled, strict=True) if not some):
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


class _RoundingDetector(TorchDispatchMode):
    """Notices operations that leave a precision for a coarser one, such as a softmax that is always taken in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen = False
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen and any(
            isinstance(leaf, Tensor) and leaf.dtype == self._dtype for leaf in tree_leaves((args, kwargs))
        ):
            self.seen = any(self._is_coarser(leaf) for leaf in tree_leaves(result))
        return result

    def _is_coarser(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.element_size() < self._dtype.itemsize
