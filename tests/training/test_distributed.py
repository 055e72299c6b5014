"""Several processes train as one would, with the same guarantee. False-alarm rates of statistical tests are below 1e-6.

One group of processes per size runs all checks of ``distributed_worker.py``; the tests look at what they left.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch
from scipy import stats

from dp_microadam import InputError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.distributed import Ranks, ranks_here
from dp_microadam.workbench.command_line.cli import main

WORKER = Path(__file__).with_name("distributed_worker.py")
ALARM = 1e-8

_spec = importlib.util.spec_from_file_location("distributed_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


class Left:
    """What the processes of a group left: ``left["adam"]`` is a list, an entry per rank."""

    def __init__(self, folder, size):
        self.folder, self.size = folder, size

    def __getitem__(self, check):
        return [torch.load(self.folder / f"{check}-{rank}.pt", weights_only=False) for rank in range(self.size)]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def left(request, run_group):
    return Left(run_group("together", request.param, WORKER), request.param)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_the_clipped_sum_is_that_of_one_process(left):
    alone = worker.clipped_sum(Ranks())
    for sums in left["clipped sum"]:
        assert largest_difference(sums, alone) < 1e-10


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    """Weights after a method's 20 seeded steps in one process, and its ledger; each is computed once."""
    folder = tmp_path_factory.mktemp("alone")
    found = {}

    def run(method):
        if method not in found:
            found[method] = worker.seeded_run(folder, method, Ranks()), read_ledger(folder / method)
        return found[method]

    return run


def test_twenty_seeded_steps_are_those_of_one_process(left, of_one_process):
    for method in worker.methods_for(left.size):
        alone, ledger = of_one_process(method)
        for weights in left[method]:
            assert largest_difference(weights, alone) < 1e-9, method
        assert read_ledger(left.folder / method).phases == ledger.phases


def test_the_total_noise_has_exactly_the_plan_s_variance(left):
    for secure in worker.sources_for(left.size):
        published = torch.stack(left[f"noise {secure}"][0]["published"]).flatten()
        deviation = 1.5 * 0.8
        margin = stats.norm.isf(ALARM / 2) * (2 / published.numel()) ** 0.5
        assert abs(float(published.square().mean()) / deviation**2 - 1) < margin
        assert stats.kstest((published / deviation).numpy(), "norm").pvalue > ALARM


def test_every_rank_adds_all_noise_of_its_slice_and_none_elsewhere_independently_of_the_others(left):
    """A slice has 30,200 coordinates or more in two steps; a variance too small by a tenth is far outside of the margin."""
    for secure in worker.sources_for(left.size):
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
    for secure in worker.sources_for(left.size):
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
        assert not (left.folder / case).exists()


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
    alone = worker.evaluated(Ranks())
    for found in left["evaluated"]:
        assert found == pytest.approx(alone, abs=1e-12)


def test_private_metrics_are_those_of_all_ranks(left, tmp_path):
    alone = worker.shown_metrics(tmp_path, Ranks())[0]["outside_the_guarantee"]
    assert left["shown"][0][0]["outside_the_guarantee"] == pytest.approx(alone, abs=1e-9)


def test_runs_without_privacy_are_those_of_one_process_too(left, tmp_path):
    alone = worker.without_privacy(tmp_path, Ranks())
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


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_one_process_alone_goes_on(tmp_path, start_group, capsys):
    run, spent = train_until_one_is_killed(2, tmp_path, start_group)
    config = run / "config.toml"
    config.write_text(f"max_steps = {spent + 7}\n{config.read_text()}")
    assert main(["resume", str(run)]) == 0, capsys.readouterr().err
    assert read_ledger(run).processes == {2: spent}, "steps of one process alone are not in it"
    check_steps(run, spent + 7)


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
