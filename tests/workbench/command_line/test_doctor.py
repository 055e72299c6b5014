"""``dp-microadam doctor``: what it prints, and that its self-check can fail."""

import getpass
import json
import platform
from pathlib import Path

import pytest
import torch

from dp_microadam import ClippedGradients
from dp_microadam.clipping.self_check import TOLERANCE, check_exactness
from dp_microadam.workbench.command_line import strategy_times
from dp_microadam.workbench.command_line.cli import main


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


@pytest.fixture
def two_layers(monkeypatch):
    monkeypatch.setattr(strategy_times, "CONVOLUTIONS", strategy_times.CONVOLUTIONS[-1:])
    monkeypatch.setattr(strategy_times, "LINEAR", strategy_times.LINEAR[:1])


def test_measured_strategies_are_printed_and_written_to_a_file_that_can_be_sent(two_layers, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--seconds", "0.01", "--measure", "--batch", "2", "--out", str(file)]) == 0
    out = capsys.readouterr().out
    assert "16→32 4×4 at 13×13 stride 2" in out
    assert "784→256 linear, 1 positions" in out
    text = file.read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["torch"] == torch.__version__
    assert {"machine", "commit", "date", "threads"} <= found.keys()
    convolution, linear = found["results"]["strategies"]["cpu"]["layers"]
    assert convolution["forming"].keys() == {"grouped", "patches"}
    assert linear["milliseconds"].keys() == {"ghost", "keep", "drop"}
    for layer in (convolution, linear):
        assert layer["times_the_fastest"] == pytest.approx(
            layer["milliseconds"][layer["chosen"]] / min(layer["milliseconds"][name] for name in layer["allowed"])
        )
    own = {str(Path.home()), str(tmp_path), str(Path.cwd()), platform.node()}
    assert not any(name in text for name in own if len(name) > 1), "names of hosts and folders stay here"
    assert f"/{getpass.getuser()}" not in text


@pytest.mark.slow
def test_on_a_cpu_nothing_is_measured_unless_asked_for(capsys):
    assert main(["doctor", "--seconds", "0.01", "--json"]) == 0
    strategies = json.loads(capsys.readouterr().out)["strategies"]
    assert "cpu" not in strategies


def test_a_file_of_measurements_is_not_overwritten(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    file.write_text("earlier")
    assert main(["doctor", "--seconds", "100", "--out", str(file)]) == 2
    assert "exists" in capsys.readouterr().err
    assert file.read_text() == "earlier"
    assert main(["doctor", "--seconds", "100", "--out", str(tmp_path / "missing" / "doctor.json")]) == 2


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
