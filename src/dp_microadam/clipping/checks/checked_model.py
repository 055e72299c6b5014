"""A model under the independence check: passes that start from equal conditions, and what each shows of every example."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dp_microadam.clipping.batches import PerExampleLoss, batch_size, in_precision, losses_of
from dp_microadam.clipping.checks.attributes import copy_of
from dp_microadam.clipping.checks.randomness import EqualDraws, SeedAll, SeedWatch, python_random_state, torch_random_state
from dp_microadam.clipping.checks.state import StateSnapshot
from dp_microadam.clipping.passes import gradient_shares, recompute_uncertain
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed, Use
from dp_microadam.clipping.rules.families import observe
from dp_microadam.clipping.rules.rule import at_least_float32
from dp_microadam.errors import InputError, PrivacyWarning

LOSSES = "losses"

Shown = dict[str, Tensor]
"""What a pass shows of each example, on the CPU: row i of every tensor belongs to example i. The losses, the norm of each
example's gradient by layer, and a random projection of its output gradient by use of a parameter."""


class CheckedModel:
    """A model whose passes all start from one seed, and which must not change while examples pass through it.

    Attributes:
        precision: relative error of the products in the model, if it is coarser than that of its parameters.
        seed: what passes start from; may be set between them.
        draws: whether a pass has drawn random numbers so far.
    """

    def __init__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, observed: Observed, seed_all: SeedAll, precision: float
    ) -> None:
        self.model = model
        self.loss = per_example_loss
        self.observed = observed
        self.seed_all = seed_all
        self.precision = precision
        self.seed = 0
        self.draws = False
        self._state = StateSnapshot(model)
        self._directions: dict[Any, Tensor] = {}
        self._seeds = SeedWatch(model, "the model or per_example_loss")

    @contextmanager
    def one_pass(self, seed: int | None = None, *, equal_draws: bool = False) -> Iterator[None]:
        """Seeds all random streams; raises :class:`InputError` if the pass changes the model's state or sets a seed.

        With ``equal_draws`` all examples have the same random numbers, whatever their number.
        """
        seed = self.seed if seed is None else seed
        self.seed_all(seed)
        start = torch_random_state(self.model), python_random_state()
        with self._state.unchanged():
            with EqualDraws(lambda: self.seed_all(seed)) if equal_draws else nullcontext():
                yield
            self.draws |= (torch_random_state(self.model), python_random_state()) != start
            if not equal_draws:
                self._seeds.refuse_seeding(seed)

    def losses(self, batch: Any, seed: int | None = None, *, equal_draws: bool = False) -> Shown:
        """What a forward pass shows: the losses."""
        with self.one_pass(seed, equal_draws=equal_draws):
            return {LOSSES: losses_of(self.model, self.loss, batch).detach().cpu()}

    def run(self, batch: Any, *, equal_draws: bool = False) -> Shown:
        """What a forward and backward pass shows."""
        count = batch_size(batch)
        projections: dict[str, Tensor] = {}

        def project(use: Use, gradient: Tensor) -> None:
            rows = at_least_float32(gradient).reshape(count, -1)
            projections[f"{use.label}, use {len(projections) + 1}"] = rows @ self._direction(rows)

        with self.one_pass(equal_draws=equal_draws):
            losses = partial(losses_of, self.model, self.loss, batch)
            shares, values = gradient_shares(self.observed, losses, count, on_output_gradient=project)
            if shares:
                with torch.no_grad(), full_precision(values.device):
                    recompute_uncertain(shares)
        norms = {f"parameter {', '.join(sorted(share.names.values()))!r}": share.squared.sqrt() for share in shares}
        shown = {LOSSES: values, **norms, **projections}
        return dict(zip(shown, read_together(list(shown.values())), strict=True))

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
            model = _without_zeros(copy_of(own.model).to(dtype))
            observed = replace(observe(model, own.observed.strategy), table=own.observed.table)
            twin = CheckedModel(model, own.loss, observed, own.seed_all, precision=0.0)  # autocast leaves double alone
            with _RoundingDetector(dtype) as rounding:
                losses = twin.losses(cast(examples))[LOSSES]
        except InputError:
            raise
        except Exception as error:
            if not _is_about_precision(error):
                warnings.warn(_weakened(error), PrivacyWarning, stacklevel=2)
                break
            continue
        if losses.dtype == dtype and not rounding.seen:
            twin.seed, twin.draws = own.seed, own.draws or twin.draws
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


class _RoundingDetector(TorchFunctionMode):
    """Notices operations that leave a precision for a coarser one, such as a softmax that is always taken in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen = False
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.element_size() < self._dtype.itemsize:
            given = tree_leaves((args, kwargs))
            self.seen |= any(isinstance(leaf, Tensor) and leaf.dtype == self._dtype for leaf in given)
        return result


def refuse_if_out_of_memory(error: BaseException) -> None:
    """Raise the error again if it says that memory ran out.

    A model may raise any exception on synthetic numbers that it was not made for; such numbers are then left out of the check.
    An exception about memory says nothing about the model, and leaving something out for it would weaken the check unnoticed.
    """
    if is_out_of_memory(error):
        raise error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host, where torch raises a plain :class:`RuntimeError`."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _is_about_precision(error: BaseException) -> bool:
    """Whether the message says that an operation does not take double precision, or not together with another type."""
    words = ("double", "float64", "dtype", "datatype", "scalar type")
    return not is_out_of_memory(error) and any(word in str(error).lower() for word in words)


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Several tensors on the CPU by one copy from the device, for which the host waits once.

    For real numbers of at most double precision, which go through double unharmed.
    """
    tensors = [tensor.detach() for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors
    whole = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    pieces = whole.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape).to(tensor.dtype) for piece, tensor in zip(pieces, tensors, strict=True)]
