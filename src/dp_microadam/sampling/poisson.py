"""Poisson sampling: each step includes each example, or each of the step's group, independently with the same probability.

This is the sampling that the accountants assume. Shuffled batches, or batches of a fixed size, spend more than they compute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError, UnreadableExample
from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.sampling.users import Units, WeightedRows
from dp_microadam.validation import public, refuse_unknown, require_integer

Priorities = NDArray[np.float64]
"""Two uniform numbers for each unit, which are compared in this order: 106 random bits, so that no two units are alike."""

Exchange = Callable[[Priorities], tuple[Sequence[Priorities], int]]
"""Takes the priorities of this process, and returns those of all processes and the number of this one."""


def alone(own: Priorities) -> tuple[Sequence[Priorities], int]:
    """The exchange of a single process."""
    return [own], 0


def keep_smallest(own: Priorities, most: int, exchange: Exchange = alone) -> NDArray[np.bool_]:
    """Which units of this process are kept, if all processes together keep ``most`` at most: those of smallest priority.

    Formal guarantees: if all priorities are independent and uniform, the kept units of all processes together are a uniformly
    random set of min(``most``, their number) of them (but for a probability below 2⁻¹⁰⁶ per pair of units that two priorities
    are the same). What a process learns of the others is their priorities, not whose they are.

    >>> keep_smallest(np.array([[0.5, 0.0], [0.1, 0.0], [0.1, 0.5]]), 2).tolist()
    [False, True, True]
    """
    kept = np.zeros(len(own), dtype=np.bool_)
    candidates = _order(own)[:most]  # others cannot be among the smallest of all
    of_all, number = exchange(own[candidates])
    together = np.concatenate(list(of_all))
    begin = sum(len(part) for part in of_all[:number])
    places = _order(together)[:most] - begin
    kept[candidates[places[(places >= 0) & (places < len(candidates))]]] = True
    return kept


def _order(priorities: Priorities) -> NDArray[np.int64]:
    return np.lexsort((priorities[:, 1], priorities[:, 0]))


@dataclass(slots=True)
class LogicalStep:
    """One logical step: its number, which is public, and its physical batches, which are private and may be none."""

    index: int
    chunks: Iterable[Any] = field(repr=False)


@public
class PoissonSampler:
    """The Poisson sampler of a plan: yields its logical steps, each as physical batches of example indices that fit in memory.

    ``physical_batch_size`` is the largest number of examples processed at once. ``first_step`` is where a resumed run
    continues, ``steps`` where it ends if that is not the plan's last. ``shard`` is this process' part of the examples when
    several processes train together; other examples are never sampled here. If the plan has several bands, sampling is cyclic:
    example i belongs to group i mod ``bands``, and step t samples from group t mod ``bands`` only. With a plan of users these
    are sampled: ``units`` has their examples, ``shard`` counts users, and chunks are
    :class:`~dp_microadam.sampling.users.WeightedRows`.

    If the plan has a ``max_batch_size``, so many of a larger sample are kept at random. A step of examples then has at most
    ⌈max_batch_size / physical_batch_size⌉ chunks. The cap is for all processes together; they agree on who is dropped through
    ``exchange`` (:func:`keep_smallest`).

    Formal guarantees: each example of the shard is in each step, with several bands in each step of its group and in no other,
    with the plan's ``sample_rate`` as probability (rounded up to a multiple of 2⁻⁵³), independently of all other
    examples and steps, and of how a step is split into chunks. Its group depends on its number alone, not on shards. The union
    of the samples that processes draw from disjoint shards, each with its own randomness, is one Poisson sample. Only the
    chunks reveal what was drawn; the sampler's length, its representation and its state do not. With ``max_batch_size`` M, if
    more than M are sampled, every set of M of them is kept with the same probability (truncated Poisson sampling:
    ``one_step.py``); groups then count as equally large, the smaller ones with an empty place that may be sampled too.

    >>> plan = PrivacyPlan(dataset_size=1000, batch_size=100, noise_multiplier=1.0, steps=3, delta=1e-5)
    >>> sampler = PoissonSampler(plan, physical_batch_size=32)
    >>> [step.index for step in sampler]
    [0, 1, 2]
    >>> all(len(indices) <= 32 for step in sampler for indices in step.chunks)
    True
    """

    def __init__(
        self,
        plan: PrivacyPlan | UnprotectedPlan,
        *,
        physical_batch_size: int | None = None,
        first_step: int = 0,
        steps: int | None = None,
        shard: range | None = None,
        randomness: Randomness | None = None,
        units: Units | None = None,
        exchange: Exchange = alone,
    ) -> None:
        self.plan = plan
        self.dataset_size = plan.dataset_size
        self._exchange = exchange
        self.steps = plan.steps if steps is None else require_integer("steps", steps, 0)
        self.first_step = require_integer("first_step", first_step, 0, self.steps)
        at_once = plan.dataset_size if physical_batch_size is None else physical_batch_size
        self.physical_batch_size = require_integer("physical_batch_size", at_once, 1)
        self.shard = range(plan.dataset_size) if shard is None else shard
        if self.shard.step != 1 or not 0 <= self.shard.start <= self.shard.stop <= plan.dataset_size:
            raise InputError(f"shard is {self.shard}; it must be consecutive examples of the {plan.dataset_size} there are")
        self._randomness = randomness if randomness is not None else Randomness.from_entropy()
        self._units = units
        if (plan.unit == "user") != (units is not None):
            raise InputError(f"the plan's unit is {plan.unit!r}; units must be given for users, and for users only")
        if units is not None and len(units) != plan.dataset_size:
            raise InputError(
                f"users has {len(units)} different ids, but dataset_size is {plan.dataset_size}; solve a plan for as many users"
            )
        if units is not None and units.most > self.physical_batch_size:
            raise InputError(
                f"examples_per_user is {units.most}, more than physical_batch_size, which is {self.physical_batch_size}; a "
                "user's examples go through the model together, so it must be at most that"
            )

    def __len__(self) -> int:
        """The number of remaining steps, which is public."""
        return self.steps - self.first_step

    def __iter__(self) -> Iterator[LogicalStep]:
        """Logical steps whose chunks are tensors of example indices, in ascending order."""
        for index in range(self.first_step, self.steps):
            yield LogicalStep(index, self.draw(index))

    def draw(self, step: int) -> tuple[Any, ...]:
        """The chunks of one step; in a private run every call draws anew."""
        plan, bands = self.plan, self.plan.bands
        group = step % bands
        # Members of the group within the shard, numbered within the group: member j is example group + j·bands.
        first, end = (-((group - edge) // bands) for edge in (self.shard.start, self.shard.stop))
        if plan.max_batch_size is not None and self.shard and self.shard.stop == plan.dataset_size:
            end = -(-plan.dataset_size // bands)  # the empty place of a smaller group
        uniforms = self._randomness.uniforms("sampling", step, end - first, first=first)
        sampled = np.flatnonzero(uniforms < plan.sample_rate)
        if plan.max_batch_size is not None and (self._exchange is not alone or len(sampled) > plan.max_batch_size):
            drawn = self._randomness.uniforms("dropping", step, 2 * (end - first), first=2 * first)
            sampled = sampled[keep_smallest(drawn.reshape(-1, 2)[sampled], plan.max_batch_size, self._exchange)]
        chosen = group + bands * (first + sampled)
        chosen = chosen[chosen < plan.dataset_size]
        if not len(chosen):
            return ()
        if self._units is not None:
            return self._units.batches(chosen, step, self._randomness, self.physical_batch_size)
        return torch.from_numpy(chosen).split(self.physical_batch_size)

    def load(
        self,
        data: Dataset[Any] | Tensor | tuple[Tensor, ...] | Mapping[str, Tensor],
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        **loader_options: Any,
    ) -> Iterator[LogicalStep]:
        """Yields logical steps whose chunks are batches of ``data``, loaded when they are iterated over.

        Tensors in memory (one, or a tuple or dict of them with examples along the first dimension) are indexed directly.
        A map-style Dataset is read by torch's DataLoader, which the other options go to. A step's chunks must be consumed
        before the next step is taken, and nothing of a step is drawn or read before that.

        Raises:
            InputError: if ``data`` does not have exactly ``dataset_size`` examples, because the accounting would be wrong.
        """
        refuse_loader_options("PoissonSampler.load", loader_options, num_workers)
        if isinstance(data, DataLoader):
            raise InputError(_why_no_loader(data))
        if isinstance(data, TensorDataset) and collate_fn is default_collate:
            data = data.tensors
        tensors = _tensors_of(data)
        size = len(data if tensors is None else tensors[0])  # type: ignore[arg-type]
        if self._units is not None and not self._units.belong_to(size):
            raise InputError("users and data have different lengths; users must have one id for each example")
        if self._units is None and size != self.dataset_size:
            raise InputError(
                f"data has {size} examples, but dataset_size is {self.dataset_size}; solve a plan for the size of your data"
            )
        if tensors is not None:
            if collate_fn is not default_collate:
                raise InputError("collate_fn is given, but data in tensors is not collated; give a Dataset, or leave it out")
            return self._load_tensors(data)
        return self._load_dataset(data, collate_fn, num_workers, loader_options)  # type: ignore[arg-type]

    def _load_tensors(self, data: Any) -> Iterator[LogicalStep]:
        for step in self:
            yield LogicalStep(step.index, _weighted(step.chunks, (_take(data, rows) for rows in map(_rows_of, step.chunks))))

    def _load_dataset(
        self, data: Dataset[Any], collate_fn: Callable[[list[Any]], Any], num_workers: int, options: dict[str, Any]
    ) -> Iterator[LogicalStep]:
        # One pass of the loader is one step: workers persist, and prefetch within a step only.
        requests: list[Tensor] = []
        own: dict[str, Any] = {"persistent_workers": True} if num_workers else {}
        # Each pass draws a seed for the workers. With its own generator it leaves torch's default generator unchanged.
        own["generator"] = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        own |= {"sampler": requests, "batch_size": None, "num_workers": num_workers}
        loader: DataLoader[Any] = DataLoader(Chunks(data, collate_fn, alone=1), **{**own, **options})
        current = self.first_step

        def refuse_passed(index: int) -> None:
            if index != current:
                raise InputError(f"step {index} is over; its chunks must be consumed before the next step is taken")

        def batches(index: int) -> Iterator[Any]:
            refuse_passed(index)
            read = 0
            for batch in loader if requests else ():  # an empty step is a step without chunks
                refuse_passed(index)
                if isinstance(batch, DPMicroAdamError):
                    raise batch
                read += 1
                yield batch
            if read < len(requests):
                raise PrivacyError("the loader ended before all examples of the step were read; a step must be summed up whole")

        for step in self:
            current = step.index
            requests[:] = map(_rows_of, step.chunks)
            yield LogicalStep(current, _weighted(step.chunks, batches(current)))

    def __repr__(self) -> str:
        return (
            f"PoissonSampler({self.plan}, first_step={self.first_step}, steps={self.steps}, "
            f"physical_batch_size={self.physical_batch_size}, randomness={self._randomness.description!r})"
        )


class Chunks(Dataset[Any]):
    """A Dataset whose items are whole chunks, collated where they are read: indices give a batch, or an error of ours.

    Torch would wrap what a worker raises into the text of its traceback. Unless ``alone`` is 0, batches in which the row of an
    example depends on the others are refused, as far as shapes tell, for which so many examples are collated alone too.
    """

    def __init__(self, data: Any, collate_fn: Callable[[list[Any]], Any], *, alone: int = 0) -> None:
        self.data = data
        self.collate_fn = collate_fn
        self.alone = alone

    def __getitem__(self, indices: Tensor) -> Any:
        try:
            examples = [self.data[i] for i in indices.tolist()]
            batch = self.collate_fn(examples)
        except UnreadableExample as error:
            return error
        except DPMicroAdamError as error:
            return _about_an_example(error)
        except StopIteration:  # which a loader takes for the end of the data
            sentence = "an example could not be read (StopIteration); the Dataset must return one for every index"
            return _about_an_example(InputError(sentence))
        except RuntimeError:
            if self.collate_fn is not default_collate or len({_shapes_in(example) for example in examples}) == 1:
                raise
            return InputError(
                "examples have different shapes, so that they cannot be stacked; pass loader_options={'collate_fn': …} with a "
                "function that pads all to one length, whatever the batch"
            )
        return self._refusal(examples, batch) or batch if self.alone else batch

    def _refusal(self, examples: list[Any], batch: Any) -> InputError | None:
        if any(leaf.is_nested for leaf in _tensors_with_rows(batch)):
            return InputError("collate_fn returns a nested tensor, whose rows cannot be told apart; pad all to one length")
        if any(len(leaf) > len(examples) for leaf in _tensors_with_rows(batch)):
            return InputError(
                "collate_fn returns more rows than it is given examples; it must return one row for each, and treat each by "
                "itself"
            )
        if self.collate_fn is default_collate or len(examples) == 1:
            return None
        shapes = [leaf.shape[1:] for leaf in _tensors_with_rows(batch)]
        for example in examples[: self.alone]:
            if [leaf.shape[1:] for leaf in _tensors_with_rows(self.collate_fn([example]))] != shapes:
                return InputError(
                    "collate_fn gives an example another shape beside others than alone, as padding to the longest does; it "
                    "must pad all examples to one length"
                )
        return None


_OF_THE_PLAN = {"batch_sampler", "batch_size", "dataset", "drop_last", "generator", "num_workers", "sampler", "shuffle"}


def refuse_loader_options(where: str, options: Mapping[str, Any], num_workers: int = 0) -> None:
    """Raise InputError for an option that torch's DataLoader does not have, or that is the plan's choice.

    The loader itself is made in the first step, which an error there would spend.
    """
    refuse_unknown(where, options, list(inspect.signature(DataLoader).parameters))
    for name in _OF_THE_PLAN & options.keys():
        weigh = ", and give some examples more weight in the loss instead" if "sampler" in name else ""
        raise InputError(f"{where} has {name!r}, but which examples form a batch is decided by the plan; remove it{weigh}")
    if not options.get("in_order", True):
        raise InputError("in_order is False; it must be True, because chunks of different steps would be mixed")
    try:
        DataLoader([0], batch_size=None, num_workers=num_workers, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(f"{where} is {dict(options)}, which torch's DataLoader refuses: {error}") from None


def _rows_of(chunk: Tensor | WeightedRows) -> Tensor:
    return chunk.rows if isinstance(chunk, WeightedRows) else chunk


def _weighted(chunks: Iterable[Any], batches: Iterator[Any]) -> Iterator[Any]:
    """The batches that were read for these chunks, those of users with the weights of their rows."""
    for batch, chunk in zip(batches, chunks, strict=True):
        yield WeightedRows(batch, chunk.weights) if isinstance(chunk, WeightedRows) else batch


def _why_no_loader(loader: DataLoader[Any]) -> str:
    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler | RandomSampler) or loader.batch_size is None:
        return "data is a DataLoader, which chooses its own batches; pass its dataset instead, which is sampled here"
    return (
        f"data is a DataLoader with a {type(sampler).__name__}; ε is computed for equal sample rates (it would be that of "
        "whoever is drawn most often, and the expected batch size would tell how many there are of each kind), so pass its "
        "dataset instead, and give some examples more weight in the loss"
    )


def _about_an_example(error: DPMicroAdamError) -> DPMicroAdamError:
    """Mark an error whose message may name an example, such as a file."""
    error.about_an_example = True  # type: ignore[attr-defined]
    return error


def _tensors_with_rows(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def _shapes_in(example: Any) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in tree_leaves(example) if isinstance(leaf, Tensor | np.ndarray))


def _tensors_of(data: Any) -> list[Tensor] | None:
    """The tensors ``data`` consists of, or None if it is a Dataset."""
    if isinstance(data, Tensor):
        return [data]
    if isinstance(data, Mapping):
        parts = list(data.values())
    elif isinstance(data, tuple):
        parts = list(data)
    else:
        return None
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        return None
    if len(lengths := {len(tensor) for tensor in parts}) != 1:
        raise InputError(f"the tensors of data have {sorted(lengths)} examples; all must have the same number")
    return parts


def _take(data: Any, indices: Tensor) -> Any:
    if isinstance(data, Tensor):
        # Pinned, so that the host does not wait for the copy of the indices.
        return data[indices.pin_memory().to(data.device, non_blocking=True) if data.is_cuda else indices]
    if isinstance(data, Mapping):
        return {name: _take(tensor, indices) for name, tensor in data.items()}
    return tuple(_take(tensor, indices) for tensor in data)
