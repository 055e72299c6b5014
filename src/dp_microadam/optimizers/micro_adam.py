"""MicroAdam: a sparse Adam with error feedback, whose state takes less than one byte per parameter.

Algorithm 1, lines 6–17, and Algorithm 2 of Hudişteanu, Kalinin and Cyffers, "DP-MicroAdam: Private and Frugal Algorithm for
Training and Fine-tuning" (2025), after Modoranu et al., "MicroAdam" (2024), and by default a variant of it that loses less of a
signal under noise: ten times as many coordinates, applied at once and in proportion to their values (``docs/optimizer.md``). On
privatized gradients it is DP-MicroAdam: the whole optimizer is post-processing. ``micro_adam_reference.py`` is the same
algorithm, written to be compared with the paper.

State of a parameter with n coordinates, in blocks of at most 32,768 coordinates, of which each step keeps the k largest:

========== =========================== ==========================================================
step       one int64                   updates of this parameter so far; determines ring slot and ages
indices    window × kept, int16        coordinates kept in each of the last ``window`` steps, within their block
values     window × kept, bfloat16     their values
codes      n/2 bytes                   the residual in 4 bits, two codes per byte
bounds     2 × buckets, float32        smallest and largest residual of each bucket
second_    one float32                 average of g² over the tensor and past steps, if it is not computed from the window
moment
========== =========================== ==========================================================
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers import micro_adam_fused as fused_kernels
from dp_microadam.optimizers import micro_adam_triton as device_kernels
from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.micro_adam_checked_states import CheckedStates
from dp_microadam.optimizers.micro_adam_checks import (
    GRADIENT_LIMIT,
    is_plain,
    largest_magnitude_of_each,
    unusable_reason,
    uses_kernel,
    validate_options,
)
from dp_microadam.optimizers.micro_adam_prepared import PreparedGroup, prepare
from dp_microadam.optimizers.micro_adam_state import (
    MAX_BLOCK_SIZE,
    SCALARS,
    StateFormat,
    entries_for,
    local_state,
    saved_state_mismatch,
)
from dp_microadam.optimizers.micro_adam_update import plain_update
from dp_microadam.optimizers.micro_adam_views import decoded_residual, dense_second_moment, selected
from dp_microadam.optimizers.quantization import derive_key
from dp_microadam.optimizers.shards import is_sharded, local_shard, sharded_zeros
from dp_microadam.optimizers.tensor_moment import averaged


class _LocalPart(NamedTuple):
    """The local part of a parameter that is about to be updated, and of its gradient, with its state if it has one."""

    param: Tensor
    own: Tensor
    given: Tensor
    state: dict[str, Any] | None
    form: StateFormat
    position: int
    fused: bool
    second_moment: float | None = None  # of the whole tensor after this step, if its group has one

    @property
    def on_device(self) -> bool:
        """Whether the Triton kernels update it, which check gradients themselves."""
        return self.fused and self.own.device.type in device_kernels.DEVICE_TYPES


_Work = list[tuple[dict[str, Any], list[_LocalPart] | PreparedGroup]]


class MicroAdam(ExactStateOptimizer):
    """Adam on the top-k coordinates of gradient plus residual (error feedback), divided by one second moment per tensor.

    Each step adds the residual to the gradient, moves the coordinates of largest magnitude, and stores the rest as the new
    residual. ``density=0.01, window=10, second_moment="coordinate", bias_correction="paper"`` is the paper's optimizer: Adam's
    moments of every coordinate, not stored, but computed from the sparse gradients of the last ``window`` steps.

    ``lr``, ``betas`` and ``eps`` are Adam's; ``weight_decay`` is decoupled as in AdamW.

    Arguments:
        density: the fraction of each block that a step keeps.
        window: the number of past steps whose selected values a step applies, with weights β₁ to the power of their age.
        second_moment: ``"tensor"`` divides by the root of one number, the bias-corrected average of g² over the tensor (that of
            the local shard, if it is sharded) and over past steps, so that steps are proportional to what was selected;
            ``"coordinate"`` by Adam's v̂ of each coordinate, from the window.
        scope: ``"block"`` selects within blocks of ``block_size`` coordinates, ``"tensor"`` over whole tensors, as in the
            paper's experiments; indices then take four bytes instead of two.
        quantize: store the residual in 4 bits; ``False`` stores it in float32, as in the paper's experiments.
        error_feedback: ``False`` discards what a step did not select. For ablations.
        block_size: coordinates per block, at most 32,768 and a multiple of ``bucket_size``.
        bucket_size: the number of coordinates, even, that share a minimum and a maximum in the 4-bit residual.
        window_dtype: ``torch.bfloat16``, or ``torch.float32`` for exact comparisons.
        bias_correction: of moments from the window. ``"paper"`` divides by 1 − βᵗ although the window forgets, so v̂ settles
            near ``window``·(1 − β₂) of its dense value and steps grow over the first few thousand; ``"steady"`` takes steps of
            that final size from the start, which suits short runs; ``"window"`` divides by 1 − β^min(t, window), which needs
            6.5 times the learning rate with a window of ten.
        rounding: rounding of the 4-bit residual, ``"nearest"`` (Algorithm 2) or ``"stochastic"`` (the paper's appendix).
        seed: seed of stochastic rounding. By default it is drawn from torch's generator, but only if a group uses stochastic
            rounding. Random numbers are a function of seed, parameter, step and coordinate, so they are the same after loading
            a state and on every rank.
        fused: ``None`` uses a compiled kernel where it can (``scope="block"``; Numba on the CPU, Triton on CUDA, if installed)
            and plain torch elsewhere; ``False`` always uses plain torch; ``True`` requires a kernel.

    Sharded parameters (DTensors, as FSDP2 creates them): each rank updates its own shard; no communication is needed. Blocks do
    not cross shards, so the selection depends on the world size.

    A parameter without a gradient is skipped, and its window does not advance. A gradient that is not finite is refused before
    anything has changed. So is a state that does not match its parameter and its group: ``density``, ``window``,
    ``second_moment``, ``scope``, ``quantize``, ``error_feedback``, ``block_size``, ``bucket_size``, ``window_dtype`` and
    ``rounding`` cannot be changed once training has begun. ``step`` is thread-safe.

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
        density: float = 0.1,
        window: int = 1,
        second_moment: str = "tensor",
        scope: str = "block",
        quantize: bool = True,
        error_feedback: bool = True,
        block_size: int = MAX_BLOCK_SIZE,
        bucket_size: int = 128,
        window_dtype: torch.dtype = torch.bfloat16,
        bias_correction: str = "steady",
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
            "second_moment": second_moment,
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
        validate_options({**defaults, "seed": 0 if seed is None else seed})
        self._lock = threading.RLock()
        self._forget()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        drawn = options["rounding"] == "stochastic" and options["seed"] is None
        validate_options({**options, "seed": 0} if drawn else options)
        if drawn:
            # One seed for all groups is enough: each parameter derives its own key.
            self.defaults["seed"] = param_group["seed"] = int(torch.randint(2**62, ()))
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        for param in params:
            if param.is_complex():
                self.param_groups.pop()
                raise InputError(f"a parameter has dtype {param.dtype}; MicroAdam takes real parameters")
        if len(set(params)) < len(params):
            self.param_groups.pop()
            raise InputError("a group contains a parameter twice; it must contain each parameter once")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # States of earlier versions lack newer options.
        for options in (self.defaults, *self.param_groups):
            for name, value in _OF_EARLIER_VERSIONS.items():
                options.setdefault(name, value)
        if "_lock" not in self.__dict__:  # unpickled, not loaded
            self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        """Forget which options and states were checked, so that all are checked again."""
        self._checked = CheckedStates()
        self._device_steps = device_kernels.DeviceSteps()
        self._valid: dict[int, tuple[tuple[Any, ...], StateFormat]] = {}
        self._prepared: dict[int, PreparedGroup | None] = {}

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        for number, (group, given) in enumerate(zip(self.param_groups, saved["param_groups"], strict=False)):
            if "density" not in given and "window" not in given:
                raise InputError(
                    f"group {number} of the state to load has neither density nor window, so it is from another optimizer; "
                    "load the state of a MicroAdam, or start with a new one"
                )
            options = {**_OF_EARLIER_VERSIONS, **given}
            validate_options(options)
            form = StateFormat.of(options)
            # A different number of parameters is refused by the base class.
            for param, name in zip(group["params"], given["params"], strict=False):
                wrong = saved_state_mismatch(param, saved["state"][name], form) if saved["state"].get(name) else None
                if wrong:
                    raise InputError(f"{self._name(param)} {wrong}; nothing was loaded")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state exactly, including dtypes, without sharing memory with ``state_dict``.

        A state that is from another optimizer, does not match the parameters, or contains invalid indices is refused before
        anything has changed. Options that an earlier version did not have get the values that reproduce its behaviour.
        """
        with self._lock:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state.get(param)
                    if state and param.device.type != "meta":
                        self._check_state(param, local_shard(param), state, StateFormat.of(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        with self._lock:
            checked = self._check_and_prepare()
            work: _Work = [
                (group, parts if isinstance(parts, PreparedGroup) else self._with_states(parts, group))
                for group, parts in checked
            ]
            self._update_on_device(checked, work)
            for number, (group, parts) in enumerate(work):
                if isinstance(parts, PreparedGroup):
                    parts.run(group)
                    continue
                pending = fused_kernels.Batch(group)
                for part in parts:
                    if not part.on_device:
                        self._update(part, group, pending)
                pending.run()
                on_cpu = all(part.fused and not part.on_device for part in parts)
                self._prepared[number] = prepare(group, self.state) if on_cpu else None
        return loss

    def _update_on_device(self, checked: _Work, work: _Work) -> None:
        """Update what the Triton kernels update, unless a gradient is refused: then nothing at all is changed."""
        taken = [(group, part) for group, parts in work if isinstance(parts, list) for part in parts if part.on_device]
        if not taken:
            return
        members = [
            device_kernels.Member(
                part.own,
                part.given,
                local_state(part.param, part.state, part.form),
                part.form,
                group,
                part.second_moment,
            )
            for group, part in taken
            if part.state is not None and part.own.numel() > 0
        ]
        steps = self._device_steps.prepare(members)
        if steps.is_refused(GRADIENT_LIMIT):
            given = [part for _, parts in checked if isinstance(parts, list) for part in parts]
            for part in given:
                if not part.state:
                    del self.state[part.param]
            self._refuse_gradients([part for part in given if part.own.numel() > 0])
        steps.finish()
        for _, part in taken:
            _keep_second_moment(part)
            if part.own.numel() == 0:  # sharded, and this rank's shard is empty
                part.state["step"] += 1  # type: ignore[index]

    def _update(self, part: _LocalPart, group: dict[str, Any], pending: fused_kernels.Batch) -> None:
        own, common, form = part.own, part.state, part.form
        assert common is not None
        common["step"] += 1
        _keep_second_moment(part)
        if own.numel() == 0:  # sharded, and this rank's shard is empty
            return
        layout, state = form.layout(own.numel()), local_state(part.param, common, form)
        if group["weight_decay"] != 0:
            own.mul_(1 - float(group["lr"]) * group["weight_decay"])
        direct, given_directly = is_plain(own), is_plain(part.given)
        target = own if direct else torch.zeros(own.numel(), device=own.device)
        gradient = part.given if given_directly else part.given.float().resolve_neg().contiguous()
        if part.fused:
            pending.add(target, gradient, state, layout, part.second_moment)
            if not direct or not given_directly:
                # Run now, so that copies can be freed: scratch memory must not grow with the model.
                pending.run()
        else:
            plain_update(target.view(-1), gradient.view(-1), state, layout, group, part.second_moment)
            self._remember(part.param, own, common, form)
        if not direct:
            # Computed in float32, added in the wider of that and the parameter's dtype.
            own.add_(target.view_as(own))

    def _with_states(self, parts: list[_LocalPart], group: dict[str, Any]) -> list[_LocalPart]:
        """The parts with their states, new ones where they had none, and the second moments that they will have."""
        parts = [self._with_state(part, group) for part in parts]
        if group["second_moment"] != "tensor":
            return parts
        present = [part for part in parts if part.own.numel() > 0]
        before = [_own_second_moment(part) for part in present]
        moments = iter(averaged([part.given for part in present], before, group["betas"][1]))
        return [part._replace(second_moment=next(moments)) if part.own.numel() > 0 else part for part in parts]

    def _with_state(self, part: _LocalPart, group: dict[str, Any]) -> _LocalPart:
        if part.state:
            return part
        param, state = part.param, {}
        for name, (shape, dtype) in entries_for(param, part.form).items():
            if name in SCALARS:
                key = derive_key(group["seed"], part.position) if name == "rounding_key" else 0
                state[name] = torch.tensor(key, dtype=dtype)
            elif is_sharded(param):
                state[name] = sharded_zeros(param, shape[-1], dtype)
            else:
                state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        self.state[param] = state
        self._remember(param, part.own, state, part.form)
        return part._replace(state=state)

    def _remember(self, param: Tensor, own: Tensor, state: dict[str, Any], form: StateFormat) -> None:
        self._checked.remember(param, own, state, form)
        self._checked.forget_others(self.state, len(self.state))

    def _check_state(self, param: Tensor, own: Tensor, state: dict[str, Any], form: StateFormat) -> None:
        """Raise unless every entry of ``state`` matches the parameter and the options of its group. Runs in every step."""
        wrong = self._checked.mismatch(param, own, state, form)
        if wrong:
            raise InputError(f"{self._name(param)} {wrong}; nothing was changed")

    def residual(self, param: Tensor) -> Tensor | None:
        """The residual of error feedback: what the last step did not select and the next one adds to the gradient.

        A flat, decoded copy; None before the first step and without error feedback. For a sharded parameter this and the
        methods below return values of the local shard.
        """
        if not self.state.get(param):
            return None
        return decoded_residual(*self._own(param))

    def error(self, param: Tensor) -> Tensor | None:
        """Deprecated name of :meth:`residual`."""
        warnings.warn("MicroAdam.error is deprecated; use MicroAdam.residual", DeprecationWarning, stacklevel=2)
        return self.residual(param)

    def window(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """The coordinates and float32 values selected by the last steps, one row per step, newest first."""
        return selected(*self._own(param))

    def _own(self, param: Tensor) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
        """The group of ``param``, its local shard, and the state of that."""
        group = next(group for group in self.param_groups if any(other is param for other in group["params"]))
        state, own, form = self.state[param], local_shard(param), StateFormat.of(group)
        if state:
            self._check_state(param, own, state, form)
        return group, own, local_state(param, state, form)

    def state_bytes(self) -> int:
        """Size of the optimizer state in this process, in bytes."""
        return sum(
            local_shard(value).numel() * value.element_size()
            for state in self.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    def second_moment(self, param: Tensor) -> Tensor | None:
        """v̂ of the last step, dense and in float32; None before the first step.

        With ``second_moment="coordinate"`` it is zero for coordinates not in the window.
        """
        if not self.state.get(param):
            return None
        return dense_second_moment(*self._own(param))

    def _check_and_prepare(self) -> _Work:
        """Check options, gradients and states, then return the parameters to update; nothing is changed if one is refused."""
        work: _Work = []
        position = 0
        for number, group in enumerate(self.param_groups):
            form, prepared = self._valid_form(number, group), self._prepared.get(number)
            if (
                prepared is not None
                and prepared.unchanged(group, form, self.state)
                and prepared.gradients_within(GRADIENT_LIMIT)
            ):
                work.append((group, prepared))
            else:
                work.append((group, self._checked_parts(group, form, position)))
            position += len(group["params"])
        return work

    def _checked_parts(self, group: dict[str, Any], form: StateFormat, position: int) -> list[_LocalPart]:
        """The parameters of a group that have a gradient; the first of them has this ``position`` among those of all groups."""
        parts = []
        for number, param in enumerate(group["params"], start=position):
            if param.grad is not None and param.numel() > 0:
                own, given = local_shard(param), local_shard(param.grad)
                unusable = unusable_reason(param, own, given)
                if unusable:
                    raise InputError(f"{self._name(param)} {unusable}")
                state = self.state.get(param)
                if state:
                    self._check_state(param, own, state, form)
                parts.append(_LocalPart(param, own, given, state, form, number, uses_kernel(own, group)))
        here = [part for part in parts if part.own.numel() > 0 and not part.on_device]
        if here and not bool((largest_magnitude_of_each([part.given for part in here]) <= GRADIENT_LIMIT).all()):
            self._refuse_gradients(here)
        return parts

    def _refuse_gradients(self, parts: list[_LocalPart]) -> None:
        """Raise for the first gradient that is not finite or too large."""
        for part in parts:
            largest = float(largest_magnitude_of_each([part.given]))
            if not largest <= GRADIENT_LIMIT:
                raise InputError(
                    f"{self._name(part.param)} has a gradient of magnitude {largest:g}; it must be finite and at most "
                    f"{GRADIENT_LIMIT:g}; nothing was changed"
                )

    def _valid_form(self, number: int, group: dict[str, Any]) -> StateFormat:
        """The state format of a group. Its options are validated here, since they can be set at any time after construction."""
        options = (float(group["lr"]), *[group[name] for name in _OF_EARLIER_VERSIONS if name != "lr"])
        known = self._valid.get(number)
        if known is None or known[0] != options:
            validate_options(group)
            self._valid[number] = known = (options, StateFormat.of(group))
        return known[1]

    def _name(self, param: Tensor) -> str:
        number, position = next(
            (number, position)
            for number, group in enumerate(self.param_groups)
            for position, other in enumerate(group["params"])
            if other is param
        )
        return f"parameter {position} of group {number} (shape {tuple(param.shape)})"


def _own_second_moment(part: _LocalPart) -> Tensor:
    assert part.state is not None
    found: Tensor = local_state(part.param, part.state, part.form)["second_moment"]
    return found


def _keep_second_moment(part: _LocalPart) -> None:
    if part.second_moment is not None:
        _own_second_moment(part).fill_(part.second_moment)


_OF_EARLIER_VERSIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(MicroAdam.__init__).parameters.items()
    if name not in ("self", "params")
} | {"bias_correction": "paper", "density": 0.01, "window": 10, "second_moment": "coordinate"}
