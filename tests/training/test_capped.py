"""Training with a cap on the batch, in one process and in several."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flat import flat
from torch import nn

from dp_microadam import PrivateTrainer
from dp_microadam.plan.plan import UnprotectedPlan
from dp_microadam.training.distributed import Ranks

WORKER = Path(__file__).with_name("capped_worker.py")
_spec = importlib.util.spec_from_file_location("capped_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


def test_no_step_of_a_run_has_more_examples_than_the_cap_and_its_epsilon_is_written(tmp_path):
    """The published gradients show who took part; lines of the ledger say nothing of it."""
    taken = worker.who_took_part(tmp_path / "run", Ranks())
    assert taken.max() == 1
    assert taken.sum(1).max() <= worker.CAP
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert written["epsilon"] == worker.PLAN.epsilon > replace(worker.PLAN, max_batch_size=None).epsilon
    assert written["sampling"]["max_batch_size"] == worker.CAP
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert {tuple(sorted(set(line) - {"step", "chain", "opened"})) for line in lines} == {
        ("max_batch_size", "noise_multiplier", "sample_rate")
    }


@pytest.mark.slow
def test_an_unprotected_run_keeps_to_the_cap_too(tmp_path):
    seen = []
    model = nn.Linear(worker.SIZE, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.flatten().clone()))
    plan = UnprotectedPlan(worker.SIZE, 12, 16, max_batch_size=worker.CAP)
    trainer = PrivateTrainer(model, optimizer, plan, worker.loss, run_dir=tmp_path / "run", **flat(seed=3, show_progress=False))
    trainer.fit(torch.eye(worker.SIZE, dtype=torch.float64))
    sizes = (torch.stack(seen) * 12 / 10).round().sum(1)
    assert sizes.max() == worker.CAP


@pytest.mark.slow
def test_processes_agree_on_who_is_dropped_and_give_the_run_of_one(run_group, tmp_path):
    group = run_group("capped", 3, WORKER)
    alone = worker.who_took_part(tmp_path / "alone", Ranks(), seed=3)
    for rank in range(3):
        assert torch.equal(torch.load(group / f"seeded-{rank}.pt"), alone)
        private = torch.load(group / f"private-{rank}.pt")
        assert private.max() == 1
        assert private.sum(1).max() <= worker.CAP
    assert alone.sum(1).max() == worker.CAP
    said = [torch.load(group / f"failing-{rank}.pt") for rank in range(3)]
    assert "a training batch could not be processed (ValueError)" in said[2]
    assert all("another process of this run failed" in text for text in said[:2])
