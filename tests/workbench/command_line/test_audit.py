"""``dp-microadam audit`` as a user runs it."""

import contextlib
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from io import StringIO

import pytest

from dp_microadam.workbench.audit import clipping_checks, suite
from dp_microadam.workbench.audit.mechanism_checks import CheckSizes
from dp_microadam.workbench.command_line.cli import main

# Findings hold at a confidence at which an honest pipeline is accused with a probability of 1e-7.
SURE = "0.9999999"


def small_checks(monkeypatch, sizes):
    """The quick profile with checks of these sizes; ``make test-all`` runs it at its own."""
    monkeypatch.setitem(suite.PROFILES, "quick", suite.Profile(1000, 100, sizes))


def few_checks(monkeypatch):
    """Checks that take seconds: a fault is planted, and it is a large one."""
    small_checks(monkeypatch, CheckSizes(sampler_steps=5, sampled_steps=5, noise_steps=2, draws=100))
    monkeypatch.setattr(clipping_checks, "FAMILIES", clipping_checks.FAMILIES[:3])


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The folder, exit code and output of one audit, run in an empty folder."""
    working = tmp_path_factory.mktemp("audit")
    with (
        contextlib.chdir(working),
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        small_checks(monkeypatch, CheckSizes(sampler_steps=20, sampled_steps=40, noise_steps=12, draws=3_000))
        code = main(["audit", "--canaries", "2000", "--repetitions", "100", "--confidence", SURE])
    (folder,) = working.glob("runs/audit-*")
    return folder, code, out.getvalue(), err.getvalue()


def test_an_honest_pipeline_gives_exit_code_0_and_a_page(honest):
    folder, code, *_ = honest
    assert code == 0
    report = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    assert report["violated"] is False
    assert report["epsilon"] == pytest.approx(1, abs=1e-3)
    assert [finding["name"] for finding in report["findings"]] == [
        "one run", "noise scale", "batch size", "coordinates", "repeated noise", "sampling", "correlated noise", "users"
    ]  # fmt: skip
    assert report["findings"][0]["canaries"] == 2000
    assert report["findings"][1]["repetitions"] == 100
    assert {check["part"] for check in report["checks"]} == {"sampling", "clipping", "noise", "accounting"}
    assert len(report["checks"]) == 83
    assert 0 < report["false_alarm_of_checks"] == sum(check["false_alarm"] for check in report["checks"]) < 1e-6


def test_the_errors_of_all_audits_add_up_to_no_more_than_stated(honest):
    folder = honest[0]
    report = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    together = sum(1 - finding["confidence"] for finding in report["findings"])
    assert together == pytest.approx(1 - report["confidence"], rel=1e-6)


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open, self.text, self.links = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_alone_and_says_what_an_audit_can_and_cannot_show(honest):
    page = Page()
    source = (honest[0] / "audit.html").read_text(encoding="utf-8")
    page.feed(source)
    page.close()
    text = re.sub(r"\s+", " ", " ".join(page.text))
    assert page.open == []
    assert page.links == []
    assert "http" not in source
    assert page.tags.count("svg") == 16  # claim and bound on a scale, and two score distributions, for each audit
    for said in (
        "Claim",
        "Shown",
        "Confidence",
        "Canaries 2,000",
        "Repetitions 100",
        "Repetitions 50",
        "cannot be audited by one run",
        "not a proof",
    ):
        assert said in text
    assert "No violation found, at 99.99999 % confidence for all attacks together" in text


def test_a_reader_of_the_page_sees_for_each_check_what_was_tested_its_statistic_threshold_and_verdict(honest):
    folder = honest[0]
    page = Page()
    page.feed((folder / "audit.html").read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for check in json.loads((folder / "audit.json").read_text(encoding="utf-8"))["checks"]:
        for said in (check["name"], check["question"], check["size"], check["statistic"]):
            assert said in text
        assert check["low"] is None or check["high"] is None or check["low"] <= check["value"] <= check["high"]
    assert text.count("holds") == 83
    assert "at most 2e-05" in text
    assert page.tags.count("table") == 4


def test_one_line_says_what_is_shown_and_at_which_confidence(honest):
    folder, _, out, err = honest
    (line,) = [line for line in out.splitlines() if line.startswith("no violation found")]
    assert "2,000 canaries" in line
    assert "83 checks of sampling, clipping, noise and accounting hold" in line
    assert "99.99999 %" in line
    assert f"page runs/{folder.name}/audit.html" in out
    assert "two worlds: noise: 200 steps" in err
    assert "checks: clipping: 24 steps" in err


@pytest.mark.slow
def test_a_violation_gives_exit_code_1_and_is_named(tmp_path, capsys, monkeypatch):
    from dp_microadam.noise.mechanism import GaussianMechanism

    monkeypatch.setattr(GaussianMechanism, "_noisy", lambda self, totals, noise: [total.clone() for total in totals])
    arguments = ["--only", "attacks", "--canaries", "1000", "--repetitions", "100", "--json", "--quiet", "--out", str(tmp_path)]
    assert main(["audit", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    report = json.loads(shown.out)
    assert report["violated"] is True
    assert report["summary"].startswith("VIOLATION of the privacy claim, at 95 % confidence")
    assert report["epsilon_bound"] > 2 * report["epsilon"]
    assert report["page"] == str(tmp_path / "audit.html")
    assert "claim refuted" in (tmp_path / "audit.html").read_text(encoding="utf-8")


def test_a_failed_check_gives_exit_code_1_and_is_named(tmp_path, capsys, monkeypatch):
    from dp_microadam.sampling.poisson import PoissonSampler

    few_checks(monkeypatch)
    monkeypatch.setattr(PoissonSampler, "sample_rate", property(lambda self: 1.3 * self.batch_size / self.dataset_size))
    assert main(["audit", "--only", "checks", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    (line,) = [
        line for line in shown.splitlines() if line.startswith("VIOLATION of the privacy claim, by checks (false alarms")
    ]
    assert "sampler: sample rate: draws over their expectation is 1." in line
    assert re.search(r"│ sampling   │ \d+ checks", shown)
    report = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert report["violated"] is True
    assert report["findings"] == []
    (check,) = [check for check in report["checks"] if check["name"] == "sampler: sample rate"]
    assert check["violated"] is True
    assert check["low"] < 1 < check["high"] < check["value"]
    page = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "claim refuted" in page
    assert 'class="verdict bad"' in page


def test_a_pipeline_that_refuses_to_run_is_a_violation_that_is_reported_and_not_an_error(tmp_path, capsys, monkeypatch):
    from dp_microadam.clipping.engine import ClippedGradients

    few_checks(monkeypatch)
    ones = staticmethod(lambda norms, bound, usable: usable.to(norms.dtype))
    monkeypatch.setattr(ClippedGradients, "_coefficients", ones)
    assert main(["audit", "--json", "--quiet", "--out", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []
    assert "the pipeline refused to run (an example adds" in report["summary"]
    assert any("linear with bias" in check["name"] for check in report["checks"] if check["violated"])


@pytest.mark.slow
def test_other_claims_can_be_audited(tmp_path, capsys):
    arguments = ["--canaries", "400", "--repetitions", "100", "--confidence", SURE, "--out", str(tmp_path), "--json", "--quiet"]
    assert main(["audit", "--only", "attacks", "--epsilon", "8", "--steps", "2", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["steps"] == 2
    assert report["epsilon"] == pytest.approx(8, abs=1e-2)
    assert report["epsilon"] > report["findings"][0]["largest"]
    assert "out of its reach" in report["summary"]
    assert "could not have refuted it" in (tmp_path / "audit.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--confidence", "1"], "confidence is 1.0"),
        (["--canaries", "10"], "canaries is 10"),
        (["--repetitions", "3"], "repetitions is 3"),
        (["--epsilon", "-1"], "epsilon is -1.0"),
        (["--delta", "0"], "delta is 0.0"),
        (["--epsilon", "1", "--noise-multiplier", "4", "--steps", "3"], "exactly two of"),
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
def test_the_quick_profile_finds_no_violation(tmp_path):
    assert main(["audit", "--confidence", SURE, "--quiet", "--out", str(tmp_path)]) == 0


@pytest.mark.slow
def test_the_full_profile_finds_no_violation(tmp_path, capsys):
    """False alarm below 1e-7. The bound on the noise is close to what the mechanism really is."""
    assert main(["audit", "--profile", "full", "--confidence", SURE, "--json", "--quiet", "--out", str(tmp_path)]) == 0
    noise = json.loads(capsys.readouterr().out)["findings"][1]
    assert noise["bound"] > noise["claim"] / 2
