"""One of several processes that train together; ``test_distributed.py`` starts them and looks at what they leave behind.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python distributed_worker.py FOLDER

Every check runs in the one process group. What a check returns is saved as FOLDER/<check>-<rank>.pt.
"""

import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from flat import flat, idle
from torch import distributed as dist
from torch import nn
from torch.utils.data import Dataset

from dp_microadam import ClippedGradients, Method, MicroAdam, PrivacyPlan, PrivateStep, methods
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training import distributed
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.evaluation import class_hits, class_loss, evaluate
from dp_microadam.training.trainer import PrivateTrainer

EXAMPLES, FEATURES, CLASSES = 40, 6, 3


def problem(count=EXAMPLES):
    """Examples, numbered by their last feature, and their labels; the same in every process."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def network(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def plan_of(steps=20, batch_size=16, count=EXAMPLES, noise_multiplier=0.7):
    return PrivacyPlan.solve(
        dataset_size=count, batch_size=batch_size, delta=1e-5, noise_multiplier=noise_multiplier, steps=steps
    )


def trainer_of(run_dir, model=None, optimizer=None, *, ranks=None, **options):
    model = model or network()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    plan = options.pop("plan", None) or plan_of()
    kind = options.pop("kind", PrivateTrainer)
    options = {"show_progress": False, "physical_batch_size": 5, "max_grad_norm": 0.8, **options}
    loss = options.pop("loss", class_loss)
    method = Method.of(optimizer).configure(average=options.pop("average", None))
    return kind(model, method, plan, loss, run_dir=run_dir, ranks=ranks, **flat(**options))


METHODS = {
    "sgd": lambda model: methods.dp_sgd(model, lr=0.5, momentum=0.9),
    "adam": lambda model: methods.dp_adam(model, lr=0.05),
    "adambc": lambda model: methods.dp_adambc(model, lr=0.05),
    "sparta": lambda model: methods.sparta(model, lr=0.1, keep=0.5, scoring_epochs=1.0),
    "sparta norms": lambda model: methods.sparta(model, lr=0.1, keep=0.5, scores="norms"),
    "previous": lambda model: methods.scale_then_privatize(model, lr=0.05),
    "delayed": lambda model: methods.scale_then_privatize(model, lr=0.05, source="delayed", interval=4),
}


def methods_for(size):
    """In ``make test-all`` all of them once, with two processes; what they could do differently with three shows in two."""
    few = ("adam", "sparta") if size > 2 else ("adam", "sparta", "delayed")
    return METHODS if size == 2 and os.environ.get("DP_MICROADAM_THOROUGH") == "1" else few


def resumed_with_bands(folder, ranks):
    """ε, the last step and the sessions on this rank, after one step in each of two sessions."""
    plan, state = PrivacyPlan(EXAMPLES, 8, 1.0, 8, 1e-2, bands=4), None
    for _ in range(2):
        step = PrivateStep(model := network(), idle(model), plan, class_loss, problem(), run_dir=folder / "bands")
        step.account.begin() if state is None else step.load_state_dict(state)
        step.take()
        state = step.state_dict()
        found = step.epsilon(), step.account.last_step, step.account.resumed_at
        step.close()
    return found


def sources_for(size):
    """Whether noise is cryptographic, in the runs of so many processes."""
    return (False, True) if size == 2 else (False,)


def seeded_run(folder, name, ranks=None):
    """Weights and their average after 20 seeded steps."""
    model = network()
    method = METHODS[name](model)
    trainer = trainer_of(folder / name, model, method, seed=3, average=0.9, ranks=ranks)
    trainer.fit(problem())
    return {**model.state_dict(), **{f"average {name}": value for name, value in trainer.average.state_dict().items()}}


def clipped_sum(ranks, count=23):
    """Σ of clipped gradients of the first ``count`` examples, each process' part in chunks of 4."""
    model = network()
    inputs, labels = problem()
    engine = ClippedGradients(model, class_loss, max_grad_norm=0.3)
    shard = ranks.shard(count)
    for start in range(shard.start, shard.stop, 4):
        rows = slice(start, min(start + 4, shard.stop))
        engine.accumulate((inputs[rows], labels[rows]))
    sums = {name: total.clone() for name, total in engine.sums.items()}
    ranks.sum_(sums)
    return sums


class Watched(PrivateTrainer):
    """Keeps what its process sends to the others, how much noise it draws, and how many steps the ledger had before that."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sent, self.recorded, self.drawn = [], [], []
        step = self.step
        sums, add_noise, fill_normals = step._sampled_and_clipped, step.mechanism.add_noise, step.randomness.fill_normals

        def watched_sums(index):
            self.recorded.append(read_ledger(self.record.path).steps)
            return sums(index)

        def watched_noise(sums, *, step):
            noisy = add_noise(sums, step=step)
            self.sent.append({name: total.clone() for name, total in noisy.items()})
            return noisy

        def watched_normals(parts, step):
            self.drawn.append(sum(map(len, parts.values())))
            fill_normals(parts, step)

        step.randomness.fill_normals = watched_normals
        step._sampled_and_clipped, step.mechanism.add_noise = watched_sums, watched_noise


def noise_of_two_steps(folder, ranks, secure):
    """A loss without gradient: what is sent and what is published is noise, of 90,601 coordinates."""
    model = nn.Linear(300, 301)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = trainer_of(
        folder / f"noise-{secure}",
        model,
        optimizer,
        plan=plan_of(steps=2, noise_multiplier=1.5),
        kind=Watched,
        loss=lambda model, batch: model(batch[0]).sum(1) * 0.0,
        secure=secure,
    )
    weights = [flattened(model.state_dict())]
    trainer.callbacks = (lambda report: weights.append(flattened(model.state_dict())) if report.step else None,)
    trainer.fit((torch.ones(EXAMPLES, 300), torch.zeros(EXAMPLES)))
    published = [(before - after) * 16 for before, after in pairwise(weights)]
    sent = [flattened(sums) for sums in trainer.sent]
    return {"sent": sent, "published": published, "drawn": trainer.drawn, "recorded": trainer.recorded}


def flattened(tensors):
    """All coordinates in the order of the tensors' names."""
    return torch.cat([tensors[name].detach().double().flatten() for name in sorted(tensors)])


def outcome(work):
    """What ``work`` returns, or its error in words."""
    try:
        return work()
    except DPMicroAdamError as error:
        return f"{type(error).__name__}: {error}"


def failing_batch(folder, ranks):
    """Rank 1 has an example that cannot be processed, and every step takes all examples."""
    inputs, labels = problem()
    assert 20 in ranks.shard(EXAMPLES) or ranks.rank != 1
    inputs[20, 0] = 4711.0

    def loss(model, batch):
        if batch[0].max() > 4000:
            raise ValueError(f"secret: {batch[0].max()}")
        return class_loss(model, batch)

    plan = plan_of(steps=50, batch_size=EXAMPLES)
    return outcome(lambda: trainer_of(folder / "failing", loss=loss, plan=plan).fit((inputs, labels)))


def other_order(folder, ranks):
    inputs, labels = problem()
    train = (inputs.flip(0), labels.flip(0)) if ranks.rank == 1 else (inputs, labels)
    return outcome(lambda: trainer_of(folder / "order").fit(train))


class Listed(Dataset):
    """Reads its examples elsewhere and keeps a list of their names, as ``os.listdir`` gives it."""

    def __init__(self, names, root="/data"):
        self.names, self.root = names, root

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        inputs, labels = problem()
        number = int(self.names[index].removesuffix(".png"))
        return inputs[number], labels[number]


class Numbered(Listed):
    """The same, with ids that do not depend on where the files are."""

    def example_ids(self):
        return self.names


class Opaque(Dataset):
    """Keeps where to ask for its examples, and nothing of them."""

    def __init__(self):
        self.source = object()

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        inputs, labels = problem()
        return inputs[index], labels[index]


def listed_files(folder, ranks):
    """What happens to lists of files in another order, in the same order, from another root, and to what cannot be seen."""
    names = [f"{number}.png" for number in range(EXAMPLES)]
    mixed = names[::-1] if ranks.rank == 1 else names
    root = f"/machine-{ranks.rank}"
    given = {
        "other order": Listed(mixed),
        "same order": Listed(list(names)),
        "other root": Listed(names, root),
        "other root, same ids": Numbered(names, root),
        "other ids": Numbered(mixed),
        "unseen": Opaque(),
        "unseen in one": Opaque() if ranks.rank == 1 else Listed(names),
    }
    plan = plan_of(steps=1)
    return {
        name: outcome(lambda name=name, data=data: trainer_of(folder / name, plan=plan).fit(data).steps_done)
        for name, data in given.items()
    }


def other_plan(folder, ranks):
    return outcome(lambda: trainer_of(folder / "plan", plan=plan_of(noise_multiplier=0.7 + ranks.rank)).fit(problem()))


class Blocks(nn.Module):
    """Blocks of eight numbers each, of which some train."""

    def __init__(self, trained, shape=(8, 1), dtype=torch.float32):
        super().__init__()
        for name in "paz":
            setattr(self, name, nn.Linear(*shape, bias=False, dtype=dtype).requires_grad_(name in trained))

    def forward(self, inputs):
        return sum(getattr(self, name)(inputs).sum(1) for name in "paz")


def other_models(folder, ranks):
    """What is said when rank 1 differs in one thing, whether its weights are still its own, and whether a run was begun."""
    second = ranks.rank == 1
    for_rank = {
        "trained": (Blocks("pz" if second else "pa"), {}),
        "shape": (Blocks("pa", (4, 2) if second else (8, 1)), {}),
        "dtype": (Blocks("pa", dtype=torch.float64 if second else torch.float32), {}),
        "groups": (Blocks("pa"), {"names": "ap" if second else "pa"}),
        "optimizer": (Blocks("pa"), {"kind": torch.optim.Adam if second else torch.optim.SGD}),
        "version": (Blocks("pa"), {"version": "2.0" if second else "1.0"}),
    }
    return {case: refused_model(folder / f"model-{case}", model, **more) for case, (model, more) in for_rank.items()}


def refused_model(folder, model, names="", kind=torch.optim.SGD, version="1.0"):
    parts = [getattr(model, name).parameters() for name in names] or [model.parameters()]
    before = flattened(model.state_dict())
    optimizer = kind([{"params": list(part)} for part in parts], lr=0.5)
    inputs = torch.ones(EXAMPLES, model.p.in_features, dtype=model.p.weight.dtype)
    with mock.patch.object(distributed, "library_versions", return_value={"torch": version}):
        said = outcome(
            lambda: trainer_of(folder, model, optimizer, plan=plan_of(1), loss=lambda model, x: model(x)).fit(inputs)
        )
    return said, torch.equal(flattened(model.state_dict()), before), folder.exists()


def combined(ranks):
    """Sums of tensors in another order on each rank; then what is said of tensors, or owners of noise, that do not fit."""
    own = {name: torch.full((2,), number + 1.0) for number, name in enumerate("ab")}
    turned = dict(sorted(own.items(), reverse=ranks.rank % 2 == 1))
    ranks.sum_(turned, noised=ranks.shard(4))
    shard, last = ranks.shard(12), ranks.rank == ranks.world_size - 1
    other_name = {"b" if last else "a": torch.zeros(3)}
    two_or_one = {name: torch.zeros(3) for name in ("a" if last else "ab")}
    refused = {
        "size": lambda: ranks.sum_({"a": torch.zeros(3 + last)}),
        "name": lambda: ranks.sum_(other_name),
        "count": lambda: ranks.broadcast_(two_or_one),
        "dtype": lambda: ranks.broadcast_({"a": torch.zeros(3, dtype=torch.float64 if last else torch.float32)}),
        "bare": lambda: ranks.sum_({"a": torch.zeros(12)}, noised=range(shard.start + last, shard.stop)),
        "bare end": lambda: ranks.sum_({"a": torch.zeros(12)}, noised=range(shard.start, shard.stop - last)),
        "twice": lambda: ranks.sum_({"a": torch.zeros(12)}, noised=range(shard.start - last, shard.stop)),
        "all": lambda: ranks.sum_({"a": torch.zeros(12)}, noised=range(12)),
        "unsaid": lambda: ranks.sum_({"a": torch.zeros(12)}, noised=None if last else shard),
    }
    return {"sums": turned, **{case: outcome(work) for case, work in refused.items()}}


def slices_that_leave_a_gap(folder, ranks):
    """The last rank adds no noise to the first coordinate of its slice: what is said, and whether any weight moved."""
    model = network()
    trainer = trainer_of(folder / "gap", model)
    own = trainer.step.mechanism._noise_slice
    if ranks.rank == ranks.world_size - 1:
        trainer.step.mechanism._noise_slice = lambda count: own(count)[1:]
    before = flattened(network().state_dict())
    return outcome(lambda: trainer.fit(problem())), torch.equal(flattened(model.state_dict()), before)


def other_weights(folder, ranks):
    """Rank 1 changes one weight by one unit in the last place, after the last step: another could round the difference away."""
    trainer = trainer_of(folder / "weights", plan=plan_of(steps=4))

    def disturb(report):
        if ranks.rank == 1 and report.step == 4:
            with torch.no_grad():
                weight = trainer.model[0].weight.view(-1)
                weight[0] = torch.nextafter(weight[0], weight.new_tensor(9.0))

    trainer.callbacks = (disturb,)
    return outcome(lambda: trainer.fit(problem()))


def interrupted(folder, ranks):
    """Only rank 1 is told to stop."""
    trainer = trainer_of(folder / "interrupted")

    def stop(report):
        if ranks.rank == 1 and report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.callbacks = (stop,)
    result = trainer.fit(problem())
    saved = trainer.record.checkpoints.positions()[-1]
    again = trainer_of(folder / "interrupted").resume()
    return {"stopped": result.steps_done, "saved": saved, "resumed": again.fit(problem()).steps_done}


def micro_adam_from_different_starts(folder, ranks):
    """Weights, rounding and data order would differ, were they not taken from rank 0."""
    model = network(seed=100 + ranks.rank)
    optimizer = MicroAdam(model.parameters(), lr=0.05, density=0.2)
    trainer = trainer_of(folder / "micro", model, optimizer, average=0.5)
    metrics = trainer.fit(problem(), validation=problem(7)).metrics
    return {"weights": model.state_dict(), "average": trainer.average.state_dict(), "metrics": metrics}


def fewer_examples_than_processes(folder, ranks):
    """Two examples, of which one is expected per step: some processes never have any."""
    trainer = trainer_of(folder / "empty", plan=plan_of(count=2, batch_size=1, steps=5))
    return trainer.fit(problem(2)).steps_done


def shown_metrics(folder, ranks=None):
    trainer = trainer_of(
        folder / "shown", plan=plan_of(steps=3), seed=5, show_private_metrics=True, evaluate_every=2, ranks=ranks
    )
    trainer.fit(problem())
    return trainer.record.metrics() if trainer.ranks.main else None


def without_privacy(folder, ranks=None):
    from dp_microadam.training.trainer import UnprotectedPlan

    model = network()
    trainer_of(folder / "unprotected", model, plan=UnprotectedPlan(EXAMPLES, 16, 5), seed=3, ranks=ranks).fit(problem())
    return model.state_dict()


def evaluated(ranks):
    return evaluate(
        network(), problem(), {"loss": class_loss, "hits": class_hits}, prepare=lambda batch: batch, batch_size=6, ranks=ranks
    )


def main(folder):
    dist.init_process_group("gloo")
    ranks = Ranks.of_torch()
    checks = {
        "clipped sum": lambda: clipped_sum(ranks),
        **{name: lambda name=name: seeded_run(folder, name) for name in methods_for(ranks.world_size)},
        **{
            f"noise {secure}": lambda secure=secure: noise_of_two_steps(folder, ranks, secure)
            for secure in sources_for(ranks.world_size)
        },
        "failing": lambda: failing_batch(folder, ranks),
        "order": lambda: other_order(folder, ranks),
        "files": lambda: listed_files(folder, ranks),
        "plan": lambda: other_plan(folder, ranks),
        "models": lambda: other_models(folder, ranks),
        "combined": lambda: combined(ranks),
        "bands": lambda: resumed_with_bands(folder, ranks),
        "gap": lambda: slices_that_leave_a_gap(folder, ranks),
        "weights": lambda: other_weights(folder, ranks),
        "interrupted": lambda: interrupted(folder, ranks),
        "micro": lambda: micro_adam_from_different_starts(folder, ranks),
        "empty": lambda: fewer_examples_than_processes(folder, ranks),
        "shown": lambda: shown_metrics(folder),
        "unprotected": lambda: without_privacy(folder),
        "evaluated": lambda: evaluated(ranks),
        "alone": lambda: (
            trainer_of(folder / f"alone-{ranks.rank}", plan=plan_of(steps=1), ranks=Ranks()).fit(problem()).steps_done
        ),
    }
    for name, check in checks.items():
        torch.save(check(), folder / f"{name}-{ranks.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
