"""MicroAdam on parameters that FSDP2 divides over processes: two and, in ``make test-all``, three, on the loopback."""

import importlib.util
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("sharded_worker.py")

_spec = importlib.util.spec_from_file_location("sharded_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


def found_in(folder, size):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def two(run_group):
    """The folder that two processes left."""
    return run_group("divided", 2, WORKER)


@pytest.fixture(scope="module")
def of_three(run_group, two):
    """What three processes found, which also tried to load the checkpoint of the two."""
    return found_in(run_group("divided", 3, WORKER, two / "checkpoint"), 3)


@pytest.fixture(scope="module")
def of_two(two):
    return found_in(two, 2)


@pytest.fixture(params=["of_two", pytest.param("of_three", marks=pytest.mark.slow)])
def left(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("options", worker.OPTIONS)
def test_a_process_steps_its_part_as_if_it_were_a_parameter_of_its_own(left, options):
    for found in left:
        for before, after, twin in zip(*(found[options][name] for name in ("before", "after", "twin")), strict=True):
            assert torch.equal(after, twin)
            assert after.numel() == 0 or not torch.equal(before, after)


@pytest.mark.parametrize("options", worker.OPTIONS)
def test_all_processes_have_the_same_whole(left, options):
    for found in left[1:]:
        assert all(
            torch.equal(one, other) for one, other in zip(left[0][options]["whole"], found[options]["whole"], strict=True)
        )


@pytest.mark.parametrize("options", worker.OPTIONS)
def test_a_step_sends_no_message(left, options):
    assert [found[options]["messages"] for found in left] == [0] * len(left)
    assert all(found[options]["messages to put it together"] > 0 for found in left), "messages are seen where there are some"


@pytest.mark.parametrize("options", worker.OPTIONS)
def test_the_state_stays_divided(left, options):
    """A process keeps what the largest part of each parameter takes, whatever its own part is: not the whole."""
    largest = max(found[options]["twin bytes"] for found in left)
    for found in left:
        # 8 bytes for the counter, and for the rounding key, of parameters of which another process has all.
        assert largest <= found[options]["bytes"] <= largest + 16 * 6
    from dp_microadam import MicroAdam

    model = worker.network()
    whole = MicroAdam(model.parameters(), lr=0.1, **worker.OPTIONS[options])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    whole.step()
    assert left[0][options]["bytes"] < 1.35 * whole.state_bytes() / len(left)


def test_a_process_keeps_its_part_of_a_byte_per_parameter(left):
    for found in left:
        # Two counters of 8 bytes, and a row more of 1000 than a third of 1000 rows.
        assert found["large"] <= 0.97 * 1_001_000 / len(left) * 1.003 + 16


def test_a_distributed_checkpoint_brings_the_state_back_to_the_bit(left):
    for found in left:
        went_on, loaded = found["checkpoint"]["went on"], found["checkpoint"]["loaded"]
        assert all(torch.equal(one, other) for one, other in zip(went_on, loaded, strict=True))


def test_tensor_adam_does_not_depend_on_how_many_processes_share_the_model(left):
    for found in left:
        for divided, whole in zip(*found["tensor adam"].values(), strict=True):
            torch.testing.assert_close(divided, whole, rtol=1e-6, atol=1e-7)


def test_the_state_of_one_process_is_refused_by_several(left):
    for found in left:
        assert "the world size" in found["refusals"]["state of one process"]


@pytest.mark.slow
def test_the_checkpoint_of_another_number_of_processes_is_refused(of_three):
    for found in of_three:
        assert "Size mismatch between saved torch.Size([2, " in found["refusals"]["checkpoint"]
        assert "current: torch.Size([3, " in found["refusals"]["checkpoint"]


def test_it_works_behind_opacus_ghost_clipping_of_divided_models(left):
    for found in left:
        assert found["opacus"]["steps"] == {2}
        assert all(0 < moved <= 1 for moved in found["opacus"]["moved"])
        assert found["opacus"]["moved"][0] < 0.5, "two steps of density 0.1 move at most a fifth, and a rest of rounding up"
        assert all(
            torch.equal(one, other) for one, other in zip(left[0]["opacus"]["after"], found["opacus"]["after"], strict=True)
        )
