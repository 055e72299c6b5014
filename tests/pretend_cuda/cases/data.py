"""Training data on its way to the device: the CPU's values in the CPU's order, ahead within a step, and nobody waits."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from flat import flat, idle
from pretend_cuda.cases.comparison import all_agree, moved, placed
from pretend_cuda.watch import Watch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from dp_microadam import PlainStep, PrivacyPlan, PrivateStep, UnprotectedPlan
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.training import training_data
from dp_microadam.training.evaluation import class_loss

CPU = torch.device("cpu")
EXAMPLES = 60
INPUTS, LABELS = torch.randn(EXAMPLES, 6), torch.randint(3, (EXAMPLES,))
ON_THE_WAY = ("training_data.py", "sampling.py")
BESIDE_CLIPPING = ("noise/", "sampling/", "training/")
PLAN = PrivacyPlan.solve(dataset_size=EXAMPLES, batch_size=30, delta=1e-5, noise_multiplier=1.0, steps=3)


class Plain(Dataset):
    """Reads its examples one by one."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], LABELS[index]


def steps_of(device: torch.device, train: Any, **options: Any) -> tuple[dict[str, torch.Tensor], Watch]:
    """The gradients of two seeded steps, and what was watched while they were taken."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
    with tempfile.TemporaryDirectory() as folder:
        plan = UnprotectedPlan(EXAMPLES, 30, 2)
        step = PlainStep(model, class_loss, plan, train, run_dir=folder, seed=5, physical_batch_size=7, **options)
        step.account.begin()
        with Watch() as watch:
            means = [step.take() for _ in range(2)]
        step.close()
    return {f"{number} {name}": mean for number, found in enumerate(means) for name, mean in found.items()}, watch


def equal_steps(device: torch.device) -> None:
    """Whatever the data is, the steps are the CPU's, and neither sampling nor loading waits for the device."""
    for name, train, options in (
        ("tensors", (INPUTS, LABELS), {}),
        ("tensors on the device", None, {}),
        ("TensorDataset", TensorDataset(INPUTS, LABELS), {}),
        ("a Dataset", Plain(), {}),
        ("a Dataset with workers", Plain(), {"num_workers": 1}),
    ):
        found = []
        for where in (CPU, device):
            means, watch = steps_of(where, moved((INPUTS, LABELS), where) if train is None else train, **options)
            found.append(means)
            waited = [line for _, line in watch.synchronisations if any(part in line for part in ON_THE_WAY)]
            assert not waited, (name, waited)
        all_agree(*found, device, name)


def users(device: torch.device) -> None:
    """Examples of users, whose weights travel with them: the CPU's gradients, with and without privacy, and nobody waits."""
    plan = PrivacyPlan(20, 8, 1.0, 2, 1e-2, unit="user", examples_per_user=3)
    ids = [number % 20 for number in range(EXAMPLES)]
    for kind, train in ((PrivateStep, (INPUTS, LABELS)), (PrivateStep, Plain()), (PlainStep, (INPUTS, LABELS))):
        found = []
        for where in (CPU, device):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(where)
            with tempfile.TemporaryDirectory() as folder:
                step = kind(model, class_loss, plan, train, users=ids, run_dir=folder, seed=5, physical_batch_size=9)
                step.account.begin()
                with Watch() as watch:
                    found.append(step.take())
                step.close()
            waited = [line for _, line in watch.synchronisations if any(part in line for part in ON_THE_WAY)]
            assert not waited, (kind, waited)
        all_agree(*found, device, kind.__name__)


def order(device: torch.device) -> None:
    """One batch is read ahead, never two; values and structure are kept, in pinned memory or not, empty or not."""
    happened: list[tuple[str, int]] = []

    def batches() -> Iterator[Any]:
        for number in range(4):
            happened.append(("read", number))
            rows = torch.arange(3 * number, 3 * number + 3)
            yield {"rows": rows.pin_memory() if number % 2 else rows, "turned": torch.ones(2, 5).t(), "number": number}

    for number, batch in enumerate(training_data.copied_ahead(batches(), device)):
        happened.append(("given", number))
        placed(batch["rows"], device, "rows")
        assert batch["rows"].tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
        assert batch["number"] == number
        assert batch["turned"].stride() == (1, 5)
    ahead = [("read", 0), ("read", 1), ("given", 0), ("read", 2), ("given", 1), ("read", 3), ("given", 2), ("given", 3)]
    assert happened == ahead
    assert list(training_data.copied_ahead([], device)) == []
    assert len(list(training_data.copied_ahead([torch.ones(2)], device))) == 1


@contextmanager
def recorded_streams(device: torch.device) -> Iterator[list[str]]:
    """What streams are asked to do, in order: the pretend device has only one, which cannot show a mistake."""
    happened: list[str] = []

    class Stream(torch.Stream):
        name = "copies"

        def wait_stream(self, other: Stream) -> None:
            assert self.device == other.device == device
            happened.append(f"{self.name} waits for {other.name}")

        def record_event(self, event: Any = None) -> str:
            happened.append(f"{self.name} recorded")
            return f"event {happened.count('copies recorded')}"

        def wait_event(self, event: str) -> None:
            happened.append(f"{self.name} waits for {event}")

    class Computing(Stream):
        name = "computing"

    current: list[Stream] = [Computing(device=device)]
    original_empty, original_copy = torch.empty_like, torch.Tensor.copy_

    def set_stream(stream: Stream) -> None:
        current[0] = stream

    def empty_like(*arguments: Any, **options: Any) -> torch.Tensor:
        happened.append(f"memory from {current[0].name}")
        return original_empty(*arguments, **options)

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        assert source.is_pinned()
        happened.append(f"copy on {current[0].name}")
        return original_copy(self, source, non_blocking)

    with (
        patch.object(torch, "Stream", Stream),
        patch.object(torch.accelerator, "current_stream", lambda device: current[0]),
        patch.object(torch.accelerator, "set_stream", set_stream),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "copy_", copy_),
    ):
        yield happened
    assert current[0].name == "computing"


BEGUN = ["memory from computing", "copies waits for computing", "copy on copies", "copies recorded"]


def streams(device: torch.device) -> None:
    """Memory belongs to the computing stream, which the copies wait for before they write and which waits for them."""
    with recorded_streams(device) as happened:
        for number, _ in enumerate(training_data.copied_ahead([torch.ones(3), torch.ones(3)], device)):
            happened.append(f"batch {number}")
    assert happened == [*BEGUN, *BEGUN, "computing waits for event 1", "batch 0", "computing waits for event 2", "batch 1"]


def failing_step(device: torch.device) -> None:
    """A step that fails gives back the memory of the batch ahead only after its copy."""
    with recorded_streams(device) as happened:
        batches = training_data.copied_ahead([torch.ones(3), torch.ones(3), torch.ones(3)], device)
        next(batches)
        batches.close()
    assert happened == [*BEGUN, *BEGUN, "computing waits for event 1", "computing waits for event 2"]


def ledger_first(device: torch.device) -> None:
    """No step is sampled, and nothing of it read or copied, before it is in the ledger.

    All that a step does beside clipping waits for the device once: to learn whether the sums are finite.
    """
    steps: list[tuple[str, int, int]] = []
    draw, begin_copy = PoissonSampler.draw, training_data._begin_copy
    with tempfile.TemporaryDirectory() as folder:
        at = itertools.count()

        def recorded() -> int:
            return read_ledger(Path(folder)).steps

        def drawn(self: PoissonSampler, step: int) -> Any:
            steps.append(("drawn", step, recorded()))
            return draw(self, step)

        def begun(*arguments: Any) -> Any:
            steps.append(("copied", next(at), recorded()))
            return begin_copy(*arguments)

        model = nn.Linear(6, 3).to(device)
        train = (INPUTS.clone(), LABELS.clone())
        with (
            patch.object(PoissonSampler, "draw", drawn),
            patch.object(training_data, "_begin_copy", begun),
            patch.object(PrivateStep, "_check_model", lambda self, data: None),
        ):
            step = PrivateStep(
                model, idle(model), PLAN, class_loss, train, run_dir=folder, **flat(seed=1, physical_batch_size=7)
            )
            assert not steps
            step.account.begin()
            for taken in range(3):
                before = len(steps)
                with Watch() as watch:
                    step.take()
                what = steps[before:]
                waits = {line: n for (_, line), n in watch.synchronisations.items() if line.startswith(BESIDE_CLIPPING)}
                assert sum(waits.values()) <= 1, waits
                assert what[0] == ("drawn", taken, taken + 1)
                assert all(kind == "copied" and known == taken + 1 for kind, _, known in what[1:])
            step.close()
    assert len(steps) > 3 + 6, "batches were copied ahead"


CASES = {
    "equal steps": equal_steps,
    "users": users,
    "order": order,
    "streams": streams,
    "a failing step": failing_step,
    "ledger first": ledger_first,
}
