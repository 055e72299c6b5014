"""Training with users as the unit of privacy, through the trainer and the step."""

import json
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flat import flat, idle
from processes import run_here
from thoroughness import THOROUGH
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from dp_microadam import InputError, PrivacyError, PrivacyPlan, PrivateStep, PrivateTrainer, UnprotectedPlan
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.distributed import Ranks

SIZES = [1, 5, 2, 1, 9, 3, 1, 4, 2, 6]
IDS = [f"user {number}" for number, size in enumerate(SIZES) for _ in range(size)]
PLAN = PrivacyPlan(len(SIZES), 4, 1.5, 12, 1e-2, examples_per_user=4)


def class_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def examples():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(IDS), 6, generator=generator), torch.randint(0, 3, (len(IDS),), generator=generator)


def trainer_of(folder, ranks, *, loss=class_loss, plan=PLAN, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"show_progress": False, "physical_batch_size": 7, "prepare": doubled, **options}
    return PrivateTrainer(model, optimizer, plan, loss, run_dir=folder, ranks=ranks, **flat(**options))


def doubled(batch):
    return batch[0].double(), batch[1]


def seeded(folder, ranks):
    """The weights after a run with a fixed seed."""
    run = trainer_of(folder, ranks, seed=3)
    run.fit(examples(), users=IDS)
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def differing(folder, ranks):
    """What a rank is told whose examples belong to other users than the first rank's."""
    try:
        trainer_of(folder, ranks).fit(examples(), users=IDS if ranks.main else IDS[::-1])
    except InputError as error:
        return str(error)


def slowly(folder):
    def slow(model, batch):
        time.sleep(0.02)
        return class_loss(model, batch)

    trainer_of(folder, Ranks(), loss=slow, checkpoint_every=2).fit(examples(), users=IDS)


NO_NOISE = 1e-4


def numbered(model, batch):
    """The gradient of example i is one in column i of the weight, and zero elsewhere."""
    return model(batch).sum(1)


def columns(count):
    model = nn.Linear(count, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def a_step(folder, ids, plan, data=None, loss=numbered, **options):
    data = torch.eye(len(ids), dtype=torch.float64) if data is None else data
    model = columns(data.shape[1])
    options = {"physical_batch_size": 16, **options}
    return PrivateStep(model, idle(model), plan, loss, data, users=ids, run_dir=folder, **flat(**options))


def everyone(count, k, steps=1, **options):
    """A plan that takes every user in every step, with hardly any noise."""
    return PrivacyPlan(count, count, NO_NOISE * 100, steps, 1e-2, examples_per_user=k, **options)


@pytest.mark.parametrize("kind", ["tensors", pytest.param("dataset", marks=pytest.mark.slow)])
def test_one_example_per_user_is_the_run_of_examples_to_the_bit(make_trainer, training_part, kind):
    """Checkpoints, ledger lines and weights; ids are strings in no order, and k is 1 or larger."""
    train = TensorDataset(*training_part) if kind == "dataset" else training_part
    count = len(training_part[1])
    ids = np.random.default_rng(0).permutation([f"person {number}" for number in range(count)])
    plan = PrivacyPlan.solve(dataset_size=count, batch_size=64, delta=1e-5, noise_multiplier=1.0, steps=4)
    ends = []
    for k in (None, 1, 5) if THOROUGH else (None, 5):
        of_users = plan if k is None else replace(plan, examples_per_user=k)
        options = {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-2), "average": 0.9}
        trainer = make_trainer(plan=of_users, seed=7, run=f"run-{k}", **options)
        trainer.fit(train, users=None if k is None else ids)
        ends.append([*trainer.model.state_dict().values(), *trainer.average.state_dict().values()])
        lines = (trainer.record.path / "ledger.jsonl").read_text().splitlines()[1:]
        ends[-1].append(torch.tensor([json.loads(line)["step"] for line in lines]))
    for other in ends[1:]:
        assert all(torch.equal(one, two) for one, two in zip(ends[0], other, strict=True))


def test_a_step_is_the_sum_of_clipped_means_of_users(tmp_path):
    """With every user, and all they have, in the step: against examples one at a time."""
    torch.manual_seed(0)
    ids = ["b", "a", "b", "c", "b", "a"]
    data, model = torch.randn(6, 3, dtype=torch.float64), columns(3)

    def loss(model, batch):
        return model(batch).squeeze(1).add(batch.sum(1)).square()

    plan = everyone(3, 4)
    step = PrivateStep(
        model,
        idle(model),
        plan,
        loss,
        data,
        users=ids,
        run_dir=tmp_path,
        **flat(seed=0, max_grad_norm=4.0, physical_batch_size=5),
    )
    weights = torch.zeros(3, 6, dtype=torch.float64)
    for row, who in enumerate(ids):
        weights["bac".index(who), row] = 1 / ids.count(who)
    every = data.repeat(3, 1)
    expected, norms = clipped_sum(model, loss, every, max_grad_norm=4.0, weights=weights)
    assert min(norms) < 4.0 < max(norms)
    step.account.begin()
    found = step.take()["weight"] * plan.batch_size
    noise = step.mechanism.noise_deviation * plan.batch_size
    assert float((found - expected["weight"]).abs().max()) < 7 * noise


@pytest.mark.parametrize("clipping", ["flat", pytest.param("per-layer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("many", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_a_user_moves_a_step_by_at_most_c_whatever_they_have(tmp_path, clipping, many):
    """The same run, to the draw and the noise, with one user who has nothing to teach or many huge examples."""
    ids = [*range(20), *[20] * many]
    means = []
    for name, value in (("with", 1e6), ("without", 0.0)):
        data = torch.eye(len(ids), dtype=torch.float64)
        data[20:] = value
        plan = PrivacyPlan(21, 18, 0.5, 6, 1e-2, examples_per_user=8)
        step = a_step(tmp_path / f"{name}-{many}-{clipping}", ids, plan, data, seed=5, clipping=clipping)
        means.append([gradients["weight"] for gradients in step])
    moved = [18 * float((one - other).norm()) for one, other in zip(*means, strict=True)]
    assert max(moved) <= 1 + 1e-6
    assert max(moved) > 1 - 1e-6  # they did take part


def test_a_user_brings_at_most_k_of_their_examples_drawn_anew(tmp_path):
    """The columns of the mean gradient show which examples were there: at most k of each, all of them in the end."""
    ids = [0] * 12 + [1] * 2
    step = a_step(tmp_path, ids, everyone(2, 3, steps=15), physical_batch_size=3)
    seen = set()
    for gradients in step:
        mean = gradients["weight"].flatten() * 2
        present = frozenset((mean > 0.1).nonzero().flatten().tolist())
        assert len([row for row in present if row < 12]) == 3
        assert {12, 13} <= present
        seen.add(present)
    # 220 sets of three: fewer than five different ones in fifteen steps have a probability below C(220, 4)·(4/220)¹⁵ < 1e-17.
    assert len(seen) > 4


def test_bands_of_users(tmp_path):
    ids = [0, 0, 1, 2, 2, 2, 3]
    plan = PrivacyPlan(4, 2, 0.01, 4, 1e-2, bands=2, examples_per_user=2)
    step = a_step(tmp_path, ids, plan)
    for index, gradients in enumerate(step):
        mean = gradients["weight"].flatten() * 2
        owners = {ids[row] for row in (mean > 0.2).nonzero().flatten().tolist()}
        assert owners == {index % 2, index % 2 + 2}


def test_an_example_that_is_not_finite_takes_its_user_out_of_the_step(tmp_path):
    ids = [0, 0, 1, 1, 2]
    data = torch.eye(5, dtype=torch.float64)
    data[1, 1] = torch.nan
    step = a_step(tmp_path, ids, everyone(3, 4), data)
    step.account.begin()
    mean = step.take()["weight"].flatten() * 3
    assert mean[:2].abs().max() < 0.1
    assert (mean[2:] - torch.tensor([0.5, 0.5, 1.0])).abs().max() < 0.1


class Pictures(Dataset):
    """Examples of a hospital; reading one draws random numbers, as an augmentation does."""

    def __init__(self, count):
        self.example_ids = list(range(count))

    def __len__(self):
        return len(self.example_ids)

    def __getitem__(self, index):
        return torch.full((3,), float(index)), torch.rand(())


def collated(rows):
    return torch.stack([image for image, _ in rows]), torch.stack([noise for _, noise in rows])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dataset_with_workers_and_a_collate_function_of_ones_own(tmp_path, workers):
    ids = [number % 4 for number in range(17)]
    model = nn.Linear(3, 1).double()

    def loss(model, batch):
        images, noise = batch
        return model(images.double()).squeeze(1) * (1 + 0 * noise)

    step = PrivateStep(
        model,
        idle(model),
        everyone(4, 5, steps=3),
        loss,
        Pictures(17),
        users=ids,
        run_dir=tmp_path,
        **flat(max_grad_norm=100.0, physical_batch_size=9, num_workers=workers, loader_options={"collate_fn": collated}),
    )
    expected = torch.tensor([np.mean([row for row in range(17) if row % 4 == user]) for user in range(4)]).sum()
    for gradients in step:
        found = gradients["weight"].flatten() * 4
        # The user with five examples brings all of them; 7 deviations of the noise, which is σ·C = 1.
        assert (found - expected).abs().max() < 7 * step.mechanism.noise_deviation * 4
    step.close()


def test_augmentations_act_on_examples_and_the_measures_are_means_over_users(tmp_path):
    ids = [0, 0, 0, 1]
    plan = UnprotectedPlan(2, 2, 1, examples_per_user=4)
    seen = []

    def augment(batch):
        seen.append(len(batch))
        return batch + 1

    def measure(model, batch):
        return batch[:, 0]

    data = torch.tensor([[0.0], [3.0], [6.0], [9.0]], dtype=torch.float64)
    step = a_step(
        tmp_path,
        ids,
        plan,
        data,
        augment=augment,
        show_private_metrics=True,
        measures={"value": measure},
        physical_batch_size=4,
    )
    mean = step.take()["weight"]
    assert sorted(seen) in ([1, 3], [4, 4], [8])
    assert step.training_metrics["training_value"] == pytest.approx((4.0 + 10.0) / 2)
    assert float(mean) == pytest.approx((4.0 + 10.0) / 2)  # unclipped: the mean over users of their means


REFUSED = {
    "no ids": (PLAN, None, "the plan's unit is the user, but users is missing"),
    "ids for examples": (
        PrivacyPlan(len(IDS), 4, 1.5, 12, 1e-2),
        IDS,
        "users is given, but the plan's unit is the example",
    ),
    "too few ids": (PLAN, IDS[:-1], "users and data have different lengths"),
    "other users": (replace(PLAN, dataset_size=11), IDS, "users has 10 different ids, but dataset_size is 11"),
    "too many of each": (replace(PLAN, examples_per_user=8), IDS, "more than physical_batch_size, which is 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, case):
    plan, ids, sentence = REFUSED[case]
    with pytest.raises(InputError, match=sentence):
        trainer_of(tmp_path / "run", Ranks(), plan=plan).fit(examples(), users=ids)
    assert not (tmp_path / "run").exists()


def test_every_size_of_users_is_checked_before_the_first_step_whatever_anyone_has(tmp_path, monkeypatch):
    """A fault that shows with four rows per user only is refused although nobody has more than one example."""
    right = ClippedGradients._add

    def wrong(self, observed, batch, count, weights=None):
        norms = right(self, observed, batch, count, weights)
        if weights is not None and weights.shape[1] == 4:
            for total in self._sums.values():
                total *= 3
        return norms

    monkeypatch.setattr(ClippedGradients, "_add", wrong)
    count = len(IDS)
    trainer = trainer_of(tmp_path / "run", Ranks(), plan=replace(PLAN, dataset_size=count))
    with pytest.raises(InputError, match="only a part of its gradient"):
        trainer.fit(examples(), users=range(count))
    assert not (tmp_path / "run").exists()


def test_nothing_written_depends_on_anyones_number_of_examples(tmp_path, capsys):
    """Two data sets that differ in nothing else: all files are the same, but for weights, times, identifiers and hashes.

    The last user has one example, or the same example thirty times, so that even the weights agree up to rounding.
    """
    runs = []
    for name, many in (("of-few", 1), ("of-many", 30)):
        features, labels = examples()
        first = IDS.index(IDS[-1])
        rows = torch.arange(first + many).clamp(max=first)
        ids = [IDS[row] for row in rows.tolist()]
        trainer = trainer_of(
            tmp_path / name, Ranks(), plan=replace(PLAN, steps=6), seed=1, checkpoint_every=4, show_progress=True
        )
        trainer.fit((features[rows], labels[rows]), users=ids)
        runs.append((tmp_path / name, trainer, capsys.readouterr()))
    (few, one, shown), (many, other, shown_too) = runs
    for mine, theirs in zip(files_of(few), files_of(many), strict=True):
        if mine.parent.name == "tensorboard":  # named after the time
            continue
        assert mine.relative_to(few) == theirs.relative_to(many)
        if mine.parent.name == "checkpoints":
            assert mine.stat().st_size == theirs.stat().st_size
        else:
            assert varying_taken_out(mine.read_text(), few) == varying_taken_out(theirs.read_text(), many), mine.name
    assert varying_taken_out(shown.out + shown.err, few) == varying_taken_out(shown_too.out + shown_too.err, many)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def varying_taken_out(text, folder):
    """The text without times, rates, identifiers and hashes, which differ between any two runs."""
    text = text.replace(folder.name, "RUN")
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", text)
    text = re.sub(r'"(time|began|updated|steps_per_second|seconds)": ?[^,}\n]+', "", text)
    text = re.sub(r"\b[0-9a-f]{16,}\b", "HASH", text)
    return re.sub(r"\d+[.:]\d+( ?(s|it|steps)/?s?)?", "NUMBER", text)


@pytest.mark.slow
def test_a_run_killed_and_resumed_counts_every_step(tmp_path, start_group):
    """SIGKILL in the middle of a run on users; it goes on, as users only, and never exceeds ε."""
    run = tmp_path / "run"
    (process,) = start_group(1, [__file__, run, "--kill-me"])
    ledger = run / "ledger.jsonl"
    while process.poll() is None and not (ledger.exists() and ledger.read_bytes().count(b"\n") > 4):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = read_ledger(run)
    assert 4 <= killed.steps < PLAN.steps
    assert (killed.plan.unit, killed.plan.examples_per_user) == ("user", 4)
    as_examples = replace(PLAN, examples_per_user=None)
    with pytest.raises(PrivacyError, match="began with plan examples_per_user = 4 and cannot continue with None"):
        trainer_of(run, Ranks(), plan=as_examples).resume(run)
    trainer = trainer_of(run, Ranks()).resume(run)
    trainer.fit(examples(), users=IDS)
    record = read_ledger(run)
    assert record.steps == PLAN.steps
    assert record.epsilon() == PLAN.epsilon


@pytest.mark.slow
def test_two_processes_train_on_shards_of_users_and_give_the_run_of_one(run_group, tmp_path):
    group = run_group("users", 2, __file__)
    alone = seeded(tmp_path / "alone", Ranks())
    for rank in range(2):
        for found, expected in zip(torch.load(group / f"seeded-{rank}.pt"), alone, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert "differ in users" in torch.load(group / f"differing-{rank}.pt")


if __name__ == "__main__":
    if "--kill-me" in sys.argv:
        slowly(Path(sys.argv[1]))
    else:
        run_here({"seeded": seeded, "differing": differing})
