"""What a person sees while a run trains."""

import threading

from dp_microadam.training.progress import said_if_slow


def test_slow_work_is_announced_and_quick_work_is_not(monkeypatch):
    said, texts = threading.Event(), []
    monkeypatch.setattr("dp_microadam.training.progress.tell", lambda text: (texts.append(text), said.set()))
    with said_if_slow("checking", patience=0.01):
        assert said.wait(10)
    assert texts == ["checking", "done in 0 s"]
    said.clear()
    with said_if_slow("checking", patience=0.01, shown=False):
        assert not said.wait(0.05)
    with said_if_slow("checking", patience=60):
        pass
    assert not said.is_set()
