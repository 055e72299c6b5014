"""Noise and training data on a CUDA device."""

import pytest
from pretend_cuda.device import real_device
from pretend_cuda.start import NoDevice, failures, start


@pytest.mark.parametrize("group", ["noise", "data"])
def test_on_the_device(monkeypatch, group):
    if real_device() is None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # a pretend device cannot run what Triton compiles
    try:
        outcomes = start(group)
    except NoDevice as reason:
        pytest.skip(str(reason))
    assert outcomes
    assert not failures(outcomes)
