"""What a person sees while a run trains."""

import io
import sys
import threading

from dp_microadam.training.progress import Progress, said_if_slow


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_says_that_the_check_is_repeated_until_that_step_is_done(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    progress = Progress(2000, 0, 64, lambda steps: "ε 0.33")
    progress.note("checking independence again")
    assert "checking independence again" in sys.stderr.getvalue()
    progress.advance(16)
    shown = progress._bar.tasks[0].fields["rate"]
    progress.close()
    assert shown.endswith("examples/s expected")


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
