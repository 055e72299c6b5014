"""``dp-microadam doctor``: what it prints, and that its self-check can fail."""

import getpass
import json
import platform
from importlib import metadata
from pathlib import Path

import torch

from dp_microadam import ClippedGradients
from dp_microadam.workbench.command_line.cli import main


def test_doctor_says_what_is_here_what_is_missing_and_that_gradients_are_exact(capsys, monkeypatch):
    real = metadata.version

    def version(name):
        if name == "lightning":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in (torch.__version__, "lightning │ not installed", "Devices", "cpu: clipped gradients are exact"):
        assert word in out


def test_json_has_all_of_it_and_no_name_of_a_host_a_user_or_a_folder(capsys):
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["exact"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert report["self_check"]["cpu"] is None
    own = {str(Path.home()), str(Path.cwd()), platform.node()}
    assert not any(name in text for name in own if len(name) > 1)
    assert f"/{getpass.getuser()}" not in text


def test_the_self_check_finds_one_gradient_that_is_not_clipped(capsys, monkeypatch):
    def all_but_one(norms, bound):
        return (bound / norms.clamp(min=bound)).index_fill(0, torch.tensor([0]), 1.0)

    monkeypatch.setattr(ClippedGradients, "_coefficients", staticmethod(all_but_one))
    assert main(["doctor"]) == 1
    assert "cpu: clipped gradients are NOT EXACT" in capsys.readouterr().out
