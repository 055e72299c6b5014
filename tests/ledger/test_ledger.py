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
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam import InputError, PrivacyError, PrivacyLedger, PrivacyPlan, Randomness
from dp_microadam.accounting.costs import SubsampledGaussian, epsilon
from dp_microadam.ledger.ledger import LEDGER_NAME, RunSettings, read_ledger, spent_together, write_past_steps

PLAN = PrivacyPlan.solve(dataset_size=1000, batch_size=50, delta=1e-5, noise_multiplier=2.0, steps=100_000)
SETTINGS = RunSettings(private=True, randomness="operating system's entropy, statistical generator", sensitivity=1.0)

FIXTURES = Path(__file__).parent / "fixtures" / "version-0.1"

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
    "the first step removed": lambda lines: [lines[0], *lines[2:]],
    "two lines changed over": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "a line repeated": lambda lines: [*lines, lines[1]],
    "the last line repeated": lambda lines: [*lines, lines[-1]],
    "a line made unreadable": lambda lines: [*lines[:3], b"{" + lines[3], *lines[4:]],
    "a line emptied": lambda lines: [*lines[:3], b"\n", *lines[4:]],
    "an entry twice": lambda lines: [*lines[:3], with_sigma(lines[3], b'2.0, "noise_multiplier": 20.0'), *lines[4:]],
    "not a number": lambda lines: [*lines[:-1], with_sigma(lines[-1], b"NaN")],
    "a number too large": lambda lines: [*lines[:-1], with_sigma(lines[-1], b"1e999")],
    "line ends of another system": lambda lines: [line.replace(b"\n", b"\r\n") for line in lines],
    "one such line end": lambda lines: [*lines[:3], lines[3].replace(b"\n", b"\r\n"), *lines[4:]],
    "another dataset size": lambda lines: [lines[0].replace(b'"dataset_size": 1000', b'"dataset_size": 100000'), *lines[1:]],
    "another delta": lambda lines: [lines[0].replace(b'"delta": 1e-05', b'"delta": 0.01'), *lines[1:]],
    "another stamp": lambda lines: [lines[0].replace(b'"private": true', b'"private": false'), *lines[1:]],
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


@examples(20, quick=8)
@given(keep=st.integers(1, 150), more=st.integers(0, 3))
def test_the_chain_goes_on_over_a_torn_line(tmp_path_factory, keep, more):
    folder = tmp_path_factory.mktemp("torn")
    content = make(folder, steps=3).read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    (folder / LEDGER_NAME).write_bytes(content[: last + min(keep, len(content) - last - 1)])
    published = read_ledger(folder).head
    with PrivacyLedger.resume(folder, PLAN, SETTINGS, position=0, head=published) as ledger:
        for _ in range(more):
            ledger.record_step()
        assert ledger.head == read_ledger(folder).head
    assert read_ledger(folder).steps == 3 + more
    if more:  # what the crash left is part of the chain now
        put(folder, [*lines_of(folder)[:3], b"{" + lines_of(folder)[3], *lines_of(folder)[4:]])
        with pytest.raises(PrivacyError, match="line 5 of"):
            read_ledger(folder)


def test_the_head_shows_whether_a_ledger_was_rolled_back(tmp_path):
    make(tmp_path, steps=5)
    backup = lines_of(tmp_path)[:4]
    record = read_ledger(tmp_path)
    assert len(record.head) == len(record.run) == 32
    assert record.steps_at(record.head) == 5
    put(tmp_path, backup)
    rolled_back = read_ledger(tmp_path)
    assert rolled_back.steps == 3
    assert rolled_back.steps_at(record.head) is None
    assert record.steps_at(rolled_back.head) == 3
    with PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=3) as ledger:  # no file can know of the steps it lacks
        ledger.record_step()
        ledger.record_step()
    assert read_ledger(tmp_path).steps_at(record.head) is None


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


def test_a_file_system_without_locks_is_called_that(tmp_path, monkeypatch):
    make(tmp_path)

    def none_left(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none_left)
    with pytest.raises(PrivacyError, match=r"cannot be locked \(No locks available\)"):
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0)


def test_a_ledger_that_cannot_be_read_gives_its_lock_back(tmp_path):
    make(tmp_path, steps=2)
    whole = lines_of(tmp_path)
    put(tmp_path, [whole[0], whole[2]])
    with pytest.raises(PrivacyError, match="line 2"):
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0)
    put(tmp_path, whole)
    PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=2).close()


def old_ledger(folder: Path, name: str) -> Path:
    folder.mkdir()
    shutil.copy(FIXTURES / f"{name}.jsonl", folder / LEDGER_NAME)
    return folder


OLD_PLAN = PrivacyPlan(1000, 50, 2.0, 20, 1e-5, accountant="rdp")


@pytest.mark.parametrize(("name", "steps", "torn"), [("whole", 6, 0), ("torn", 6, 2), ("opacus", 5, 0)])
def test_ledgers_of_version_0_1_are_read_as_before(tmp_path, name, steps, torn):
    record = read_ledger(old_ledger(tmp_path / "run", name))
    assert (record.steps, record.torn_lines, record.run) == (steps, torn, None)
    if name == "torn":
        assert record.phases == {"select": 3, "train": 1}
        assert record.processes == {2: 1}
    if name == "opacus":
        assert record.spent == (SubsampledGaussian(0.0999, 1.0, 3), SubsampledGaussian(0.0999, 2.0, 2))
    else:
        assert record.spent == (SubsampledGaussian(0.05, 2.0, 6),)


@pytest.mark.parametrize("name", ["whole", "torn"])
def test_a_ledger_of_version_0_1_goes_on_and_its_chain_begins_with_what_is_there(tmp_path, name):
    folder = old_ledger(tmp_path / "run", name)
    for expected in (6, 8):
        with PrivacyLedger.resume(folder, OLD_PLAN, SETTINGS, position=expected) as ledger:
            assert [ledger.record_step(), ledger.record_step()] == [expected, expected + 1]
    record = read_ledger(folder)
    assert record.spent == (SubsampledGaussian(0.05, 2.0, 10),)
    assert len(record.run) == 32
    lines = lines_of(folder)
    for place in range(len(lines) - 1):
        changed = lines.copy()
        changed[place] = changed[place].replace(b"0.05", b"0.01")
        put(folder, changed)
        with pytest.raises(PrivacyError, match=r"line \d+ of"):
            read_ledger(folder)
    put(folder, [*lines, b'{"step": 10, "sample_rate": 0.05, "noise_multiplier": 2.0}\n'])
    with pytest.raises(PrivacyError, match="does not end in a hash"):
        read_ledger(folder)


OLD_EDITS = {
    "a larger noise multiplier in the lines": lambda lines: [lines[0], *(with_sigma(line, b"20.0") for line in lines[1:])],
    "a larger noise multiplier in the header": lambda lines: [with_sigma(lines[0], b"20.0"), *lines[1:]],
    "another batch size": lambda lines: [lines[0].replace(b'"batch_size": 50', b'"batch_size": 5'), *lines[1:]],
    "a stamp that contradicts": lambda lines: [lines[0].replace(b'"private": true', b'"private": false'), *lines[1:]],
    "words for the stamp": lambda lines: [lines[0].replace(b'"private": true', b'"private": "true"'), *lines[1:]],
    "more steps than planned": lambda lines: [lines[0].replace(b'"steps": 20', b'"steps": 5'), *lines[1:]],
    "a repeated step": lambda lines: [*lines, lines[1]],
    "two ledgers in one": lambda lines: [*lines, *lines],
    "an entry twice": lambda lines: [*lines[:-1], with_sigma(lines[-1], b'2.0, "noise_multiplier": 20.0')],
    "not a number": lambda lines: [*lines[:-1], with_sigma(lines[-1], b"Infinity")],
    "a huge step": lambda lines: [*lines, lines[-1].replace(b'"step": 5', b'"step": 1000000000000')],
    "a step in words": lambda lines: [*lines[:-1], lines[-1].replace(b'"step": 5', b'"step": "5"')],
    "processes that are none": lambda lines: [*lines[:-1], lines[-1].replace(b"}", b', "processes": -3}')],
    "a phase that is none": lambda lines: [*lines[:-1], lines[-1].replace(b"}", b', "phase": 7}')],
}


@pytest.mark.parametrize("edit", OLD_EDITS.values(), ids=OLD_EDITS.keys())
def test_a_ledger_of_version_0_1_that_contradicts_its_header_is_refused(tmp_path, edit):
    folder = old_ledger(tmp_path / "run", "whole")
    before = lines_of(folder)
    put(folder, edit(before))
    assert lines_of(folder) != before
    with pytest.raises(PrivacyError, match=r"line \d of"):
        read_ledger(folder)


def test_noise_edited_in_a_ledger_of_opacus_and_version_0_1_is_refused(tmp_path):
    """Its lines have their own noise, so only the least of it can be compared."""
    folder = old_ledger(tmp_path / "run", "opacus")
    lines = lines_of(folder)
    put(folder, [lines[0], *(line.replace(b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0') for line in lines[1:])])
    with pytest.raises(PrivacyError, match="the least in a line is 2"):
        read_ledger(folder)


def test_steps_missing_from_a_ledger_of_version_0_1_count_as_spent(tmp_path):
    folder = old_ledger(tmp_path / "run", "whole")
    lines = lines_of(folder)
    put(folder, lines[:2] + lines[4:])
    assert read_ledger(folder).steps == 6


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


def test_reading_while_a_process_writes_is_allowed(tmp_path):
    with PrivacyLedger.create(tmp_path, PLAN, SETTINGS) as ledger:
        ledger.record_step()
        assert read_ledger(tmp_path).steps == 1
        ledger.record_step()
        with pytest.raises(PrivacyError, match="in use"):  # reading did not drop the lock
            PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=0)


def test_a_ledger_shorter_than_the_checkpoint_is_refused(tmp_path):
    make(tmp_path, steps=5)
    with pytest.raises(PrivacyError, match=r"records 5 steps, but the checkpoint includes 6"):
        PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=6)
    PrivacyLedger.resume(tmp_path, PLAN, SETTINGS, position=5).close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("noise_multiplier", 1.9), ("batch_size", 51), ("steps", 5), ("delta", 1e-6), ("accountant", "rdp")],
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


def test_a_secure_run_of_a_version_that_drew_on_the_cpu_only_goes_on(tmp_path):
    before = RunSettings(private=True, randomness="operating system's entropy, AES-256 in counter mode", sensitivity=1.0)
    PrivacyLedger.create(tmp_path, PLAN, before).close()
    source = Randomness.from_entropy(secure=True)
    now = RunSettings(private=True, randomness=source.description, sensitivity=1.0)
    with PrivacyLedger.resume(tmp_path, PLAN, now, position=0) as ledger:
        assert ledger.record_step() == 0


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
