"""The pretend device itself: it refuses, counts and draws as a real GPU would."""

import shutil

import pytest
from pretend_cuda import build
from pretend_cuda.start import NoDevice, failures, start


def test_it_refuses_and_counts_as_a_gpu_would():
    try:
        outcomes = start("counting")
    except NoDevice as reason:
        pytest.skip(str(reason))
    assert outcomes
    assert not failures(outcomes)


def test_without_a_compiler_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match="C\\+\\+ compiler"):
        build.library()
