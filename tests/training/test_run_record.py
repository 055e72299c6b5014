"""What a run says of its speed and memory."""

import torch

from dp_microadam.training import run_record
from dp_microadam.training.run_record import Pace, sizes


def test_the_state_of_adam_itself_is_what_it_is_measured_against():
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    found = sizes(model, optimizer, {})
    counters = 4 * len(list(model.parameters()))
    assert found["optimizer_state_bytes"] - counters == found["adam_state_bytes"] == 8 * 620


def test_pace_leaves_out_what_is_not_training(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_record.time, "perf_counter", lambda: now[0])
    pace = Pace()
    assert pace.take() is None
    for _ in range(3):
        pace.step()
        now[0] += 0.5
    pace.rest()
    now[0] += 20.0  # an evaluation
    pace.step()
    now[0] += 0.5
    assert pace.take() == 2.0
    assert pace.take() is None


def test_what_a_single_step_took_is_never_told():
    pace = Pace()
    for _ in range(3):
        pace.step()
        assert pace.take() is None
    pace.step()
    assert pace.take() is not None
