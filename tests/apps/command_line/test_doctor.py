"""``dp-microadam doctor``: what it prints, and that its self-check can fail."""

import json

import pytest
import torch

from dp_microadam import ClippedGradients
from dp_microadam.apps.command_line.cli import main
from dp_microadam.clipping.self_check import TOLERANCE, check_exactness


def test_doctor_says_what_is_here_and_that_gradients_are_exact(capsys):
    assert main(["doctor", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    for word in ("Versions", torch.__version__, "Devices", "cpu", "Data found", "digits", ": exact"):
        assert word in out


def test_json_has_all_of_it(capsys):
    assert main(["doctor", "--seconds", "0.01", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exact"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert {one["name"] for one in report["data"]} >= {"digits", "cifar10"}
    (check,) = [check for check in report["self_check"] if check["device"] == "cpu"]
    assert check["networks"] >= 4
    assert check["deviation"] < TOLERANCE


def test_a_package_that_is_not_installed_is_named_with_its_extra(capsys, monkeypatch):
    from importlib import metadata

    real = metadata.version

    def version(name):
        if name == "lightning":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor", "--seconds", "0.01"]) == 0
    assert "pip install 'dp-microadam[lightning]'" in " ".join(capsys.readouterr().out.split())


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
