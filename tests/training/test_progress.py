"""What a person sees while a run trains."""

import io
import sys

from dp_microadam.training.progress import Progress


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
