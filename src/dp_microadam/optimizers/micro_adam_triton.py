"""Runs MicroAdam's Triton kernels: three launches update all parameters of one dtype, however many there are.

They compute the same as the CPU kernel and as ``micro_adam_update.plain_update``. Tables of addresses are made once for a list
of parameters and made again when an address changes. A step uploads one small table and reads one number back: whether a
gradient is not finite, before anything has changed. Where one second moment serves a tensor, a few more launches and one more
read come before.

Triton is optional: without it :func:`unsupported_reason` says so and plain torch runs instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.optimizers.bias import scales
from dp_microadam.optimizers.micro_adam_state import StateFormat
from dp_microadam.optimizers.quantization import derive_key

DEVICE_TYPES = frozenset({"cuda"})
"""Types of devices whose tensors the kernels update."""

THRESHOLD_WARPS, STORE_WARPS, WINDOW_WARPS = 16, 4, 8
"""A block's magnitudes fill half of the registers of a multiprocessor, whatever the number of threads; see
``benchmarks/kernel_resources.py``."""

_MOST_DIMENSIONS = 5
_MOST_STRIDED = 2**31 - 1
"""Dimensions and coordinates of tensors that are not contiguous."""

_SHORT_BLOCK = 2048
"""Shorter blocks are selected from with fewer registers."""

_AT_ONCE = 512
"""Coordinates of a block that ``store_blocks`` handles at once."""

_MOST_ENTRIES = 512
"""Entries of a row of the window that ``apply_window`` handles at once."""


def unsupported_reason(param: Tensor, group: dict[str, Any]) -> str | None:
    """Why the kernels do not support this parameter; None if they do."""
    if param.device.type not in DEVICE_TYPES:
        return f"a parameter is on {param.device} and the kernels run on {', '.join(sorted(DEVICE_TYPES))} only"
    if group["scope"] != "block":
        return f"scope is {group['scope']!r} and the kernels support 'block' only"
    if not param.is_contiguous() and not _few_strides(param):
        shape = tuple(param.shape)
        return f"a parameter of shape {shape} is not contiguous, which the kernels support up to {_MOST_DIMENSIONS} dimensions"
    if param.is_neg():
        return "a parameter is a lazily negated view, whose memory the kernels cannot write"
    return _missing()


@lru_cache(maxsize=1)
def _missing() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'dp-microadam[gpu]')"
    from triton import knobs

    if not knobs.runtime.interpret and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, gcc or clang, and found none"
    return None


class Member(NamedTuple):
    """A parameter that is about to be updated: its local part, that of its gradient and state, and its parameter group.

    ``second_moment`` is that of the whole tensor after this step, if its group has one.
    """

    own: Tensor
    given: Tensor
    state: dict[str, Any]
    form: StateFormat
    group: dict[str, Any]
    second_moment: float | None = None


class _Kind(NamedTuple):
    """What one compiled kernel has in common."""

    device: torch.device
    dtype: torch.dtype
    strided: bool
    gradient_dtype: torch.dtype
    gradient_strided: bool
    form: StateFormat


class DeviceSteps:
    """Steps of one optimizer with the kernels; keeps the tables of its parameters from step to step."""

    def __init__(self) -> None:
        self._lists: dict[_Kind, _ParameterList] = {}
        self._tick = 0
        self._refused: dict[torch.device, Tensor] = {}
        self._moments: dict[torch.device, Tensor] = {}

    def prepare(self, members: Sequence[Member]) -> PreparedStep:
        """Start a step, which changes nothing before :meth:`PreparedStep.finish`."""
        self._tick = self._tick % (2**31 - 1) + 1
        kinds: dict[_Kind, list[Member]] = {}
        for member in members:
            member = member._replace(given=_readable(member.given))
            own, given = member.own, member.given
            strided, given_strided = not own.is_contiguous(), not given.is_contiguous()
            kind = _Kind(own.device, own.dtype, strided, given.dtype, given_strided, member.form)
            kinds.setdefault(kind, []).append(member)
        launches = []
        for kind, alike in kinds.items():
            known = self._lists.get(kind)
            identity = _identity(alike)
            if known is None or known.identity != identity:
                known = self._lists[kind] = _ParameterList(kind, alike, identity)
            launches.append(_Launch(known, known.upload(alike), alike))
        # Lists that are not used any more hold memory.
        self._lists = {kind: self._lists[kind] for kind in kinds}
        return PreparedStep(self, launches)

    def refused_on(self, device: torch.device) -> Tensor:
        """The number of the last step that was refused on a device."""
        if device not in self._refused:
            self._refused[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._refused[device]

    def moments_on(self, device: torch.device, size: int) -> Tensor:
        """Scratch memory, zero between launches."""
        found = self._moments.get(device)
        if found is None or len(found) < size:
            found = self._moments[device] = torch.zeros(size, device=device)
        return found

    @property
    def tick(self) -> int:
        """A number of the current step, never 0."""
        return self._tick


class _Launch(NamedTuple):
    """What the three launches for one kind of parameters get."""

    made: _ParameterList
    now: tuple[Tensor, Tensor]
    members: list[Member]


class PreparedStep:
    """A step that is checked and then taken, or not."""

    def __init__(self, steps: DeviceSteps, launches: list[_Launch]) -> None:
        self._steps = steps
        self._launches = launches

    def is_refused(self, limit: float) -> bool:
        """Whether a gradient is not finite or above ``limit``. Waits for the device, which also finds selection thresholds."""
        from dp_microadam.optimizers import micro_adam_triton_blocks as kernels

        flags = {launch.made.kind.device: self._steps.refused_on(launch.made.kind.device) for launch in self._launches}
        for made, (now, _), _ in self._launches:
            with _on(made.kind.device):
                kernels.find_thresholds[(made.count,)](
                    made.blocks,
                    made.params,
                    now,
                    made.thresholds,
                    flags[made.kind.device],
                    self._steps.tick,
                    limit,
                    **made.shape,
                    MANY=made.many,
                    FEW=made.few,
                    num_warps=THRESHOLD_WARPS,
                    **_EXACT,
                )
        return any(int(flag) == self._steps.tick for flag in flags.values())

    def finish(self) -> None:
        """Update parameters and states."""
        from dp_microadam.optimizers import micro_adam_triton_blocks as kernels
        from dp_microadam.optimizers.micro_adam_triton_window import apply_window

        for made, (now, settings), members in self._launches:
            kind, form = made.kind, made.kind.form
            programs = min(made.count, _programs_on(kind.device))
            common = {
                "WINDOW": form.window,
                "WIDE": form.window_dtype is torch.float32,
                "DTYPE": _in_triton(kind.dtype),
                "STRIDED": kind.strided,
                **_EXACT,
            }
            with _on(kind.device):
                kernels.store_blocks[(made.count,)](
                    made.blocks,
                    made.params,
                    now,
                    settings,
                    made.thresholds,
                    **made.shape,
                    **common,
                    AT_ONCE=made.at_once,
                    STOCHASTIC=form.rounding == "stochastic",
                    num_warps=STORE_WARPS,
                )
                apply_window[(programs,)](
                    made.blocks,
                    made.params,
                    now,
                    settings,
                    self._steps.moments_on(kind.device, programs * 2 * made.longest),
                    made.count,
                    **common,
                    LONGEST=made.longest,
                    ENTRIES=made.entries,
                    num_warps=WINDOW_WARPS,
                )
            torch._foreach_add_([member.state["step"] for member in members], 1)


class _ParameterList:
    """Tables of a list of parameters, on their device, and the sizes of its launches."""

    def __init__(self, kind: _Kind, members: list[Member], identity: list[tuple[Any, ...]]) -> None:
        self.kind, self.identity = kind, identity
        form = kind.form
        params, blocks = [], []
        self._groups = list({id(member.group): member.group for member in members}.values())
        rows = {id(group): row for row, group in enumerate(self._groups)}
        self._setting_of = [rows[id(member.group)] for member in members]
        self.longest = most_kept = 1
        strided = kind.strided or kind.gradient_strided
        for number, (member, setting) in enumerate(zip(members, self._setting_of, strict=True)):
            layout = form.layout(member.own.numel())
            addresses = [entry.data_ptr() if entry is not None else 0 for entry in _entries(member)]
            row = [member.own.data_ptr(), *addresses, member.own.numel(), layout.kept, setting]
            params.append([*row, *_sizes(member.own), *_strides(member.own)] if strided else [*row, *[0] * 9])
            for segment in layout.segments:
                self.longest, most_kept = max(self.longest, segment.length), max(most_kept, segment.kept)
                for index in range(segment.rows):
                    start, kept_before = segment.start + index * segment.length, segment.window_start + index * segment.kept
                    blocks.append([number, start, segment.length, segment.kept, kept_before])
        self.count = len(blocks)
        self.params, self.blocks = (_uploaded(np.array(table, dtype=np.int64), kind.device) for table in (params, blocks))
        self.thresholds = torch.empty(2 * self.count, dtype=torch.int32, device=kind.device)
        half = _power_of_two(form.bucket_size // 2)
        self.many = max(8, _power_of_two(-(-self.longest // form.bucket_size)))
        self.few = min(self.many, max(8, _power_of_two(_SHORT_BLOCK // form.bucket_size)))
        self.at_once = max(1, _AT_ONCE // (2 * half))
        self.entries = min(_MOST_ENTRIES, _power_of_two(most_kept))
        error = 0 if not form.error_feedback else 1 if form.quantize else 2
        self.shape = {
            "BUCKET": form.bucket_size,
            "HALF": half,
            "ERROR": error,
            "GRADIENT_DTYPE": _in_triton(kind.gradient_dtype),
            "GRADIENT_STRIDED": kind.gradient_strided,
        }

    def upload(self, members: list[Member]) -> tuple[Tensor, Tensor]:
        """What changes in every step, on the device: the tables ``now`` and ``settings``."""
        window = self.kind.form.window
        now = np.zeros((len(members), 10), dtype=np.int64)
        now[:, 0] = [member.given.data_ptr() for member in members]
        now[:, 1] = steps = torch.stack([member.state["step"] for member in members]).numpy() + 1
        if "rounding_key" in members[0].state:
            keys = torch.stack([member.state["rounding_key"] for member in members]).numpy()
            now[:, 2] = [derive_key(key, step) for key, step in zip(keys.tolist(), steps.tolist(), strict=True)]
        now[:, 3:5] = _scale_bits(
            (step, self._groups[setting], member.second_moment)
            for member, step, setting in zip(members, steps.tolist(), self._setting_of, strict=True)
        )
        if self.kind.gradient_strided:
            now[:, 5:] = [_strides(member.given) for member in members]
        settings = np.array([_settings(group, window) for group in self._groups], dtype=np.float64)
        both = np.concatenate([now.reshape(-1), settings.reshape(-1).view(np.int64)])
        table = _uploaded(both, self.kind.device)
        return table[: now.size], table[now.size :].view(torch.float64)


def _entries(member: Member) -> tuple[Tensor | None, ...]:
    """The state's tensors in the order of the table ``params``."""
    state = member.state
    return state.get("codes", state.get("error")), state.get("bounds"), state["indices"], state["values"]


def _identity(members: list[Member]) -> list[tuple[Any, ...]]:
    """All that the tables of a list are made from; they are made again when it changes."""
    return [
        (
            id(member.group),
            member.own.data_ptr(),
            member.own.shape,
            member.own.stride(),
            *[entry.data_ptr() if entry is not None else 0 for entry in _entries(member)],
        )
        for member in members
    ]


def _readable(gradient: Tensor) -> Tensor:
    """The gradient as the kernels can read it: with its actual values in memory and not too many strides."""
    # torch can apply a minus sign lazily, as in ``z.conj().imag``; memory then holds the negated values.
    gradient = gradient.detach().resolve_neg()
    return gradient if _few_strides(gradient) else gradient.contiguous()


def _few_strides(tensor: Tensor) -> bool:
    return tensor.dim() <= _MOST_DIMENSIONS and tensor.numel() <= _MOST_STRIDED


def _sizes(tensor: Tensor) -> list[int]:
    return [1] * (_MOST_DIMENSIONS - 1 - tensor.dim()) + list(tensor.shape[-(_MOST_DIMENSIONS - 1) :])


def _strides(tensor: Tensor) -> list[int]:
    if tensor.dim() > _MOST_DIMENSIONS:
        return [0] * _MOST_DIMENSIONS  # not used: it is contiguous
    return [0] * (_MOST_DIMENSIONS - tensor.dim()) + list(tensor.stride())


def _settings(group: dict[str, Any], window: int) -> list[float]:
    lr = float(group["lr"])
    powers = [beta**age for beta in group["betas"] for age in range(window)]
    return [lr, group["eps"], 1 - lr * group["weight_decay"], *powers]


def _scale_bits(arguments: Iterable[tuple[int, dict[str, Any], float | None]]) -> NDArray[np.int32]:
    """Both scales of each parameter, as the bits of float32 numbers."""
    return np.array([scales(*each) for each in arguments], dtype=np.float32).view(np.int32)


def _uploaded(table: NDArray[np.int64], device: torch.device) -> Tensor:
    """The table as a flat tensor on the device, or on the host for Triton's interpreter; the host does not wait for a copy."""
    host = torch.from_numpy(table.reshape(-1))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _power_of_two(size: int) -> int:
    """The smallest power of two of at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


@cache
def _in_triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


@cache
def _programs_on(device: torch.device) -> int:
    """Programs of ``apply_window``: one per multiprocessor, so that their scratch memory stays in the L2 cache."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_EXACT = {"num_stages": 1, "enable_fp_fusion": False}
"""Options of the compiler: products and sums are rounded one by one, as on the CPU."""
