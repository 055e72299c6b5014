"""Several processes train as one would, with the same guarantee. False-alarm rates of statistical tests are below 1e-6.

One group of processes per size runs all checks of this file; the tests look at what they left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import combinations, pairwise
from unittest import mock

import pytest
import torch
from flat import flat, idle
from processes import run_here
from scipy import stats
from torch import nn
from torch.utils.data import Dataset

from dp_microadam import ClippedGradients, InputError, Method, MicroAdam, PrivacyPlan, PrivateStep, UnprotectedPlan, methods
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training import distributed
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.distributed import Ranks, ranks_here
from dp_microadam.training.evaluation import class_hits, class_loss, evaluate
from dp_microadam.training.trainer import PrivateTrainer

ALARM = 1e-8
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
    "adam": lambda model: methods.dp_adam(model, lr=0.05),
    "sparta": lambda model: methods.sparta(model, lr=0.1, keep=0.5, scoring_epochs=1.0),
    "delayed": lambda model: methods.scale_then_privatize(model, lr=0.05, source="delayed", interval=4),
}


def resumed_with_bands(folder, ranks):
    """ε, the last step and the sessions on this rank, after one step in each of two sessions."""
    plan, state = PrivacyPlan(EXAMPLES, 8, 1.0, 8, 1e-2, bands=4), None
    for _ in range(2):
        step = PrivateStep(model := network(), idle(model), plan, class_loss, problem(), run_dir=folder)
        step.account.begin() if state is None else step.load_state_dict(state)
        step.take()
        state = step.state_dict()
        found = step.epsilon(), step.account.last_step, step.account.resumed_at
        step.close()
    return found


def seeded_run(folder, ranks=None):
    """Weights and their average after 20 seeded steps of the method that the folder is named after."""
    model = network()
    method = METHODS[folder.name](model)
    trainer = trainer_of(folder, model, method, seed=3, average=0.9, ranks=ranks)
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


def noise_of_two_steps(folder, ranks):
    """A loss without gradient: what is sent and what is published is noise, of 90,601 coordinates."""
    model = nn.Linear(300, 301)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = trainer_of(
        folder,
        model,
        optimizer,
        plan=plan_of(steps=2, noise_multiplier=1.5),
        kind=Watched,
        loss=lambda model, batch: model(batch[0]).sum(1) * 0.0,
        secure=folder.name.endswith("True"),
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
    return outcome(lambda: trainer_of(folder, loss=loss, plan=plan).fit((inputs, labels)))


def other_order(folder, ranks):
    inputs, labels = problem()
    train = (inputs.flip(0), labels.flip(0)) if ranks.rank == 1 else (inputs, labels)
    return outcome(lambda: trainer_of(folder).fit(train))


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
    return outcome(lambda: trainer_of(folder, plan=plan_of(noise_multiplier=0.7 + ranks.rank)).fit(problem()))


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
    trainer = trainer_of(folder, model)
    own = trainer.step.mechanism._noise_slice
    if ranks.rank == ranks.world_size - 1:
        trainer.step.mechanism._noise_slice = lambda count: own(count)[1:]
    before = flattened(network().state_dict())
    return outcome(lambda: trainer.fit(problem())), torch.equal(flattened(model.state_dict()), before)


def other_weights(folder, ranks):
    """Rank 1 changes one weight by one unit in the last place, after the last step: another could round the difference away."""
    trainer = trainer_of(folder, plan=plan_of(steps=4))

    def disturb(report):
        if ranks.rank == 1 and report.step == 4:
            with torch.no_grad():
                weight = trainer.model[0].weight.view(-1)
                weight[0] = torch.nextafter(weight[0], weight.new_tensor(9.0))

    trainer.callbacks = (disturb,)
    return outcome(lambda: trainer.fit(problem()))


def interrupted(folder, ranks):
    """Only rank 1 is told to stop."""
    trainer = trainer_of(folder)

    def stop(report):
        if ranks.rank == 1 and report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.callbacks = (stop,)
    result = trainer.fit(problem())
    saved = trainer.record.checkpoints.positions()[-1]
    again = trainer_of(folder).resume()
    return {"stopped": result.steps_done, "saved": saved, "resumed": again.fit(problem()).steps_done}


def micro_adam_from_different_starts(folder, ranks):
    """Weights, rounding and data order would differ, were they not taken from rank 0."""
    model = network(seed=100 + ranks.rank)
    optimizer = MicroAdam(model.parameters(), lr=0.05, density=0.2)
    trainer = trainer_of(folder, model, optimizer, average=0.5)
    metrics = trainer.fit(problem(), validation=problem(7)).metrics
    return {"weights": model.state_dict(), "average": trainer.average.state_dict(), "metrics": metrics}


def fewer_examples_than_processes(folder, ranks):
    """Two examples, of which one is expected per step: some processes never have any."""
    trainer = trainer_of(folder, plan=plan_of(count=2, batch_size=1, steps=5))
    return trainer.fit(problem(2)).steps_done


def shown_metrics(folder, ranks=None):
    trainer = trainer_of(folder, plan=plan_of(steps=3), seed=5, show_private_metrics=True, evaluate_every=2, ranks=ranks)
    trainer.fit(problem())
    return trainer.record.metrics() if trainer.ranks.main else None


def without_privacy(folder, ranks=None):
    model = network()
    trainer_of(folder, model, plan=UnprotectedPlan(EXAMPLES, 16, 5), seed=3, ranks=ranks).fit(problem())
    return model.state_dict()


def evaluated(ranks):
    return evaluate(
        network(), problem(), {"loss": class_loss, "hits": class_hits}, prepare=lambda batch: batch, batch_size=6, ranks=ranks
    )


class Left:
    """What the processes of a group left: ``left["adam"]`` is a list, an entry per rank."""

    def __init__(self, folder, size):
        self.folder, self.size = folder, size

    def __getitem__(self, check):
        return [torch.load(self.folder / f"{check}-{rank}.pt", weights_only=False) for rank in range(self.size)]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def left(request, run_group):
    return Left(run_group("together", request.param, __file__), request.param)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_the_clipped_sum_is_that_of_one_process(left):
    alone = clipped_sum(Ranks())
    for sums in left["clipped sum"]:
        assert largest_difference(sums, alone) < 1e-10


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    """Weights after a method's 20 seeded steps in one process, and its ledger; each is computed once."""
    folder = tmp_path_factory.mktemp("alone")
    found = {}

    def run(method):
        if method not in found:
            found[method] = seeded_run(folder / method, Ranks()), read_ledger(folder / method)
        return found[method]

    return run


def test_twenty_seeded_steps_are_those_of_one_process(left, of_one_process):
    for method in METHODS:
        alone, ledger = of_one_process(method)
        for weights in left[method]:
            assert largest_difference(weights, alone) < 1e-9, method
        assert read_ledger(left.folder / method).phases == ledger.phases


def test_the_total_noise_has_exactly_the_plan_s_variance(left):
    for secure in (False, True):
        published = torch.stack(left[f"noise {secure}"][0]["published"]).flatten()
        deviation = 1.5 * 0.8
        margin = stats.norm.isf(ALARM / 2) * (2 / published.numel()) ** 0.5
        assert abs(float(published.square().mean()) / deviation**2 - 1) < margin
        assert stats.kstest((published / deviation).numpy(), "norm").pvalue > ALARM


def test_every_rank_adds_all_noise_of_its_slice_and_none_elsewhere_independently_of_the_others(left):
    """A slice has 30,200 coordinates or more in two steps; a variance too small by a tenth is far outside of the margin."""
    for secure in (False, True):
        found = left[f"noise {secure}"]
        published = torch.stack(found[0]["published"])
        count = published.shape[1]
        own = []
        for rank, each in enumerate(found):
            sent = torch.stack(each["sent"])
            inside = slice(count * rank // left.size, count * (rank + 1) // left.size)
            own.append(sent[:, inside].clone())
            sent[:, inside] = 0
            assert not sent.any(), "outside of its slice a rank adds nothing"
            assert torch.allclose(own[-1], published[:, inside], atol=1e-4), "and inside of it no other does"
            mean_square = float(own[-1].square().mean()) / (1.5 * 0.8) ** 2
            assert abs(mean_square - 1) < stats.norm.isf(ALARM / 2) * (2 / own[-1].numel()) ** 0.5
        steps = [step[: count // left.size] / (1.5 * 0.8) for each in own for step in each]
        for one, other in combinations(steps, 2):
            assert abs(float((one * other).mean())) < stats.norm.isf(ALARM / 2) / len(one) ** 0.5


def test_no_rank_draws_more_than_its_share_of_the_noise(left):
    for secure in (False, True):
        drawn = [each["drawn"] for each in left[f"noise {secure}"]]
        assert max(map(max, drawn)) <= -(-90_601 // left.size)
        assert [sum(step) for step in zip(*drawn, strict=True)] == [90_601, 90_601]


def test_a_step_is_recorded_before_any_rank_draws_from_it(left):
    for each in left["noise False"]:
        assert each["recorded"] == [1, 2]


def test_one_run_folder_and_one_ledger_that_names_the_number_of_processes(left):
    run = left.folder / "adam"
    record = read_ledger(run)
    assert record.steps == 20
    assert record.processes == {left.size: 20}
    assert json.loads((run / "privacy.json").read_text())["processes"] == {str(left.size): 20}
    words = (run / "privacy.txt").read_text()
    assert f"20 steps by {left.size}" in words
    assert "they trust each other" in words
    assert CheckpointFolder(run / "checkpoints").newest()[0] == 20


def test_all_ranks_start_and_stay_alike_whatever_they_were_given(left):
    first, *others = left["micro"]
    for other in others:
        assert largest_difference(first["weights"], other["weights"]) == 0
        assert largest_difference(first["average"], other["average"]) == 0
        assert first["metrics"] == other["metrics"]


def test_one_unit_in_the_last_place_of_one_weight_on_one_rank_ends_the_run(left):
    for message in left["weights"]:
        assert "after step 4 the processes of this run have different weights" in message


def test_empty_shares_do_not_hang_the_rest(left):
    assert left["empty"] == [5] * left.size


def test_an_error_in_one_rank_s_batch_ends_all_tells_nothing_and_stays_spent(left):
    own, others = left["failing"][1], [left["failing"][rank] for rank in range(left.size) if rank != 1]
    assert own.startswith("PrivacyError: a training batch could not be processed (ValueError)")
    for message in others:
        assert message.startswith("ProcessLost: another process of this run failed")
        assert "stay spent; go on with" in message
    assert not any("4711" in message for message in left["failing"])
    run = left.folder / "failing"
    assert read_ledger(run).steps == CheckpointFolder(run / "checkpoints").newest()[0] + 1 == 1


@pytest.mark.parametrize(("check", "what"), [("order", "the training data or its order"), ("plan", "plan, phases")])
def test_ranks_that_were_given_different_things_are_refused_before_anything_is_written(left, check, what):
    for message in left[check]:
        assert message.startswith(f"InputError: the processes of this run differ in {what}")
    assert not (left.folder / check).exists()


@pytest.mark.parametrize(
    ("case", "what"),
    {
        "trained": "'a.weight' is (1, 8) float32 cpu trained on rank 0 and (1, 8) float32 cpu not trained on rank 1",
        "shape": "'p.weight' is (1, 8) float32 cpu trained on rank 0 and (2, 4) float32 cpu trained on rank 1",
        "dtype": "'p.weight' is (1, 8) float32 cpu trained on rank 0 and (1, 8) float64 cpu trained on rank 1",
        "groups": "parameter 0 of group 0 of the optimizer is 'p.weight' on rank 0 and 'a.weight' on rank 1",
        "optimizer": "the optimizer is SGD on rank 0 and Adam on rank 1",
        "version": "the version of torch is 1.0 on rank 0 and 2.0 on rank 1",
    }.items(),
)
def test_ranks_that_train_different_parameters_are_refused_by_name_before_a_weight_is_sent(left, case, what):
    """All coordinates of p were summed without noise: names order the slices of noise, and a dict ordered the sum."""
    for found in left["models"]:
        said, unchanged, begun = found[case]
        begin = "InputError: the processes of this run differ in versions, model or optimizer: "
        assert said == f"{begin}{what}; this must be the same in all of them"
        assert unchanged
        assert not begun


def test_sums_follow_names_and_what_does_not_fit_ends_in_a_sentence_on_every_rank(left):
    for found in left["combined"]:
        assert [found["sums"][name].tolist() for name in "ab"] == [[1.0 * left.size] * 2, [2.0 * left.size] * 2]
        for case in ("size", "name", "count", "dtype", "unsaid"):
            assert found[case].startswith("InputError: the processes of this run have different tensors to combine ("), case
        for case in ("bare", "bare end", "twice", "all"):
            assert found[case].startswith("PrivacyError: the noise of this run's processes does not cover each of 12"), case


def test_nothing_is_summed_unless_each_coordinate_has_noise_from_exactly_one_rank(left):
    for said, unmoved in left["gap"]:
        assert said.startswith("PrivacyError: the noise of this run's processes does not cover each of 83 coordinates")
        assert unmoved
    assert read_ledger(left.folder / "gap").steps == 1


def test_with_bands_all_ranks_count_each_session_and_end_at_the_same_step(left):
    record = read_ledger(left.folder / "bands")
    assert left["bands"] == [(record.epsilon(), 5, (1,))] * left.size
    assert record.epsilon() == record.plan.epsilon


def test_files_listed_in_another_order_are_refused_and_their_shards_never_overlap(left):
    for found in left["files"]:
        for case in ("other order", "other root", "other ids"):
            assert str(found[case]).startswith("InputError: the processes of this run differ in the training data"), case
        assert found["same order"] == found["other root, same ids"] == 1
    for case in ("other order", "other root", "other ids"):
        assert not (left.folder / "files" / case).exists()


def test_data_whose_order_cannot_be_seen_is_refused_with_the_way_out(left):
    for found in left["files"]:
        assert str(found["unseen"]).startswith("InputError: Opaque has no attribute that distinguishes its examples")
        assert "give it example_ids" in found["unseen"]
    messages = [str(found["unseen in one"]) for found in left["files"]]
    assert [message.partition(":")[0] for message in messages] == [
        "InputError" if rank == 1 else "ProcessLost" for rank in range(left.size)
    ]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(left):
    for found in left["interrupted"]:
        assert found == {"stopped": 3, "saved": 3, "resumed": 20}


def test_evaluation_on_parts_is_evaluation_of_the_whole(left):
    alone = evaluated(Ranks())
    for found in left["evaluated"]:
        assert found == pytest.approx(alone, abs=1e-12)


def test_private_metrics_are_those_of_all_ranks(left, tmp_path):
    alone = shown_metrics(tmp_path / "shown", Ranks())[0]["outside_the_guarantee"]
    assert left["shown"][0][0]["outside_the_guarantee"] == pytest.approx(alone, abs=1e-9)


def test_runs_without_privacy_are_those_of_one_process_too(left, tmp_path):
    alone = without_privacy(tmp_path / "run", Ranks())
    for weights in left["unprotected"]:
        assert largest_difference(weights, alone) < 1e-10


def test_a_process_can_train_alone_beside_others(left):
    assert left["alone"] == [1] * left.size


@pytest.mark.parametrize("size", [1, 2, 3, 7, 512])
@pytest.mark.parametrize("count", [0, 1, 5, 45_000])
def test_shards_are_a_partition_and_never_padded(size, count):
    ranks = Ranks()
    ranks.world_size = size
    parts = []
    for ranks.rank in range(size):
        parts.append(ranks.shard(count))
    assert [example for part in parts for example in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_slices_of_the_noise_are_a_partition_for_any_number_of_ranks(size, private):
    """They follow from the present number of ranks alone: a run that is resumed with another number has all its noise too."""
    ranks = Ranks()
    ranks.world_size = size
    covered = []
    for ranks.rank in range(size):
        covered += ranks.noise_slice(1001, private=private)
    assert covered == list(range(1001))


def test_processes_that_were_not_introduced_to_each_other_are_refused(monkeypatch):
    assert ranks_here().world_size == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"torchrun started 4 processes, but torch\.distributed is not initialised"):
        ranks_here()


RECIPE = """
name = "crash"
data = "digits"
model = "mlp"
noise_multiplier = 1.0
steps = 100000
batch_size = 64
checkpoint_every = 5
evaluate_every = 1000
"""


def wait_for_step(processes, run, step):
    ledger = run / "ledger.jsonl"
    while all(process.poll() is None for process in processes):
        if ledger.exists() and len(ledger.read_bytes().splitlines()) > step:
            return
        time.sleep(0.01)


def train_until_one_is_killed(size, folder, start_group):
    """Kill rank 1 of a run: all others end with a sentence. The run's folder and how many steps are spent."""
    recipe, run = folder / "crash.toml", folder / "run"
    recipe.write_text(RECIPE)
    processes = start_group(size, ["-m", "dp_microadam", "train", str(recipe), "--run-dir", str(run)])
    wait_for_step(processes, run, 12)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for rank in set(range(size)) - {1}:
        _, errors = processes[rank].communicate(timeout=60)
        assert processes[rank].returncode == 1, errors
        assert "another process of this run is gone (" in errors
        assert "); this one stops too; the steps recorded so far stay spent" in errors
        assert f"go on with: dp-microadam resume {run}" in errors
        assert "Traceback" not in errors
    assert time.monotonic() - killed < 60
    processes[1].communicate()
    spent = read_ledger(run).steps
    assert spent >= 12
    return run, spent


def check_steps(run, steps):
    record = read_ledger(run)
    report = json.loads((run / "privacy.json").read_text())
    assert report["steps_done"] == record.steps == steps
    assert report["epsilon"] == pytest.approx(record.plan.epsilon_after(steps))


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_another_number_of_ranks_goes_on(tmp_path, start_group):
    run, spent = train_until_one_is_killed(3, tmp_path, start_group)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--shutdown-timeout",
        "90",
    ]
    again = subprocess.Popen(
        [*torchrun, "-m", "dp_microadam", "resume", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for_step([again], run, spent + 7)
    again.send_signal(signal.SIGINT)
    output, errors = again.communicate(timeout=100)
    record = read_ledger(run)
    assert record.processes == {3: spent, 2: record.steps - spent}, errors
    assert record.steps >= spent + 7, errors
    check_steps(run, CheckpointFolder(run / "checkpoints").newest()[0])
    assert f"stopped after {record.steps} steps" in output


CHECKS = {
    "clipped sum": lambda folder, ranks: clipped_sum(ranks),
    **dict.fromkeys(METHODS, seeded_run),
    "noise False": noise_of_two_steps,
    "noise True": noise_of_two_steps,
    "failing": failing_batch,
    "order": other_order,
    "files": listed_files,
    "plan": other_plan,
    "models": other_models,
    "combined": lambda folder, ranks: combined(ranks),
    "bands": resumed_with_bands,
    "gap": slices_that_leave_a_gap,
    "weights": other_weights,
    "interrupted": interrupted,
    "micro": micro_adam_from_different_starts,
    "empty": fewer_examples_than_processes,
    "shown": shown_metrics,
    "unprotected": without_privacy,
    "evaluated": lambda folder, ranks: evaluated(ranks),
    "alone": lambda folder, ranks: (
        trainer_of(folder / f"{ranks.rank}", plan=plan_of(steps=1), ranks=Ranks()).fit(problem()).steps_done
    ),
}

if __name__ == "__main__":
    run_here(CHECKS)
