"""Passes without side effects, and random numbers that are the same for every example."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dp_microadam.errors import InputError

SeedAll = Callable[[int], None]


@contextmanager
def no_side_effects(model: nn.Module) -> Iterator[SeedAll]:
    """Restore random streams, training modes and gradients on exit; yields a function that seeds all random streams.

    The streams are those a model may draw from: torch's on the CPU and on the model's GPUs, Python's and NumPy's.
    Parameters and buffers are checked and restored by ``state.py``.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        for index in gpus:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global stream is the one a model may use

    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=gpus):
        try:
            yield seed_all
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


class SeededPasses:
    """Passes that start from one seed. Refuses code that sets the seed of a global random stream by itself.

    In a private step those streams are unpredictable. torch's generators remember their seed. Those of Python and NumPy do
    not: there, passes that start from different seeds and end in the same state show it.

    Attributes:
        draws: whether a pass has drawn random numbers so far.
        comparable: whether all draws could be made equal for batches of different sizes.
    """

    def __init__(self, model: nn.Module, seed_all: SeedAll, what: str) -> None:
        self.draws = False
        self.comparable = True
        self._model, self._seed_all, self._what = model, seed_all, what
        self._ends: dict[tuple[str, int], int] = {}

    @contextmanager
    def one(self, seed: int, *, equal_draws: bool = False) -> Iterator[None]:
        """One pass; with ``equal_draws`` all examples have the same random numbers of torch, whatever their number."""
        self._seed_all(seed)
        torch_start, python_start = torch_random_state(self._model), python_random_state()
        mode = EqualDraws(lambda: self._seed_all(seed))
        with mode if equal_draws else nullcontext():
            yield
        drew_elsewhere = python_random_state() != python_start
        self.draws |= drew_elsewhere or torch_random_state(self._model) != torch_start
        self.comparable &= not (drew_elsewhere or mode.ended)
        self._refuse_seeding(seed)

    def _refuse_seeding(self, seed: int) -> None:
        gpus = {p.device.index for p in self._model.parameters() if p.device.type == "cuda"}
        generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)]
        if any(generator.initial_seed() != seed for generator in generators):
            raise self._refusal("torch's random seed (torch.manual_seed)")
        python, *numpy = python_random_state()
        for call, state in (("random.seed", python), ("numpy.random.seed", tuple(numpy))):
            if self._ends.setdefault((call, hash(state)), seed) != seed:
                raise self._refusal(f"the seed of a global random stream ({call})")

    def _refusal(self, seed: str) -> InputError:
        return InputError(
            f"{self._what} sets {seed}, so that examples would share predictable draws; remove it, and draw from the global "
            "generators as they are"
        )


def torch_random_state(model: nn.Module) -> list[Any]:
    """The state of torch's generators; a pass that changes it has drawn random numbers."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.numpy().tobytes() for state in states]


def python_random_state() -> tuple[Any, ...]:
    """The state of the global generators of Python and NumPy."""
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 - the global stream
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]


_aten = torch.ops.aten
_SHAPED_BY_A_LIST = {_aten.rand, _aten.randn, _aten.randint}
_SHAPED_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like}
_FILLING = ("uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_")
_IN_PLACE = {getattr(_aten, name) for name in _FILLING}
_DRAWS = {_aten.randperm, _aten.bernoulli, _aten.bernoulli_, *_SHAPED_BY_A_LIST, *_SHAPED_LIKE, *_IN_PLACE}

# Code that draws until the result satisfies a condition would not end on equal numbers; after so many draws it gets others.
_EQUAL_DRAWS = 5_000


class EqualDraws(TorchDispatchMode):
    """Context manager in which torch's random numbers depend neither on the batch size nor on the place in the batch.

    Every random tensor is filled with one number, drawn after ``restart``; a random permutation is the identity, and nothing
    is dropped out. So batches of different sizes can be compared, in whatever dimension the examples are.
    """

    def __init__(self, restart: Callable[[], None]) -> None:
        super().__init__()
        self._restart = restart
        self._draws = 0
        self._no_dropout = _NoAttentionDropout()

    @property
    def ended(self) -> bool:
        """Whether there were so many draws that the last ones were no longer equal."""
        return self._draws > _EQUAL_DRAWS

    def __enter__(self) -> Any:
        self._no_dropout.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._no_dropout.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if operation is _aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if operation not in _DRAWS:
            return func(*args, **kwargs)
        self._draws += 1
        if not self.ended:
            self._restart()
        if operation is _aten.randperm:
            result = func(*args, **kwargs)
            return torch.arange(len(result), dtype=result.dtype, device=result.device)
        if operation in _IN_PLACE:
            return args[0].copy_(func(args[0].new_empty(()), *args[1:], **kwargs).expand_as(args[0]))
        if operation in _SHAPED_LIKE:
            return func(args[0].new_empty(()), *args[1:], **kwargs).expand(args[0].shape).clone()
        if operation in _SHAPED_BY_A_LIST:
            size = next(value for value in args if isinstance(value, list | tuple))
            return func(*([] if value is size else value for value in args), **kwargs).expand(tuple(size)).clone()
        in_place = operation is _aten.bernoulli_
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if in_place else args[0])
        value = (torch.rand((), device=args[0].device) < chance).to(args[0].dtype).expand(args[0].shape)
        return args[0].copy_(value) if in_place else value.clone()


class _NoAttentionDropout(TorchFunctionMode):
    """Attention drops out inside a fused kernel, where no dispatch mode sees it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:
            args = (*args[:10], 0.0, *args[11:])
        return func(*args, **kwargs)
