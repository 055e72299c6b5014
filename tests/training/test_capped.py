"""Training with a cap on the batch, in one process and in several."""

import json
from dataclasses import replace

import pytest
import torch
from flat import flat
from processes import run_here
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.plan.plan import UnprotectedPlan
from dp_microadam.training.distributed import Ranks

SIZE, CAP = 24, 13
PLAN = PrivacyPlan(SIZE, 12, 0.01, 16, 1e-2, max_batch_size=CAP)
"""Hardly any noise: what a step publishes shows who was in it."""


def loss(model, batch):
    """Example i has the gradient e_i, times ten."""
    return 10 * model(batch).flatten()


def trainer(folder, ranks, *, observe, plan=PLAN, loss=loss, **options):
    model = nn.Linear(SIZE, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: observe(model.weight.grad.flatten().clone()))
    options = {"show_progress": False, "physical_batch_size": 4, **options}
    return PrivateTrainer(model, optimizer, plan, loss, run_dir=folder, ranks=ranks, **flat(**options))


def who_took_part(folder, ranks, **options):
    """For each step and example, how often it was in it."""
    seen = []
    trainer(folder, ranks, observe=lambda gradient: seen.append(gradient * PLAN.batch_size), **options).fit(
        torch.eye(SIZE, dtype=torch.float64)
    )
    return torch.stack(seen).round().long()


def failing(folder, ranks):
    """What each rank says if the last one cannot process its examples: all stop, none waits for the others."""

    taken = []

    def wrong(model, batch):
        if ranks.rank == ranks.world_size - 1 and len(taken) > 3:
            raise ValueError("made up")
        return loss(model, batch)

    try:
        trainer(folder, ranks, observe=taken.append, loss=wrong).fit(torch.eye(SIZE, dtype=torch.float64))
    except DPMicroAdamError as error:
        return str(error)


def test_no_step_of_a_run_has_more_examples_than_the_cap_and_its_epsilon_is_written(tmp_path):
    """The published gradients show who took part; lines of the ledger say nothing of it."""
    taken = who_took_part(tmp_path / "run", Ranks())
    assert taken.max() == 1
    assert taken.sum(1).max() <= CAP
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert written["epsilon"] == PLAN.epsilon > replace(PLAN, max_batch_size=None).epsilon
    assert written["sampling"]["max_batch_size"] == CAP
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert {tuple(sorted(set(line) - {"step", "chain", "opened"})) for line in lines} == {
        ("max_batch_size", "noise_multiplier", "sample_rate")
    }


@pytest.mark.slow
def test_an_unprotected_run_keeps_to_the_cap_too(tmp_path):
    seen = []
    plan = UnprotectedPlan(SIZE, 12, 16, max_batch_size=CAP)
    trainer(tmp_path / "run", Ranks(), observe=seen.append, plan=plan, seed=3).fit(torch.eye(SIZE, dtype=torch.float64))
    sizes = (torch.stack(seen) * 12 / 10).round().sum(1)
    assert sizes.max() == CAP


@pytest.mark.slow
def test_processes_agree_on_who_is_dropped_and_give_the_run_of_one(run_group, tmp_path):
    group = run_group("capped", 3, __file__)
    alone = who_took_part(tmp_path / "alone", Ranks(), seed=3)
    for rank in range(3):
        assert torch.equal(torch.load(group / f"seeded-{rank}.pt"), alone)
        private = torch.load(group / f"private-{rank}.pt")
        assert private.max() == 1
        assert private.sum(1).max() <= CAP
    assert alone.sum(1).max() == CAP
    said = [torch.load(group / f"failing-{rank}.pt") for rank in range(3)]
    assert "a training batch could not be processed (ValueError)" in said[2]
    assert all("another process of this run failed" in text for text in said[:2])


if __name__ == "__main__":
    seeded = {"seeded": lambda folder, ranks: who_took_part(folder, ranks, seed=3)}
    run_here({**seeded, "private": who_took_part, "failing": failing})
