"""The ledger, with real processes that are really killed."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam import InputError, PrivacyError, PrivacyPlan
from dp_microadam.accounting.costs import SubsampledGaussian, epsilon
from dp_microadam.ledger.ledger import (
    LEDGER_NAME,
    NO_HEAD,
    PrivacyLedger,
    RecordedStep,
    RunSettings,
    chained_line,
    most_of_one_example,
    read_ledger,
    spent_together,
    steps_together,
    write_past_steps,
)
from dp_microadam.ledger.statement import privacy_report, statement_in_words, write_privacy_files
from dp_microadam.plan.selection_plan import SelectionPlan

PLAN = PrivacyPlan.solve(dataset_size=1000, batch_size=50, delta=1e-5, noise_multiplier=2.0, steps=100_000)
SETTINGS = RunSettings(private=True, randomness="operating system's entropy, statistical generator", sensitivity=1.0)

# A process that resumes the ledger and reports each step on its output after recording it, as fast as it can.
RECORDER = f"""
import sys
from dp_microadam.ledger.ledger import PrivacyLedger, RunSettings
from dp_microadam.plan.plan import PrivacyPlan
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
    record = read_ledger(tmp_path / "run")
    assert record.plan == PLAN
    assert record.settings == SETTINGS
    assert record.spent == (SubsampledGaussian(0.05, 2.0, 3),)
    assert record.epsilon() == PLAN.epsilon_after(3)
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


@examples(60)
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
        assert ledger.head == read_ledger(folder).head, "what the crash left is part of the chain now"
    record = read_ledger(folder)
    assert record.steps == 6
    assert record.epsilon() == pytest.approx(PLAN.epsilon_after(6))


def lines_of(folder: Path) -> list[bytes]:
    return (folder / LEDGER_NAME).read_bytes().splitlines(keepends=True)


def put(folder: Path, lines: list[bytes]) -> None:
    (folder / LEDGER_NAME).write_bytes(b"".join(lines))


def with_sigma(line: bytes, sigma: bytes) -> bytes:
    return line.replace(b'"noise_multiplier": 2.0', b'"noise_multiplier": ' + sigma)


EDITS = {
    "a larger noise multiplier in one line": lambda lines: [*lines[:3], with_sigma(lines[3], b"20.0"), *lines[4:]],
    "a larger noise multiplier everywhere": lambda lines: [with_sigma(line, b"20.0") for line in lines],
    "a line removed": lambda lines: [*lines[:3], *lines[4:]],
    "two lines changed over": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "a line repeated": lambda lines: [*lines, lines[1]],
    "a line made unreadable": lambda lines: [*lines[:3], b"{" + lines[3], *lines[4:]],
    "a line emptied": lambda lines: [*lines[:3], b"\n", *lines[4:]],
    "an entry twice": lambda lines: [*lines[:3], with_sigma(lines[3], b'2.0, "noise_multiplier": 20.0'), *lines[4:]],
    "not a number": lambda lines: [*lines[:-1], with_sigma(lines[-1], b"NaN")],
    "a number too large": lambda lines: [*lines[:-1], with_sigma(lines[-1], b"1e999")],
    "line ends of another system": lambda lines: [line.replace(b"\n", b"\r\n") for line in lines],
    "another dataset size": lambda lines: [lines[0].replace(b'"dataset_size": 1000', b'"dataset_size": 100000'), *lines[1:]],
    "private and not": lambda lines: [lines[0].replace(b'"private": true', b'"private": false'), *lines[1:]],
    "the ledger twice": lambda lines: [*lines, *lines],
    "a header and nothing else, edited": lambda lines: [lines[0].replace(b'"steps": 100000', b'"steps": 200000')],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_ledger_that_was_edited_is_refused_by_the_line(tmp_path, edit):
    make(tmp_path, steps=6)
    before = lines_of(tmp_path)
    put(tmp_path, edit(before))
    assert lines_of(tmp_path) != before
    with pytest.raises(PrivacyError, match=r"line \d of .* the ledger was changed after it was written"):
        read_ledger(tmp_path)
    with pytest.raises(PrivacyError, match=r"line \d of"):
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0)


@pytest.mark.parametrize("other_plan", [PLAN, PrivacyPlan(1000, 50, 20.0, 100_000, 1e-5)], ids=["same plan", "other plan"])
def test_lines_under_the_header_of_another_run_are_refused(tmp_path, other_plan):
    make(tmp_path / "run", steps=4)
    make(tmp_path / "other", steps=4, plan=other_plan)
    put(tmp_path / "run", [*lines_of(tmp_path / "other")[:1], *lines_of(tmp_path / "run")[1:]])
    with pytest.raises(PrivacyError, match="line 2 of"):
        read_ledger(tmp_path / "run")
    put(tmp_path / "run", [*lines_of(tmp_path / "other"), *lines_of(tmp_path / "run")[1:]])
    with pytest.raises(PrivacyError, match="line 6 of"):
        read_ledger(tmp_path / "run")


@examples(150)
@given(data=st.data())
def test_no_change_to_any_byte_lowers_what_was_spent(data, tmp_path_factory):
    """Whatever is done to one place of the file: it is refused, or every recorded step still counts as it did."""
    folder = tmp_path_factory.mktemp("bytes")
    content = make(folder, steps=4).read_bytes()
    place = data.draw(st.integers(0, len(content) - 1), label="place")
    new = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"\n", b"\0", b"9", b"e3", b"}"])), label="instead of it")
    (folder / LEDGER_NAME).write_bytes(content[:place] + new + content[place + 1 :])
    try:
        record = read_ledger(folder)
    except (PrivacyError, InputError):
        return
    assert record.plan == PLAN
    assert record.steps >= 4
    assert record.epsilon() >= PLAN.epsilon_after(4)


def test_steps_whose_lines_were_joined_all_count(tmp_path):
    content = make(tmp_path, steps=4).read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n")
    (tmp_path / LEDGER_NAME).write_bytes(content[:last] + content[last + 1 :])
    assert read_ledger(tmp_path).steps == 4


def test_a_checkpoint_whose_head_the_ledger_never_had_is_refused(tmp_path):
    with PrivacyLedger.create(tmp_path, PLAN, SETTINGS) as ledger:
        ledger.record_step()
        kept = lines_of(tmp_path)
        ledger.record_step()
        head = ledger.head
    PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=2, head=head).close()
    put(tmp_path, kept)
    with PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0) as ledger:
        ledger.record_step()  # as many steps as the checkpoint took, and others
    with pytest.raises(PrivacyError, match=f"never had the hash {head}"):
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=2, head=head)


def test_two_continuations_of_one_ledger_differ_though_their_steps_are_alike(tmp_path):
    make(tmp_path / "one", steps=3)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        with PrivacyLedger.resume(tmp_path / name, PLAN, SETTINGS, position=3) as ledger:
            ledger.record_step()
            ledger.record_step()
    one, two = read_ledger(tmp_path / "one"), read_ledger(tmp_path / "two")
    assert one.run == two.run
    assert one.head != two.head
    assert [part.steps for part in spent_together([one, two])] == [7]
    assert [part.steps for part in spent_together([one, one])] == [5]
    assert read_ledger(make(tmp_path / "other", steps=1)).run != one.run


@pytest.mark.parametrize("what", ["replaced", "removed", "cut", "written by another"])
def test_a_file_that_changes_under_the_run_takes_no_more_steps(tmp_path, monkeypatch, what):
    """An editor that saves, a sync client, or a second machine where locks do not reach."""
    with PrivacyLedger.create(tmp_path, PLAN, SETTINGS) as ledger:
        for _ in range(3):
            ledger.record_step()
        content = ledger.path.read_bytes()
        if what == "replaced":
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").replace(ledger.path)
        elif what == "removed":
            ledger.path.unlink()
        elif what == "cut":
            ledger.path.write_bytes(b"".join(lines_of(tmp_path)[:2]))
        else:
            monkeypatch.setattr(fcntl, "flock", lambda *_: None)
            with PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=3) as second:
                second.record_step()
        with pytest.raises(PrivacyError, match="step 3 is not taken"):
            ledger.record_step()
        with pytest.raises(PrivacyError, match="not open"):
            ledger.record_step()


@pytest.mark.parametrize("line", [b"[" * 100_000, b"1" * 5000, b'"text"', b"\xff\xfe{}", b"\0" * 40], ids=lambda line: line[:3])
def test_a_line_of_any_rubbish_counts_as_a_step(tmp_path, line):
    make(tmp_path, steps=2)
    put(tmp_path, [*lines_of(tmp_path), line])
    assert read_ledger(tmp_path).steps == 3


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


def test_a_ledger_shorter_than_the_checkpoint_is_refused(tmp_path):
    make(tmp_path, steps=5)
    with pytest.raises(PrivacyError, match=r"records 5 steps, but the checkpoint includes 6"):
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=6)
    PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=5).close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("noise_multiplier", 1.9), ("batch_size", 51), ("steps", 5), ("delta", 1e-6), ("accountant", "rdp"), ("bands", 8)),
        *(("max_batch_size", 70), ("examples_per_user", 3)),
    ],
)
def test_a_run_whose_plan_differs_is_refused(tmp_path, field, value):
    other = PrivacyPlan.from_dict({**PLAN.to_dict(), field: value})
    for name, begun, now in (("one", PLAN, other), ("other", other, PLAN)):
        make(tmp_path / name, steps=2, plan=begun)
        with pytest.raises(PrivacyError, match=f"began with plan {field} ="):
            PrivacyLedger.resume(tmp_path / name, now, SETTINGS, position=2)


@pytest.mark.parametrize("change", [{"sensitivity": 2.0}, {"private": False, "randomness": "fixed seed 1: not private"}])
def test_a_different_sensitivity_is_refused(tmp_path, change):
    """Nor does a private run go on with a seed."""
    make(tmp_path, steps=1)
    with pytest.raises(PrivacyError, match=f"began with settings {next(iter(change))} = "):
        PrivacyLedger.resume(tmp_path, PLAN, replace(SETTINGS, **change), position=1)


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


def test_what_is_not_a_ledger_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="must be a run folder with"):
        read_ledger(tmp_path)
    (tmp_path / LEDGER_NAME).write_text("not json\n")
    with pytest.raises(InputError, match="does not start with the header of a privacy ledger"):
        read_ledger(tmp_path)


def test_nothing_private_is_written(tmp_path):
    """A line of the ledger has the step's number and the plan's public values, nothing that depends on data."""
    path = make(tmp_path, steps=3)
    first, *others = (json.loads(line).keys() for line in path.read_text().splitlines()[1:])
    assert first == {"step", "sample_rate", "noise_multiplier", "opened", "chain"}  # random bits of its own, and the hash
    assert all(line == {"step", "sample_rate", "noise_multiplier", "chain"} for line in others)


def test_steps_of_another_library_are_written_with_their_own_rate_and_noise(tmp_path):
    plan = PrivacyPlan(1000, 100, 1.0, 5, 1e-5)
    spent = (SubsampledGaussian(0.1, 1.0, 3), SubsampledGaussian(0.05, 2.0, 2))
    write_past_steps(tmp_path / "run", plan, SETTINGS, spent)
    assert read_ledger(tmp_path / "run").spent == spent
    with pytest.raises(InputError, match="at least as many"):
        write_past_steps(tmp_path / "other", plan, SETTINGS, (SubsampledGaussian(0.1, 1.0, 6),))
    assert not (tmp_path / "other").exists()


def forged(folder: Path, change) -> None:
    """The ledger with ``change`` applied to every line's values, and all hashes made anew, as a forger could."""
    lines, head = [], NO_HEAD
    for number, line in enumerate(lines_of(folder)):
        values = json.loads(line)
        del values["chain"]
        change(number, values)
        new, head = chained_line(values, head)
        lines.append(new)
    put(folder, lines)


SCHEDULED = PrivacyPlan(1000, 50, 2.0, 100_000, 1e-5, bands=4, max_batch_size=80)
"""Its lines say group and largest batch."""


@pytest.mark.parametrize(
    ("number", "change", "sentence"),
    [
        (2, {"noise_multiplier": 20.0}, "has noise_multiplier 20.0, but by its plan it is 2.0"),
        (2, {"sample_rate": 0.01}, "has sample_rate 0.01, but by its plan it is 0.2"),
        (2, {"step": 0}, "has step 0, but by its plan it is 1"),
        (2, {"group": 3}, "has group 3, but by its plan it is 1"),
        (2, {"max_batch_size": None}, "has max_batch_size None, but by its plan it is 80"),
        (0, {"plan": SCHEDULED.to_dict() | {"max_batch_size": None}}, "has max_batch_size 80, but by its plan it is None"),
        (0, {"plan": SCHEDULED.to_dict() | {"bands": 8}}, "has sample_rate 0.2, but by its plan it is 0.4"),
        (0, {"plan": SCHEDULED.to_dict() | {"steps": 9, "bands": 1}}, "has sample_rate 0.2, but by its plan it is 0.05"),
        (2, {"processes": "many"}, "is none that a run writes"),
        (0, {"run": 7}, "names the run 7, which is not 32 hexadecimal digits"),
    ],
)
def test_lines_that_contradict_the_plan_are_refused_even_with_new_hashes(tmp_path, number, change, sentence):
    make(tmp_path, steps=3, plan=SCHEDULED)
    forged(tmp_path, lambda at, values: values.update(change) if at == number else None)
    with pytest.raises(PrivacyError, match=f"line .* of .*{sentence}"):
        read_ledger(tmp_path)


FURTHER = PrivacyPlan(1000, 20, 1.5, 40, 1e-5, bands=4)


def test_a_further_plan_on_the_same_data_adds_to_epsilon_and_is_stated(tmp_path):
    make(tmp_path, steps=30)
    before = read_ledger(tmp_path).head
    with PrivacyLedger.extend(tmp_path, FURTHER, SETTINGS) as ledger:
        assert (ledger.steps, ledger.remaining) == (0, 40)
        assert [ledger.record_step() for _ in range(10)] == list(range(10))
    with PrivacyLedger.resume(tmp_path, FURTHER, SETTINGS, position=10) as ledger:
        assert ledger.remaining == 28, "two of the 40 steps are lost to another session with bands"
        ledger.record_step()
    record = read_ledger(tmp_path)
    assert (record.plan, record.steps, record.resumed_at) == (FURTHER, 11, (10,))
    assert record.spent == (SubsampledGaussian(0.05, 2.0, 30), SubsampledGaussian(0.08, 1.5, 4, bands=4))
    assert record.epsilon() == epsilon(record.spent, 1e-5) > max(PLAN.epsilon_after(30), FURTHER.epsilon_after(11))
    assert record.epsilon_after(11, (10,)) == record.epsilon()
    assert (record.steps_at(before), record.steps_at(record.head)) == (30, 41)
    report = privacy_report(record)
    assert report["epsilon"] == record.epsilon() < report["epsilon_planned"] == record.epsilon_after(40)
    words = statement_in_words(report)
    assert "30 steps with probability 0.05 and noise of 2 times the bound; every ε here is that of these steps and" in words
    assert "while all others keep their numbers" in words


def test_extending_again_adds_again_and_copies_count_once(tmp_path):
    make(tmp_path / "one", steps=5)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name, steps in (("one", 3), ("one", 2), ("two", 4)):
        with PrivacyLedger.extend(tmp_path / name, PLAN, SETTINGS) as ledger:
            for _ in range(steps):
                ledger.record_step()
    one, two = read_ledger(tmp_path / "one"), read_ledger(tmp_path / "two")
    assert [one.steps, len(one.plans), two.steps] == [2, 3, 4]
    assert one.epsilon() == PLAN.epsilon_after(10)
    assert [part.steps for part in spent_together([one, two])] == [14]


def test_a_killed_process_leaves_the_further_plan_or_the_one_before(tmp_path):
    """A line of a plan that was cut off is a spent step of the plan before it, which goes on."""
    make(tmp_path, steps=3)
    PrivacyLedger.extend(tmp_path, FURTHER, SETTINGS).close()
    content = (tmp_path / LEDGER_NAME).read_bytes()
    (tmp_path / LEDGER_NAME).write_bytes(content[:-40])
    record = read_ledger(tmp_path)
    assert (record.plan, record.steps) == (PLAN, 4)
    PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=3).close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dataset_size": 1001}, "plan has dataset_size = 1001, but the run began with 1000"),
        ({"delta": 1e-6}, "plan has delta = 1e-06"),
        ({"examples_per_user": 2}, "plan has examples_per_user = 2"),
    ],
)
def test_a_further_plan_for_other_data_or_another_promise_is_refused(tmp_path, change, sentence):
    make(tmp_path, steps=3)
    before = lines_of(tmp_path)
    other = PrivacyPlan.from_dict({**PLAN.to_dict(), **change})
    with pytest.raises(InputError, match=sentence):
        PrivacyLedger.extend(tmp_path, other, SETTINGS)
    assert lines_of(tmp_path) == before
    with PrivacyLedger.extend(tmp_path, PLAN, SETTINGS) as ledger:
        ledger.record_step()
    forged(tmp_path, lambda at, values: values.update(plan=other.to_dict()) if at == 4 else None)
    with pytest.raises(PrivacyError, match=r"line 5 of .* is none that a run writes"):
        read_ledger(tmp_path)


def test_a_search_is_not_extended(tmp_path):
    make(tmp_path, steps=1, plan=SelectionPlan.around(PrivacyPlan(1000, 50, 2.0, 100, 1e-5, accountant="rdp"), 10))
    with pytest.raises(InputError, match="plan is that of a search"):
        PrivacyLedger.extend(tmp_path, PLAN, SETTINGS)


BANDED = PrivacyPlan(10_000, 100, 1.5, 100, 1e-5, bands=8)


@examples(100)
@given(bands=st.integers(1, 6), sessions=st.lists(st.integers(1, 9), min_size=1, max_size=5), more=st.integers(0, 20))
def test_no_orders_of_the_examples_in_the_sessions_sample_one_more_often_than_is_counted(bands, sessions, more):
    """Brute force over the number that the example has in each session."""
    starts = [sum(sessions[:number]) for number in range(len(sessions))]
    total = sum(sessions)
    plan = PrivacyPlan(1000, 10, 1.5, max(bands, total + more), 1e-5, bands=bands)
    most = 0
    for numbers in product(range(bands), repeat=len(sessions)):
        taken = [
            sum(step % bands == number for step in range(start, start + length))
            for start, length, number in zip(starts, sessions, numbers, strict=True)
        ]
        most = max(most, sum(taken))
    assert plan.participations(total, starts[1:]) == most >= plan.participations(total)
    steps = (
        RecordedStep("", str(start), step, (plan.sample_rate, 1.5))
        for start, n in zip(starts, sessions, strict=True)
        for step in range(start, start + n)
    )
    assert sum(part.steps for part in most_of_one_example(steps, bands)) == most
    end = plan.last_step(starts[1:])
    if end > starts[-1]:
        within = plan.participations(plan.steps)
        assert plan.participations(end, starts[1:]) <= within
        assert end == plan.steps or plan.participations(end + 1, starts[1:]) > within


def test_a_run_that_is_resumed_ends_before_its_sessions_exceed_the_epsilon_of_the_plan(tmp_path):
    make(tmp_path, 3, BANDED)
    for session in range(12):
        with PrivacyLedger.resume(tmp_path, BANDED, SETTINGS, position=0) as ledger:
            assert ledger.remaining == min(97 - session, (12 - session) * 8)
            ledger.record_step()
    record = read_ledger(tmp_path)
    assert record.resumed_at == tuple(range(3, 15))
    assert record.epsilon() == BANDED.epsilon_after(15, record.resumed_at) == BANDED.epsilon > BANDED.epsilon_after(15)
    with (
        PrivacyLedger.resume(tmp_path, BANDED, SETTINGS, position=0) as ledger,
        pytest.raises(
            PrivacyError, match="15 steps of a run that was resumed 13 times are spent; one more would exceed its eps"
        ),
    ):
        ledger.record_step()
    report = write_privacy_files(tmp_path, record)
    assert report["composition"] == {"steps": 13, "sessions": 13}
    words = (tmp_path / "privacy.txt").read_text()
    assert "no example is in two steps closer than 8 within one of its 13 sessions, which count each by itself" in words


def test_continuations_of_copies_count_in_the_group_that_was_in_both(tmp_path):
    """20 steps, then the copies take 1 and 3 more: an example can be in 3 of the former and in one of each session."""
    make(tmp_path / "one", 20, BANDED)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name, steps in (("one", 1), ("two", 3)):
        with PrivacyLedger.resume(tmp_path / name, BANDED, SETTINGS, position=0) as ledger:
            for _ in range(steps):
                ledger.record_step()
    records = [read_ledger(tmp_path / name) for name in ("one", "two")]
    assert [record.spent[0].steps for record in records] == [4, 4]
    assert spent_together(records) == (SubsampledGaussian(0.08, 1.5, 5, bands=8),)
    assert steps_together(records) == 24
