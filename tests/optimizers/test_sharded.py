"""Optimizers on parameters that FSDP2 divides over processes: two and, in ``make test-all``, three, on the loopback."""

from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.fixture(scope="module")
def two(run_group):
    """The folder that two processes left."""
    return run_group("divided", 2, WORKER)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def left(request, run_group, two):
    """What processes found, of which three also tried to load the checkpoint of the two."""
    folder = two if request.param == 2 else run_group("divided", 3, WORKER, two / "MicroAdam")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", ["kernel", "plain", "tensor"])
def test_a_process_steps_its_part_as_if_it_were_a_parameter_of_its_own_and_sends_no_message(left, options):
    for found in left:
        own = found[options]
        assert same(own["after"], own["twin"])
        assert all(
            len(after) == 0 or not torch.equal(before, after) for before, after in zip(own["before"], own["after"], strict=True)
        )
        assert same(own["whole"], left[0][options]["whole"])
        assert own["messages"] == 0
        assert own["messages to put it together"] > 0, "messages are seen where there are some"


def test_a_process_keeps_its_part_of_the_state(left):
    for found in left:
        for kept, per_parameter in zip(found["large"], (0.97, 0.5), strict=True):
            # A counter and a number or two for each of two tensors, and a row more of 1000 than a third of 1000 rows.
            assert kept <= per_parameter * 1_001_000 / len(left) * 1.003 + 32


def test_a_distributed_checkpoint_brings_the_state_back_to_the_bit(left):
    for found in left:
        assert all(same(run["went on"], run["loaded"]) for run in found["checkpoints"])


def test_threshold_adam_does_not_depend_on_how_many_processes_share_the_model(left):
    """A threshold that all exceed: rounding may differ in the last bit of v̂."""
    for found in left:
        for divided, whole in zip(*found["threshold"].values(), strict=True):
            torch.testing.assert_close(divided, whole, rtol=1e-5, atol=1e-6)


def test_states_of_another_number_of_processes_are_refused(left):
    for found in left:
        assert "the world size" in found["refusal of a whole state"]
        if len(left) == 3:
            assert "Size mismatch between saved torch.Size([2, " in found["refusal"]
            assert "current: torch.Size([3, " in found["refusal"]


def test_it_works_behind_opacus_ghost_clipping_of_divided_models(left):
    for found in left:
        assert found["opacus"]["steps"] == {2}
        assert all(0 < moved <= 1 for moved in found["opacus"]["moved"])
        assert found["opacus"]["moved"][0] < 0.5, "two steps of density 0.1 move at most a fifth, and a rest of rounding up"
        assert same(found["opacus"]["whole"], left[0]["opacus"]["whole"])
