"""``dp-microadam doctor``: what it prints, and that its self-check can fail."""

import getpass
import json
import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dp_microadam import ClippedGradients
from dp_microadam.clipping.self_check import TOLERANCE, check_exactness
from dp_microadam.workbench.command_line.cli import main


def test_doctor_says_what_is_here_what_is_missing_and_that_gradients_are_exact(capsys, monkeypatch):
    real = metadata.version

    def version(name):
        if name == "lightning":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor", "--seconds", "0.01"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in ("Versions", torch.__version__, "pip install 'dp-microadam[lightning]'", "Devices", "cpu", "digits", ": exact"):
        assert word in out


def test_json_has_all_of_it_and_no_name_of_a_host_a_user_or_a_folder(capsys):
    assert main(["doctor", "--seconds", "0.01", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["exact"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert report["data"].keys() >= {"digits", "cifar10"}
    (check,) = [check for check in report["self_check"] if check["device"] == "cpu"]
    assert check["networks"] >= 4
    assert check["deviation"] < TOLERANCE
    own = {str(Path.home()), str(Path.cwd()), platform.node()}
    assert not any(name in text for name in own if len(name) > 1)
    assert f"/{getpass.getuser()}" not in text


def test_seconds_must_be_positive(capsys):
    assert main(["doctor", "--seconds", "0"]) == 2
    assert "seconds is 0" in capsys.readouterr().err


class OneExampleUnclipped(ClippedGradients):
    """An engine with a mistake: the first example of a batch is not clipped."""

    @staticmethod
    def _coefficients(norms, bound, usable):
        coefficients = ClippedGradients._coefficients(norms, bound, usable)
        coefficients[0] = 1.01 * coefficients[0]
        return coefficients


def test_the_self_check_finds_one_gradient_that_is_one_percent_too_long():
    found = check_exactness(0.01, kinds=["linear layers"], engine=OneExampleUnclipped)
    assert not found.exact
    assert found.worst == "linear layers"


@pytest.mark.parametrize("kind", ["linear layers", "convolutions", "standardized weights", "attention"])
def test_each_kind_of_network_is_exact(kind):
    assert check_exactness(0.01, kinds=[kind]).exact
