"""MicroAdam: Adam's update from one percent of the coordinates a step, with under one byte of state per parameter.

Algorithm 1, lines 6–17, and Algorithm 2 of Hudişteanu, Kalinin and Cyffers, "DP-MicroAdam: Private and Frugal Algorithm for
Training and Fine-tuning" (2025), after Modoranu et al., "MicroAdam" (2024). Fed with privatized gradients it is DP-MicroAdam:
all of it is post-processing. ``micro_adam_reference.py`` is the same written to be read against the paper.

State of a parameter of n coordinates, in blocks of at most 32,768 of which the k largest are kept each step:

========== =========================== ==========================================================
step       one int64                   steps this parameter has taken; ring slot and ages follow from it
indices    window × kept, int16        which coordinates each of the last ``window`` steps kept, within their block
values     window × kept, bfloat16     what they were
codes      n/2 bytes                   the 4-bit error, two codes to a byte
bounds     2 × buckets, float32        smallest and largest error of each bucket
========== =========================== ==========================================================
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers import micro_adam_fused as fused_kernels
from dp_microadam.optimizers.bias import CORRECTIONS, bias_correction
from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.micro_adam_state import (
    MAX_BLOCK_SIZE,
    SCALARS,
    Entries,
    Form,
    Layout,
    Segment,
    change_of,
    entries_for,
    fits,
    misfit,
    misfit_of_contents,
    misfit_of_saved,
    own_state,
)
from dp_microadam.optimizers.quantization import (
    bucket_bounds,
    dequantize,
    derive_key,
    pack,
    quantize,
    rounding_offsets,
    unpack,
)
from dp_microadam.optimizers.selection import largest_magnitudes
from dp_microadam.optimizers.shards import is_divided, own_part, zero_rows
from dp_microadam.validation import (
    require_in_closed_open,
    require_in_open_closed,
    require_integer,
    require_non_negative,
    require_one_of,
)

_GRADIENT_LIMIT = 1e30
"""Beyond this a gradient counts as non-finite: sums of a few such values would leave float32."""

_MIN_EPS = 1e-30
"""Smaller values vanish in float32, and coordinates that never moved would divide 0 by 0."""

_CHUNK = {"cpu": 1 << 17}
_CHUNK_ON_ACCELERATORS = 1 << 22
"""Coordinates the plain torch path handles at once; bounds its scratch memory to a few times this many floats."""


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of parameters that torch can add a step to."""


class _Seen(NamedTuple):
    """What is known of a state whose contents were looked at: they are not read again until one of these changes."""

    param: Tensor  # held, so that its id stays its own
    form: Form
    size: int
    entries: Entries
    indices: Tensor
    version: int


class _Part(NamedTuple):
    """What this process has of a parameter that is about to be stepped, and of its gradient; its state if it has one."""

    param: Tensor
    own: Tensor
    given: Tensor
    state: dict[str, Any] | None
    form: Form
    position: int
    fused: bool


class MicroAdam(ExactStateOptimizer):
    """Adam over the largest coordinates of gradient plus error, its moments rebuilt from a window of sparse gradients.

    Arguments that follow Adam's: ``lr``, ``betas``, ``eps``, and ``weight_decay``, which is decoupled as in AdamW.

    Arguments:
        density: the part of each block that a step keeps.
        window: how many past steps the moments are rebuilt from.
        scope: ``"block"`` selects within blocks of ``block_size`` coordinates, ``"tensor"`` over whole tensors, as the
            paper's experiments did; indices then take four bytes instead of two.
        quantize: keep the error in 4 bits; ``False`` keeps it in float32, as the paper's experiments did.
        error_feedback: ``False`` forgets what a step did not select. For ablations.
        block_size: at most 32,768, and a multiple of ``bucket_size``.
        bucket_size: an even number; as many coordinates share a minimum and a maximum in the 4-bit error.
        window_dtype: ``torch.bfloat16``, or ``torch.float32`` for exact comparisons.
        bias_correction: ``"paper"`` divides by 1 − βᵗ although the window forgets, so v̂ settles near ``window``·(1 − β₂) of its
            dense value and steps grow over the first few thousand; ``"steady"`` takes steps of that final size from the
            start; ``"window"`` divides by 1 − β^min(t, window), which wants 6.5 times the learning rate.
        rounding: of the 4-bit error, ``"nearest"`` (Algorithm 2) or ``"stochastic"`` (the paper's appendix).
        seed: of stochastic rounding; if not given, drawn from torch's generator when a group asks for such rounding, and
            only then. Random numbers are a function of seed, parameter, step and coordinate, so they survive saving and agree
            between processes.
        fused: ``None`` runs the Numba kernel where it can (CPU, ``scope="block"``, Numba installed) and plain torch elsewhere;
            ``False`` always plain torch; ``True`` insists on the kernel.

    Of a parameter that is divided over processes (a DTensor, as FSDP2 makes them) each process steps its own part, without a
    word to the others; blocks follow the parts, so what is selected depends on the number of processes.

    A parameter without a gradient is left alone, and its window does not move. A gradient that is not finite is refused before
    anything has changed, and so is a state that does not fit its parameter and its group: ``density``, ``window``, ``scope``,
    ``quantize``, ``error_feedback``, ``block_size``, ``bucket_size``, ``window_dtype`` and ``rounding`` stay as they are once
    training has begun. Threads that share an optimizer step one after the other.

    >>> weights = torch.nn.Parameter(torch.zeros(1000))
    >>> optimizer = MicroAdam([weights], lr=0.01, density=0.1)
    >>> for _ in range(300):
    ...     weights.grad = weights.detach() - 1.0
    ...     optimizer.step()
    >>> bool((weights - 1.0).abs().mean() < 0.1)
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        density: float = 0.01,
        window: int = 10,
        scope: str = "block",
        quantize: bool = True,
        error_feedback: bool = True,
        block_size: int = MAX_BLOCK_SIZE,
        bucket_size: int = 128,
        window_dtype: torch.dtype = torch.bfloat16,
        bias_correction: str = "paper",
        rounding: str = "nearest",
        seed: int | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "density": density,
            "window": window,
            "scope": scope,
            "quantize": quantize,
            "error_feedback": error_feedback,
            "block_size": block_size,
            "bucket_size": bucket_size,
            "window_dtype": window_dtype,
            "bias_correction": bias_correction,
            "rounding": rounding,
            "seed": seed,
            "fused": fused,
        }
        _validate({**defaults, "seed": 0 if seed is None else seed})
        self._one_at_a_time = threading.RLock()
        self._forget()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        drawn = options["rounding"] == "stochastic" and options["seed"] is None
        _validate({**options, "seed": 0} if drawn else options)
        if drawn:
            # One seed for all groups: parameters have keys of their own.
            self.defaults["seed"] = param_group["seed"] = int(torch.randint(2**62, ()))
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        for param in params:
            if param.is_complex():
                self.param_groups.pop()
                raise InputError(f"a parameter has dtype {param.dtype}; MicroAdam takes real parameters")
        if len(set(params)) < len(params):
            self.param_groups.pop()
            raise InputError("a group names a parameter twice; each may be stepped once, so name it once")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # What an earlier version did before an option existed is that option's default.
        for options in (self.defaults, *self.param_groups):
            for name, value in _DEFAULT_OPTIONS.items():
                options.setdefault(name, value)
        if "_one_at_a_time" not in self.__dict__:  # unpickled, not loaded
            self._one_at_a_time = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        """Look at every option and every state again, whatever was found before."""
        self._seen: dict[int, _Seen] = {}
        self._valid: dict[int, tuple[tuple[Any, ...], Form]] = {}

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        for number, (group, given) in enumerate(zip(self.param_groups, saved["param_groups"], strict=False)):
            if "density" not in given and "window" not in given:
                raise InputError(
                    f"group {number} of the state to load has neither density nor window: it is another optimizer's; load the "
                    "state of a MicroAdam, or begin with a new one"
                )
            options = {**_DEFAULT_OPTIONS, **given}
            _validate(options)
            form = Form.of(options)
            # Where the numbers of parameters differ, the base class refuses.
            for param, name in zip(group["params"], given["params"], strict=False):
                wrong = misfit_of_saved(param, saved["state"][name], form) if saved["state"].get(name) else None
                if wrong:
                    raise InputError(f"{self._name(param)} {wrong}; nothing was loaded")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state exactly, dtypes included, and without sharing memory with ``state_dict``.

        A state that is another optimizer's, does not fit the parameters, or holds indices outside of them is refused before
        anything has changed. Options that an earlier version did not have get the values that it worked with.
        """
        with self._one_at_a_time:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state.get(param)
                    if state and param.device.type != "meta":
                        self._look_at(param, own_part(param), state, Form.of(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        with self._one_at_a_time:
            work = [
                (group, [part if part.state else self._initialize(part, group) for part in parts])
                for group, parts in self._refuse_or_prepare()
            ]
            for group, parts in work:
                pending = fused_kernels.Batch(group)
                for part in parts:
                    self._update(part, group, pending)
                pending.run()
        return loss

    def _update(self, part: _Part, group: dict[str, Any], pending: fused_kernels.Batch) -> None:
        own, common, form = part.own, part.state, part.form
        assert common is not None
        common["step"] += 1
        if own.numel() == 0:  # divided, and nothing of it is here
            return
        layout, state = form.layout(own.numel()), own_state(part.param, common, form)
        if group["weight_decay"] != 0:
            own.mul_(1 - float(group["lr"]) * group["weight_decay"])
        direct, given_directly = _is_plain(own), _is_plain(part.given)
        target = own if direct else torch.zeros(own.numel(), device=own.device)
        gradient = part.given if given_directly else part.given.float().resolve_neg().contiguous()
        if part.fused:
            pending.add(target, gradient, state, layout)
            if not direct or not given_directly:
                # Copies are used up at once: scratch memory must not grow with the model.
                pending.run()
        else:
            plain_update(target.view(-1), gradient.view(-1), state, layout, group)
            self._remember(part.param, own, common, form)
        if not direct:
            # Computed in float32, added in the wider of the two types, whatever the parameter's own.
            own.add_(target.view_as(own))

    def _initialize(self, part: _Part, group: dict[str, Any]) -> _Part:
        param, state = part.param, {}
        for name, (shape, dtype) in entries_for(param, part.form).items():
            if name in SCALARS:
                key = derive_key(group["seed"], part.position) if name == "rounding_key" else 0
                state[name] = torch.tensor(key, dtype=dtype)
            elif is_divided(param):
                state[name] = zero_rows(param, shape[-1], dtype)
            else:
                state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        self.state[param] = state
        self._remember(param, part.own, state, part.form)
        return part._replace(state=state)

    def _remember(self, param: Tensor, own: Tensor, state: dict[str, Any], form: Form) -> None:
        indices = state["indices"]
        self._seen[id(param)] = _Seen(param, form, own.numel(), entries_for(param, form), indices, _version(indices))
        if len(self._seen) > len(self.state):
            self._seen = {key: seen for key, seen in self._seen.items() if seen.param in self.state}

    def _look_at(self, param: Tensor, own: Tensor, state: dict[str, Any], form: Form) -> None:
        """Raise unless every entry of ``state`` is as the parameter and its group ask for. Runs in every step."""
        seen = self._seen.get(id(param))
        if seen is None or seen.indices is not state.get("indices"):
            wrong, known = misfit(param, state, form), False
        elif seen.form is not form and seen.form != form:
            wrong, known = change_of(seen.form, form), True
        elif seen.size != own.numel():
            wrong = f"has {own.numel()} coordinates, but its state is one of {seen.size}; make a new optimizer"
            known = True
        else:
            wrong = None if fits(param, state, seen.entries) else misfit(param, state, form)
            known = seen.version == _version(seen.indices)
        if wrong is None and not known:
            wrong = misfit_of_contents(own, own_state(param, state, form), form)
            if wrong is None:
                self._remember(param, own, state, form)
        if wrong:
            raise InputError(f"{self._name(param)} {wrong}; nothing was changed")

    def error(self, param: Tensor) -> Tensor | None:
        """What the last step left unselected and will add to the next gradient: decoded, flat, a copy; None if none is kept.

        This and the methods below see the own part of a parameter that is divided over processes.
        """
        if not self.state.get(param):
            return None
        group, own, state = self._own(param)
        if not ("error" in state or "codes" in state):
            return None
        found = torch.zeros(own.numel(), device=own.device)
        _add_error(found, 0, state, group["bucket_size"])
        return found

    def window(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates and float32 values that the last steps selected, a row per step, newest first."""
        group, own, state = self._own(param)
        step = int(state["step"])
        slots = [(step - 1 - age) % group["window"] for age in range(min(step, group["window"]))]
        coordinates = state["indices"][slots].long()
        for segment in Form.of(group).layout(own.numel()).segments:
            if segment.start + segment.rows > 1:  # else a single block, which begins at 0
                starts = torch.arange(segment.rows, device=own.device).mul_(segment.length).add_(segment.start)
                kept = slice(segment.window_start, segment.window_start + segment.rows * segment.kept)
                coordinates[:, kept].view(len(slots), segment.rows, segment.kept).add_(starts.unsqueeze(1))
        return coordinates, state["values"][slots].float()

    def _own(self, param: Tensor) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
        """The group of ``param``, what this process has of it, and of its state."""
        group = next(group for group in self.param_groups if any(other is param for other in group["params"]))
        state, own, form = self.state[param], own_part(param), Form.of(group)
        if state:
            self._look_at(param, own, state, form)
        return group, own, own_state(param, state, form)

    def state_bytes(self) -> int:
        """Bytes that the optimizer's state takes in this process, over all parameters."""
        return sum(
            own_part(value).numel() * value.element_size()
            for state in self.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    def second_moment(self, param: Tensor) -> Tensor | None:
        """v̂ as the last step used it, dense and in float32: zero where the window holds nothing; None before the first step."""
        if not self.state.get(param):
            return None
        group, own, state = self._own(param)
        found = torch.empty(own.numel(), device=own.device)
        for segment in Form.of(group).layout(own.numel()).segments:
            kept = slice(segment.window_start, segment.window_start + segment.rows * segment.kept)
            indices = state["indices"][:, kept].view(-1, segment.rows, segment.kept)
            values = state["values"][:, kept].view(-1, segment.rows, segment.kept)
            _, second = _moments_from_window(indices, values, segment.length, int(state["step"]), group)
            found[segment.start : segment.start + second.numel()] = second.view(-1)
        return found.view_as(own)

    def _refuse_or_prepare(self) -> list[tuple[dict[str, Any], list[_Part]]]:
        """What there is to step, after everything that could be refused was looked at; nothing has changed until then."""
        work = []
        position = 0
        for number, group in enumerate(self.param_groups):
            form = self._valid_form(number, group)
            parts = []
            for param in group["params"]:
                if param.grad is not None and param.numel() > 0:
                    own, given = own_part(param), own_part(param.grad)
                    unusable = _unusable(param, own, given)
                    if unusable:
                        raise InputError(f"{self._name(param)} {unusable}")
                    state = self.state.get(param)
                    if state:
                        self._look_at(param, own, state, form)
                    parts.append(_Part(param, own, given, state, form, position, _fused(own, group)))
                position += 1
            work.append((group, parts))
        here = [part for _, parts in work for part in parts if part.own.numel() > 0]
        if not here or bool((_largest([part.given for part in here]) <= _GRADIENT_LIMIT).all()):
            return work
        for part in here:
            largest = float(_largest([part.given]))
            if not largest <= _GRADIENT_LIMIT:
                raise InputError(
                    f"{self._name(part.param)} has a gradient of magnitude {largest:g}; it must be finite and at most "
                    f"{_GRADIENT_LIMIT:g}; nothing was changed"
                )
        return work

    def _valid_form(self, number: int, group: dict[str, Any]) -> Form:
        """What a group asks of states. Its options can be set at any time, past the constructor's checks."""
        options = (float(group["lr"]), *[group[name] for name in _DEFAULT_OPTIONS if name != "lr"])
        known = self._valid.get(number)
        if known is None or known[0] != options:
            _validate(group)
            self._valid[number] = known = (options, Form.of(group))
        return known[1]

    def _name(self, param: Tensor) -> str:
        number, position = next(
            (number, position)
            for number, group in enumerate(self.param_groups)
            for position, other in enumerate(group["params"])
            if other is param
        )
        return f"parameter {position} of group {number} (shape {tuple(param.shape)})"


def plain_update(target: Tensor, gradient: Tensor, state: dict[str, Any], layout: Layout, group: dict[str, Any]) -> None:
    """Lines 6–14 of Algorithm 1 in plain torch, on any device: subtract one step from ``target``, a flat float32 tensor.

    Twin of the fused kernel and its fallback. Works through chunks of blocks so that scratch memory stays bounded; with
    ``scope="tensor"`` only the accumulator is as large as the tensor.
    """
    window, bucket_size = group["window"], group["bucket_size"]
    step = int(state["step"])
    slot = (step - 1) % window
    for segment in layout.segments:
        for first, rows in _chunks(segment, target.device):
            start = segment.start + first * segment.length
            span = slice(start, start + rows * segment.length)
            kept = slice(segment.window_start + first * segment.kept, segment.window_start + (first + rows) * segment.kept)
            accumulator = gradient[span].clone()
            _add_error(accumulator, start, state, bucket_size)  # line 6
            blocks = accumulator.view(rows, segment.length)
            selected = largest_magnitudes(blocks, segment.kept)  # line 7
            state["indices"][slot, kept] = selected.view(-1).to(layout.index_dtype)  # line 8
            state["values"][slot, kept] = blocks.gather(1, selected).view(-1).to(group["window_dtype"])
            blocks.scatter_(1, selected, 0.0)  # line 9
            _store_error(accumulator, start, state, group)  # lines 10–11
            del accumulator, blocks, selected
            indices = state["indices"][:, kept].view(window, rows, segment.kept)
            values = state["values"][:, kept].view(window, rows, segment.kept)
            target[span].sub_(_step_from_window(indices, values, segment.length, step, group).view(-1))  # lines 12–14


def _chunks(segment: Segment, device: torch.device) -> Iterator[tuple[int, int]]:
    at_once = max(1, _CHUNK.get(device.type, _CHUNK_ON_ACCELERATORS) // segment.length)
    for first in range(0, segment.rows, at_once):
        yield first, min(at_once, segment.rows - first)


def _step_from_window(indices: Tensor, values: Tensor, length: int, step: int, group: dict[str, Any]) -> Tensor:
    """η·m̂/(ε_s + √v̂) of a chunk of blocks, dense."""
    first, second = _moments_from_window(indices, values, length, step, group)
    return first.div_(second.sqrt_().add_(group["eps"])).mul_(float(group["lr"]))


def _moments_from_window(
    indices: Tensor, values: Tensor, length: int, step: int, group: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """m̂ and v̂ of a chunk of blocks, dense."""
    (beta_1, beta_2), window = group["betas"], group["window"]
    slot = (step - 1) % window
    first = torch.zeros(indices.shape[1], length, device=indices.device)
    second = torch.zeros_like(first)
    for row in range(min(step, window)):
        age = (slot - row) % window
        where, what = indices[row].long(), values[row].float()
        # Indices are distinct within a row: gather and scatter add without the races of an atomic addition.
        first.scatter_(1, where, first.gather(1, where) + what * beta_1**age)
        second.scatter_(1, where, second.gather(1, where) + what.square() * beta_2**age)
    return first.mul_(bias_correction(beta_1, step, group)), second.mul_(bias_correction(beta_2, step, group))


def _add_error(accumulator: Tensor, start: int, state: dict[str, Any], bucket_size: int) -> None:
    if "error" in state:
        accumulator.add_(state["error"][start : start + len(accumulator)])
    if "codes" not in state:
        return
    for span, buckets, part in _bucket_rows(accumulator, bucket_size):
        first = (start + span.start) // bucket_size
        packed = state["codes"][(start + span.start) // 2 : (start + span.stop + 1) // 2].view(buckets, -1)
        bounds = state["bounds"][:, first : first + buckets]
        part.add_(dequantize(unpack(packed, part.shape[1]), bounds[0], bounds[1]))


def _store_error(accumulator: Tensor, start: int, state: dict[str, Any], group: dict[str, Any]) -> None:
    if "error" in state:
        state["error"][start : start + len(accumulator)] = accumulator
    if "codes" not in state:
        return
    key = derive_key(int(state["rounding_key"]), int(state["step"])) if "rounding_key" in state else None
    bucket_size = group["bucket_size"]
    for span, buckets, part in _bucket_rows(accumulator, bucket_size):
        first = (start + span.start) // bucket_size
        lower, upper = bucket_bounds(part)
        offsets = None
        if key is not None:
            offsets = rounding_offsets(key, start + span.start, part.numel(), part.device).view_as(part)
        codes = quantize(part, lower, upper, offsets)
        state["codes"][(start + span.start) // 2 : (start + span.stop + 1) // 2] = pack(codes).view(-1)
        state["bounds"][0, first : first + buckets] = lower
        state["bounds"][1, first : first + buckets] = upper


def _bucket_rows(flat: Tensor, bucket_size: int) -> Iterator[tuple[slice, int, Tensor]]:
    """``flat`` as matrices with a bucket per row: the full buckets, a bounded number at a time, then the shorter last one."""
    full = len(flat) // bucket_size * bucket_size
    at_once = _CHUNK.get(flat.device.type, _CHUNK_ON_ACCELERATORS) // bucket_size * bucket_size or bucket_size
    for begin in range(0, full, at_once):
        span = slice(begin, min(begin + at_once, full))
        rows = (span.stop - span.start) // bucket_size
        yield span, rows, flat[span].view(rows, bucket_size)
    if full < len(flat):
        yield slice(full, len(flat)), 1, flat[full:].view(1, -1)


def _largest(gradients: list[Tensor]) -> Tensor:
    """Largest magnitude of each gradient; NaN if it holds one."""
    # aminmax is the one reduction of torch's that reads a tensor once, at the speed of memory.
    ends = [end for gradient in gradients for end in torch.aminmax(gradient.detach())]
    return torch.stack([end.to(ends[0].device, torch.float32) for end in ends]).view(-1, 2).abs().amax(dim=1)


def _fused(param: Tensor, group: dict[str, Any]) -> bool:
    if group["fused"] is False:
        return False
    obstacle = fused_kernels.obstacle(param, group)
    if obstacle and group["fused"]:
        raise InputError(f"fused is True, but {obstacle}; use fused=None or fused=False")
    return obstacle is None


def _unusable(param: Tensor, own: Tensor, given: Tensor) -> str | None:
    """Why a parameter cannot be stepped with its gradient, as the rest of a sentence that begins with the parameter."""
    if given.layout is not torch.strided:
        return "has a sparse gradient; MicroAdam takes dense ones"
    if own.layout is not torch.strided or own.dtype not in _DTYPES:
        return f"is {own.layout} and {own.dtype}; MicroAdam takes dense parameters of float16, bfloat16, float32 and float64"
    if is_divided(param) and getattr(param.grad, "placements", None) != param.placements:  # type: ignore[attr-defined]
        return "and its gradient must be divided over processes alike"
    if given.shape != own.shape or given.device != own.device:
        return (
            f"has a gradient of shape {tuple(given.shape)} on {given.device}; it must have the shape {tuple(own.shape)} and be "
            f"on {own.device}, as the parameter itself"
        )
    if own.device.type == "meta":
        return "is on the meta device, where there are no numbers; move the model to a device first"
    if own.numel() and not (own.data_ptr() and given.data_ptr()):
        return "or its gradient has no memory behind it; its storage was freed, or it is a wrapper around other tensors"
    if not own.is_contiguous() and any(stride == 0 < size - 1 for size, stride in zip(own.shape, own.stride(), strict=True)):
        return "is expanded: several coordinates share one number; use .clone()"
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers at its address are its own, one after the other, in float32."""
    # A minus sign can be lazy, as in ``z.conj().imag``: it does not show in memory.
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_neg()


def _version(tensor: Tensor) -> int:
    """How often torch has written to ``tensor``; tensors made in inference mode do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def _validate(options: dict[str, Any]) -> None:
    require_non_negative("lr", float(options["lr"]))
    for name, beta in zip(("betas[0]", "betas[1]"), options["betas"], strict=True):
        require_in_closed_open(name, beta, 0.0, 1.0)
    if not _MIN_EPS <= options["eps"] < math.inf:
        raise InputError(f"eps is {options['eps']}; it must be a finite number of at least {_MIN_EPS:g}")
    require_non_negative("weight_decay", options["weight_decay"])
    require_in_open_closed("density", options["density"], 0.0, 1.0)
    require_integer("window", options["window"], 1)
    require_one_of("scope", options["scope"], ("block", "tensor"))
    require_integer("bucket_size", options["bucket_size"], 2)
    if options["bucket_size"] % 2:
        raise InputError(f"bucket_size is {options['bucket_size']}; it must be even, as two codes share a byte")
    require_integer("block_size", options["block_size"], 2, MAX_BLOCK_SIZE)
    if options["block_size"] % options["bucket_size"]:
        raise InputError(
            f"block_size is {options['block_size']}; it must be a multiple of bucket_size, {options['bucket_size']}"
        )
    if options["window_dtype"] not in (torch.bfloat16, torch.float32):
        raise InputError(f"window_dtype is {options['window_dtype']}; it must be torch.bfloat16 or torch.float32")
    require_one_of("bias_correction", options["bias_correction"], CORRECTIONS)
    require_one_of("rounding", options["rounding"], ("nearest", "stochastic"))
    if options["seed"] is not None or options["rounding"] == "stochastic":
        require_integer("seed", options["seed"], 0)


_DEFAULT_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(MicroAdam.__init__).parameters.items()
    if name not in ("self", "params")
}
