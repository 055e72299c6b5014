"""Distributed training on torch.distributed: data-parallel ranks with sharded sampling and noise.

Each rank samples from its own shard of the examples with the common rate, clips and sums, and adds the noise of its own slice
of the coordinates. The sums are all-reduced once per step, and all ranks take the same optimizer step. Rank 0 writes the run's
folder.

Messages about the run itself (a step was recorded, a rank failed) use gloo even if gradients use NCCL: when a process dies its
connections close, and the other ranks notice at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError
from dp_microadam.ledger.ledger import library_versions

Answer = TypeVar("Answer")

_BUCKET = 1 << 24
"""Numbers per all-reduce; bounds the buffer they are gathered into."""


class ProcessLost(DPMicroAdamError):
    """Another rank failed or was lost, so this one cannot continue."""


class Ranks:
    """Rank, world size and collective operations of a run: of a single process by default; :meth:`of_torch` gives several."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._messages: dist.ProcessGroup | None = None
        """The group for messages on the CPU; None for the default one."""

    @classmethod
    def of_torch(cls) -> Ranks:
        """The ranks of torch's default process group, which must be initialised. Call it on all ranks at the same point."""
        found = cls(dist.get_rank(), dist.get_world_size())
        if "gloo" not in str(dist.get_backend_config()):  # the default group was initialised for CUDA only
            found._messages = dist.new_group(backend="gloo")
        return found

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes the run's folder and shows progress."""
        return self.rank == 0

    def shard(self, count: int) -> range:
        """This rank's shard of ``count`` examples.

        Formal guarantees: the shards of all ranks are a partition: disjoint, and every example is in one of them. Their sizes
        differ by at most one; nothing is repeated to make them equal.

        >>> [list(Ranks(rank, 3).shard(7)) for rank in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)

    def noise_slice(self, count: int, *, private: bool) -> range:
        """The coordinates, of ``count``, that this rank adds noise to; with a fixed seed rank 0 adds all, to be reproducible.

        Formal guarantees: the slices of all ranks are a partition. In a private run none is longer than ⌈count / world size⌉.
        """
        return self.shard(count) if private else range(count if self.main else 0)

    def sum_(self, tensors: Mapping[str, Tensor], noised: range | None = None) -> None:
        """All-reduce, in the order of names: replace each tensor by its sum over all ranks, bitwise the same on each of them.

        ``noised`` are those of all coordinates, in that order, to which this rank added noise.

        Formal guarantees: nothing is reduced unless all ranks have tensors of the same names, shapes and dtypes and, if
        ``noised`` is given, each coordinate is in that of exactly one rank.

        Raises on every rank InputError if tensors differ, PrivacyError if a coordinate has noise from none or from several.
        """
        agreed = self._agreed(tensors, noised)
        for bucket in _buckets(agreed) if self.world_size > 1 else ():
            flat = bucket[0].view(-1) if len(bucket) == 1 and bucket[0].is_contiguous() else _flatten_dense_tensors(bucket)
            with _heard():
                dist.all_reduce(flat, group=self._group_of(flat))
            if flat.data_ptr() != bucket[0].data_ptr():
                torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))

    def broadcast_(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast, in the order of names: replace each tensor by that of rank 0. Raises what :meth:`sum_` raises."""
        for tensor in self._agreed(tensors) if self.world_size > 1 else ():
            whole = tensor.detach().contiguous()
            with _heard():
                dist.broadcast(whole, 0, group=self._group_of(whole))
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

    def _agreed(self, tensors: Mapping[str, Tensor], noised: range | None = None) -> list[Tensor]:
        """The tensors in the order of their names, once all ranks are known to have the same, and one owner of each noise."""
        names, count = sorted(tensors), sum(tensor.numel() for tensor in tensors.values())
        layout = repr((noised is None, [(name, *_described(tensors[name])) for name in names] if self.world_size > 1 else []))
        digest = blake2b(layout.encode(), digest_size=8)
        found = self._numbers_of_all(_number(digest), *((0, 0) if noised is None else (noised.start, noised.stop)))
        if len({each[0] for each in found}) > 1:
            raise InputError(
                f"the processes of this run have different tensors to combine ({len(names)} with {count} numbers on rank "
                f"{self.rank}); names, shapes and dtypes must be the same in all of them"
            )
        covered = 0
        for start, stop in sorted((start, stop) for _, start, stop in found if start < stop):
            covered = stop if start == covered else -1
        if noised is not None and covered != count:
            raise PrivacyError(
                f"the noise of this run's processes does not cover each of {count} coordinates exactly once; nothing was summed"
            )
        return [tensors[name] for name in names]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over all ranks."""
        summed = torch.tensor(numbers, dtype=torch.float64)
        self.sum_({"numbers": summed})
        return list(map(float, summed))

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return max(self._numbers_of_all(int(flag))) > [0]

    def gather(self, value: Answer) -> list[Answer]:
        """The values of all ranks, in their order. It may be called within :meth:`together`."""
        with self.together():  # a rank that failed before is noticed here: all ranks meet in the same operation
            pass
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            with _heard():
                dist.all_gather_object(values, value, group=self._messages)
        return values

    def _numbers_of_all(self, *own: int) -> list[list[int]]:
        """These whole numbers of each rank."""
        if self.world_size == 1:
            return [list(own)]
        found = [torch.zeros(len(own), dtype=torch.int64) for _ in range(self.world_size)]
        with _heard():
            dist.all_gather(found, torch.tensor(own), group=self._messages)
        return [each.tolist() for each in found]

    def from_main(self, work: Callable[[], Answer]) -> Answer:
        """Call ``work`` on rank 0 only; all ranks return its result, or raise its error."""
        if self.world_size == 1:
            return work()
        message: list[Any] = [None, None]
        own: Exception | None = None
        if self.main:
            try:
                message[0] = work()
            except Exception as error:
                own = error
                lost = ProcessLost(f"rank 0 failed ({type(error).__name__}) and reports the reason; this process stops too")
                message[1] = error if isinstance(error, DPMicroAdamError) else lost
        with _heard():
            dist.broadcast_object_list(message, 0, group=self._messages)
        if own or message[1]:
            raise own or message[1]
        answer: Answer = message[0]
        return answer

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block of work without communication. If it fails on one rank, all ranks raise an error at its end."""
        try:
            yield
        except ProcessLost:
            raise
        except Exception:
            with suppress(ProcessLost):
                self.any(True)
            raise
        if self.any(False):
            raise ProcessLost("another process of this run failed and reports the reason; this one stops too")

    @contextmanager
    def one_per_machine_first(self) -> Iterator[None]:
        """A block that one rank per machine runs before the others, so that they find what it downloaded."""
        first = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        with self.together():
            if first:
                yield
        if not first:
            yield

    def require_same(self, what: str, value: Any) -> None:
        """Raise InputError on every rank unless ``value`` is the same on all.

        Of a mapping, which must be public, it quotes the first entry that differs.
        """
        theirs = self.from_main(lambda: value)
        if self.any(value != theirs):
            example = next(filter(None, self.gather(_difference(theirs, value, self.rank))), "")
            raise InputError(f"the processes of this run differ in {what}{example}; this must be the same in all of them")

    def alike(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all ranks have bitwise the same tensors, judged by a 64-bit checksum."""
        own = blake2b(digest_size=8)
        for tensor in tensors if self.world_size > 1 else ():
            own.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found = self._numbers_of_all(_number(own))
        return all(each == found[0] for each in found)

    def _group_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._messages if tensor.device.type == "cpu" else None


def ranks_here() -> Ranks:
    """The ranks of torch.distributed if it is initialised, otherwise a single process.

    Raises InputError if torchrun started several processes, but torch.distributed is not initialised.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Ranks.of_torch()
    if started_by_torchrun() and not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first, or pass ranks=Ranks() to train in each process separately"
        )
    return Ranks()


def broadcast_start(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Broadcast the weights of rank 0 and the settings of its optimizer, including the seed of stochastic rounding.

    Raises InputError if models, what trains of them, optimizers or libraries differ in more than values; nothing is sent then.
    """
    if ranks.world_size == 1:
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {name: value for name, value in {**model.state_dict(), **parameters}.items() if isinstance(value, Tensor)}
    names = {id(parameter): name for name, parameter in reversed(parameters.items())}
    groups = [] if optimizer is None else optimizer.param_groups
    compared = {f"the version of {name}": version for name, version in library_versions().items()}
    for name, value in tensors.items():
        trains = "trained" if value.requires_grad else "not trained"
        compared[f"{name!r}"] = " ".join(map(str, (*_described(value), trains)))
    compared["the optimizer"] = type(optimizer).__name__
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            compared[f"parameter {place} of group {number} of the optimizer"] = repr(names.get(id(parameter)))
    ranks.require_same("versions, model or optimizer", compared)
    ranks.broadcast_(tensors)
    for group in groups:
        own = {name: value for name, value in group.items() if name != "params"}
        group.update(ranks.from_main(lambda own=own: own))  # type: ignore[misc]


def refuse_diverged(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Raise a DPMicroAdamError unless all ranks have the same weights and optimizer state; ``step`` steps were taken."""
    if ranks.world_size == 1:
        return
    values = [value for state in optimizer.state.values() for value in state.values()] if optimizer is not None else []
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    if not ranks.alike([*parameters, *(value for value in values if isinstance(value, Tensor))]):
        raise DPMicroAdamError(
            f"after step {step} the processes of this run have different weights or optimizer states; all must compute the "
            "same: use the same devices and library versions"
        )


def started_by_torchrun() -> bool:
    """Whether torchrun started several processes, judged by its environment variables."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def torchrun_processes() -> Iterator[Ranks]:
    """Initialise torch.distributed for processes that torchrun started (gloo on CPU, NCCL on GPU); else a single process."""
    if not started_by_torchrun():
        yield Ranks()
        return
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise InputError(
                f"nproc-per-node is {local + 1} or more; there are {torch.cuda.device_count()} GPUs, and a process needs one"
            )
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    yield Ranks.of_torch()
    # Not after an error: an orderly shutdown would wait for ranks that are gone.
    dist.destroy_process_group()


@contextmanager
def _heard() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("] ")[2].partition(". ")[0][:80] or type(error).__name__
        raise ProcessLost(f"another process of this run is gone ({reason}); this one stops too") from error


def _number(digest: blake2b) -> int:
    return int.from_bytes(digest.digest(), "little", signed=True)


def _described(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type


def _difference(theirs: Any, own: Any, rank: int) -> str:
    if not isinstance(own, Mapping) or own == theirs:
        return ""
    name = next(name for name in (*theirs, *own) if theirs.get(name) != own.get(name))
    return f": {name} is {theirs.get(name, 'missing')} on rank 0 and {own.get(name, 'missing')} on rank {rank}"


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype on one device, up to ``_BUCKET`` numbers together."""
    for _, alike in groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[Tensor] = []
        for tensor in alike:
            if bucket and sum(other.numel() for other in bucket) + tensor.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
