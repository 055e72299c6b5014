"""Checkpoints are whole or not there, and damage is noticed."""

import resource
import signal

import pytest
import torch

from dp_microadam.training.checkpoint import CheckpointError, CheckpointFolder


def content(value):
    return {"updates": value, "model": {"weight": torch.full((1000,), float(value))}}


def test_the_newest_comes_back_and_old_ones_go(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for step in (0, 10, 20):
        folder.write(step, content(step))
    assert folder.positions() == [10, 20]
    position, found, damaged = folder.newest()
    assert (position, found["updates"], damaged) == (20, 20, [])
    assert torch.equal(found["model"]["weight"], torch.full((1000,), 20.0))


def test_a_checkpoint_with_any_bit_changed_or_cut_anywhere_is_not_used_but_the_one_before(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.write(1, content(1))
    newest = folder.write(2, content(2))
    whole = newest.read_bytes()
    for place in range(0, len(whole), 11):
        newest.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        position, found, damaged = folder.newest()
        assert torch.equal(found["model"]["weight"], content(position)["model"]["weight"])
        assert (found["updates"], damaged) == (position, [] if position == 2 else [newest.name])  # or it was of the padding
        newest.write_bytes(whole[:place])
        assert folder.newest()[::2] == (1, [newest.name])


def test_without_a_usable_checkpoint_it_says_which_are_damaged(tmp_path):
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match="there is none"):
        folder.newest()
    folder.write(3, content(3)).write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"all are damaged: step-000000003\.ckpt"):
        folder.newest()


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    # A limit on the size of files makes the operating system refuse the write half-way, as a full disk does.
    folder = CheckpointFolder(tmp_path)
    folder.write(1, content(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written .*; the checkpoint of step 1 is intact"):
            folder.write(2, content(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert folder.newest()[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001.ckpt"]


def test_a_checkpoint_cannot_carry_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("gotcha",))

    folder = CheckpointFolder(tmp_path)
    folder.write(1, {"updates": Evil()})
    with pytest.raises(CheckpointError, match=r"perhaps code, which is never run; use what this library wrote$"):
        folder.newest()
