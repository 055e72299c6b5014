"""The ledger, with real processes that are really killed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_microadam import InputError, PrivacyError, PrivacyLedger, PrivacyPlan
from dp_microadam.privacy.accounting import SubsampledGaussian, epsilon
from dp_microadam.privacy.ledger import LEDGER_NAME, RunSettings, read_ledger, write_past_steps

PLAN = PrivacyPlan.solve(dataset_size=1000, batch_size=50, delta=1e-5, noise_multiplier=2.0, steps=100_000)
SETTINGS = RunSettings(private=True, randomness="operating system's entropy, statistical generator", sensitivity=1.0)

# A process that resumes the ledger and reports each step on its output after recording it, as fast as it can.
RECORDER = f"""
import sys
from dp_microadam.privacy.ledger import PrivacyLedger, RunSettings
from dp_microadam.privacy.plan import PrivacyPlan
plan = PrivacyPlan(1000, 50, 2.0, 100_000, 1e-5)
settings = RunSettings(private=True, randomness={SETTINGS.randomness!r}, sensitivity=1.0)
with PrivacyLedger.resume(sys.argv[1], plan, settings, position=0) as ledger:
    print("open", flush=True)
    while True:
        print(ledger.record_step(), flush=True)
"""


def make(folder: Path, steps: int = 0, plan: PrivacyPlan = PLAN) -> Path:
    with PrivacyLedger.create(folder, plan, SETTINGS) as ledger:
        for _ in range(steps):
            ledger.record_step()
    return folder / LEDGER_NAME


def recorder(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RECORDER, str(folder)], stdout=subprocess.PIPE, text=True)


def test_steps_are_recorded_and_counted(tmp_path):
    with PrivacyLedger.create(tmp_path / "run", PLAN, SETTINGS) as ledger:
        assert [ledger.record_step() for _ in range(3)] == [0, 1, 2]
        assert (ledger.steps, ledger.remaining) == (3, 99_997)
        assert ledger.epsilon() == PLAN.epsilon_after(3)
    record = read_ledger(tmp_path / "run")
    assert record.plan == PLAN
    assert record.settings == SETTINGS
    assert record.spent == (SubsampledGaussian(0.05, 2.0, 3),)
    assert record.torn_lines == 0
    assert record.versions["dp-microadam"]


def test_a_step_is_on_the_disk_before_record_step_returns(tmp_path, monkeypatch):
    """When the file is synced, the whole line is already in it, and only then does the call return."""
    with PrivacyLedger.create(tmp_path, PLAN, SETTINGS) as ledger:
        synced = []
        real = os.fsync

        def watch(file: int) -> None:
            real(file)
            synced.append(read_ledger(tmp_path).steps)

        monkeypatch.setattr(os, "fsync", watch)
        ledger.record_step()
        assert synced == [1]
        ledger.record_step()
        assert synced == [1, 2]


def test_a_step_that_cannot_be_written_is_not_taken(tmp_path, monkeypatch):
    """A full disk, say. The ledger then stays shut: what it holds is no longer known."""
    with PrivacyLedger.create(tmp_path, PLAN, SETTINGS) as ledger:
        ledger.record_step()

        def full(file: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(PrivacyError, match=r"step 1 is not taken: .*No space left"):
                ledger.record_step()
        with pytest.raises(PrivacyError, match="not open"):
            ledger.record_step()
    with PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=1) as ledger:
        assert ledger.steps == 2


def test_a_killed_process_never_uses_a_step_the_ledger_lacks(tmp_path):
    """Kill -9 at random moments, several times over one run: what was used is always covered, and the run goes on."""
    make(tmp_path)
    used = 0
    for delay in (0.0, 0.003, 0.02, 0.1):
        process = recorder(tmp_path)
        assert process.stdout.readline() == "open\n"
        process.stdout.readline()
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        reported = process.stdout.read().split()
        process.wait()
        before, used = used, read_ledger(tmp_path).steps
        assert used > before
        if reported:
            assert used >= int(reported[-1]) + 1
    with PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=used) as ledger:
        assert ledger.record_step() == used


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_torn_last_line_is_recognised_and_counted_as_spent(data, tmp_path_factory):
    """A crash may leave any part of the last line, or a hole; a started step is a spent step."""
    folder = tmp_path_factory.mktemp("torn")
    path = make(folder, steps=5)
    content = path.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    keep = data.draw(st.integers(1, len(content) - last - 1), label="bytes kept of the last line")
    hole = data.draw(st.booleans(), label="the rest is zeros")
    path.write_bytes(content[: last + keep] + b"\0" * (hole * (len(content) - last - keep)))
    assert read_ledger(folder).steps == 5
    with PrivacyLedger.resume(folder, PLAN, SETTINGS, position=4) as ledger:
        assert ledger.steps == 5
        assert ledger.record_step() == 5
    record = read_ledger(folder)
    assert record.steps == 6
    assert record.epsilon() == pytest.approx(PLAN.epsilon_after(6))


def test_torn_lines_of_several_crashes_all_count(tmp_path):
    path = make(tmp_path, steps=2)
    for _ in range(3):
        with path.open("ab") as file:
            file.write(b'{"step": ')
        with PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0) as ledger:
            ledger.record_step()
    record = read_ledger(tmp_path)
    assert record.steps == 8
    assert record.torn_lines == 3


def test_steps_missing_in_the_middle_count_as_spent(tmp_path):
    path = make(tmp_path, steps=6)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[4:]))
    assert read_ledger(tmp_path).steps == 6


def test_a_ledger_with_repeated_steps_is_refused(tmp_path):
    path = make(tmp_path, steps=3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[1]]))
    with pytest.raises(PrivacyError, match="repeats step 0"):
        read_ledger(tmp_path)


def test_a_second_process_is_refused_while_the_first_lives_and_welcome_after(tmp_path):
    make(tmp_path)
    process = recorder(tmp_path)
    try:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(PrivacyError, match="is in use by another process"):
            PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0).close()


def test_a_forked_worker_neither_records_nor_keeps_the_lock(tmp_path):
    with PrivacyLedger.create(tmp_path, PLAN, SETTINGS) as ledger:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # a data-loading worker, which outlives the ledger of its parent
            try:
                ledger.record_step()
                answer = b"recorded"
            except PrivacyError:
                answer = b"refused"
            os.write(writer, answer)
            time.sleep(60)
            os._exit(0)
        assert os.read(reader, 100) == b"refused"
        ledger.record_step()
        with pytest.raises(PrivacyError, match="in use"):
            PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0)
    try:
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=1).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_reading_while_a_process_writes_is_allowed(tmp_path):
    with PrivacyLedger.create(tmp_path, PLAN, SETTINGS) as ledger:
        ledger.record_step()
        assert read_ledger(tmp_path).steps == 1
        ledger.record_step()
        with pytest.raises(PrivacyError, match="in use"):  # reading did not drop the lock
            PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0)


def test_a_ledger_shorter_than_the_checkpoint_is_refused(tmp_path):
    make(tmp_path, steps=5)
    with pytest.raises(PrivacyError, match=r"records 5 steps and the checkpoint has taken 6"):
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=6)
    PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=5).close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("noise_multiplier", 1.9), ("batch_size", 51), ("steps", 5), ("delta", 1e-6), ("accountant", "pld")],
)
def test_a_run_whose_plan_differs_is_refused(tmp_path, field, value):
    make(tmp_path, steps=2)
    other = PrivacyPlan.from_dict({**PLAN.to_dict(), field: value})
    with pytest.raises(PrivacyError, match=f"began with plan {field} ="):
        PrivacyLedger.resume(tmp_path, other, SETTINGS, position=2)


def test_a_private_run_cannot_go_on_with_a_seed_nor_the_other_way_round(tmp_path):
    seeded = RunSettings(private=False, randomness="fixed seed 1: not private", sensitivity=1.0)
    make(tmp_path / "private", steps=1)
    PrivacyLedger.create(tmp_path / "seeded", PLAN, seeded).close()
    with pytest.raises(PrivacyError, match="began with settings private = True"):
        PrivacyLedger.resume(tmp_path / "private", PLAN, seeded, position=1)
    with pytest.raises(PrivacyError, match="began with settings private = False"):
        PrivacyLedger.resume(tmp_path / "seeded", PLAN, SETTINGS, position=0)
    header = json.loads((tmp_path / "seeded" / LEDGER_NAME).read_text().splitlines()[0])
    assert header["stamp"] == "not private"


def test_a_different_sensitivity_is_refused(tmp_path):
    make(tmp_path, steps=1)
    doubled = RunSettings(private=True, randomness=SETTINGS.randomness, sensitivity=2.0)
    with pytest.raises(PrivacyError, match=r"began with settings sensitivity = 1\.0"):
        PrivacyLedger.resume(tmp_path, PLAN, doubled, position=1)


def test_the_ledger_never_records_more_than_the_plan(tmp_path):
    short = PrivacyPlan.solve(dataset_size=1000, batch_size=50, delta=1e-5, noise_multiplier=2.0, steps=3)
    with PrivacyLedger.create(tmp_path, short, SETTINGS) as ledger:
        for _ in range(3):
            ledger.record_step()
        assert ledger.remaining == 0
        with pytest.raises(PrivacyError, match="all 3 steps of the plan are spent"):
            ledger.record_step()
    assert read_ledger(tmp_path).steps == 3
    assert read_ledger(tmp_path).epsilon() <= short.epsilon


def test_an_existing_ledger_is_never_overwritten(tmp_path):
    path = make(tmp_path, steps=2)
    content = path.read_bytes()
    with pytest.raises(InputError, match="has a ledger already"):
        PrivacyLedger.create(tmp_path, PLAN, SETTINGS)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [LEDGER_NAME]


def test_epsilon_from_the_ledger_by_either_accountant_at_any_delta(tmp_path):
    make(tmp_path, steps=40)
    record = read_ledger(tmp_path)
    for delta in (1e-7, 1e-5, 1e-3):
        for accountant in ("rdp", "pld"):
            expected = epsilon([SubsampledGaussian(0.05, 2.0, 40)], delta, accountant)
            assert record.epsilon(delta, accountant) == expected


def test_what_is_not_a_ledger_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="must be a run folder with"):
        read_ledger(tmp_path)
    (tmp_path / LEDGER_NAME).write_text("not json\n")
    with pytest.raises(InputError, match="does not begin like a privacy ledger"):
        read_ledger(tmp_path)


def test_nothing_private_is_written(tmp_path):
    """A line of the ledger has the step's number and the plan's public values, nothing that depends on data."""
    path = make(tmp_path, steps=2)
    for line in path.read_text().splitlines()[1:]:
        assert json.loads(line).keys() == {"step", "sample_rate", "noise_multiplier"}


def test_steps_of_another_library_are_written_with_their_own_rate_and_noise(tmp_path):
    plan = PrivacyPlan(1000, 100, 1.0, 5, 1e-5)
    spent = (SubsampledGaussian(0.1, 1.0, 3), SubsampledGaussian(0.05, 2.0, 2))
    write_past_steps(tmp_path / "run", plan, SETTINGS, spent)
    assert read_ledger(tmp_path / "run").spent == spent
    with pytest.raises(InputError, match="at least as many"):
        write_past_steps(tmp_path / "other", plan, SETTINGS, (SubsampledGaussian(0.1, 1.0, 6),))
    assert not (tmp_path / "other").exists()
