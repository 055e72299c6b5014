"""``dp-microadam audit`` as a user runs it."""

import contextlib
import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from dp_microadam.workbench.command_line.cli import main

# Findings hold at a confidence at which an honest pipeline is accused with a probability of 1e-7.
SURE = "0.9999999"


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The folder, exit code and output of one audit, run in an empty folder."""
    working = tmp_path_factory.mktemp("audit")
    with contextlib.chdir(working), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(["audit", "--canaries", "2000", "--repetitions", "100", "--confidence", SURE])
    (folder,) = working.glob("runs/audit-*")
    return folder, code, out.getvalue(), err.getvalue()


def test_an_honest_pipeline_gives_exit_code_0_and_one_line_says_what_is_shown_at_which_confidence(honest):
    folder, code, out, err = honest
    assert code == 0
    report = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    assert report["violated"] is False
    assert report["epsilon"] == pytest.approx(1, abs=1e-3)
    assert [finding["name"] for finding in report["findings"]] == [
        "one run", "noise scale", "batch size", "coordinates", "repeated noise", "sampling", "correlated noise", "users"
    ]  # fmt: skip
    assert report["findings"][0]["canaries"] == 2000
    assert report["findings"][1]["repetitions"] == 100
    assert report["summary"] in out
    assert report["summary"].startswith(
        "no violation found, at 99.99999 % confidence for all attacks together: one run with 2,000"
    )
    assert [fault["caught"] for fault in report["faults"]] == [True] * 5 + [False] * 3
    assert "5 of 8 planted faults are caught" in report["summary"]
    assert f"page runs/{folder.name}/audit.html" in out
    assert "two worlds: noise: 200 steps" in err


def test_the_errors_of_all_audits_add_up_to_no_more_than_stated(honest):
    report = json.loads((honest[0] / "audit.json").read_text(encoding="utf-8"))
    together = sum(1 - finding["confidence"] for finding in report["findings"])
    assert together == pytest.approx(1 - report["confidence"], rel=1e-6)


def test_the_page_says_what_was_shown_and_what_an_audit_cannot_show(honest):
    page = (honest[0] / "audit.html").read_text(encoding="utf-8")
    report = json.loads((honest[0] / "audit.json").read_text(encoding="utf-8"))
    for said in (report["summary"][1:], *report["cannot_show"], *(f"<small>{one['question']}" for one in report["findings"])):
        assert said.replace("'", "&#39;") in page


@pytest.mark.slow
def test_a_refuted_claim_gives_exit_code_1_and_is_named(tmp_path, capsys, monkeypatch):
    from dp_microadam.noise.mechanism import GaussianMechanism

    monkeypatch.setattr(GaussianMechanism, "_noisy", lambda self, totals, noise: [total.clone() for total in totals])
    arguments = ["--canaries", "1000", "--repetitions", "100", "--json", "--quiet", "--out", str(tmp_path)]
    assert main(["audit", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    report = json.loads(shown.out)
    assert report["violated"] is True
    assert report["summary"].startswith("VIOLATION of the privacy claim, at 95 % confidence")
    assert report["epsilon_bound"] > 2 * report["epsilon"]
    assert report["page"] == str(tmp_path / "audit.html")
    assert "claim refuted" in (tmp_path / "audit.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_other_claims_can_be_audited(tmp_path, capsys):
    arguments = ["--canaries", "400", "--repetitions", "100", "--confidence", SURE, "--out", str(tmp_path), "--json", "--quiet"]
    assert main(["audit", "--epsilon", "8", "--steps", "2", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["steps"] == 2
    assert report["epsilon"] == pytest.approx(8, abs=1e-2)
    assert report["epsilon"] > report["findings"][0]["largest"]
    assert "out of its reach" in report["summary"]
    assert "claim out of reach" in (tmp_path / "audit.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--confidence", "1"], "confidence is 1.0"),
        (["--canaries", "10"], "canaries is 10"),
        (["--repetitions", "3"], "repetitions is 3"),
        (["--epsilon", "-1"], "epsilon is -1.0"),
        (["--delta", "0"], "delta is 0.0"),
        (["--out", __file__], "which is a file"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(capsys, arguments, named):
    assert main(["audit", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.slow
def test_the_full_profile_finds_no_violation(tmp_path, capsys):
    """False alarm below 1e-7. The bound on the noise is close to what the mechanism really is."""
    assert main(["audit", "--profile", "full", "--confidence", SURE, "--json", "--quiet", "--out", str(tmp_path)]) == 0
    noise = json.loads(capsys.readouterr().out)["findings"][1]
    assert noise["bound"] > noise["claim"] / 2
