"""The HTML report of an audit, as one self-contained file."""

from __future__ import annotations

from typing import Any

import numpy as np

from dp_microadam.ledger.statement import round_up
from dp_microadam.workbench.audit.finding import Finding, Scores
from dp_microadam.workbench.audit.suite import Audit
from dp_microadam.workbench.reporting.formats import confidence_in_words
from dp_microadam.workbench.reporting.page import Section, document, template

_BINS = 48
_WIDTH, _HEIGHT = 560, 150
_LEAD = (
    "The real training pipeline (sampler, clipping, noise and optimizer) was attacked by an adversary who sees every "
    "privatized gradient and knows every example but one, and faults were planted around it."
)


def audit_page(audit: Audit) -> str:
    """A whole HTML document about an audit."""
    parts, words = template("audit.html"), template("parts.html")
    sections = [
        Section("verdict", "Verdict", words.verdict(f"{audit.summary()}.", audit.violated)),
        Section("attacks", "Attacks: claims and what was shown", parts.attacks([_card(one) for one in audit.findings])),
        Section("faults", "Planted faults: what became of them", parts.faults(audit.reactions)),
        Section("limits", "What an audit can and cannot show", parts.limits(audit.findings[0], audit.confidence)),
        Section("setting", "The audited run", parts.setting(audit.plan, round_up(audit.plan.epsilon))),
    ]
    return document("Privacy audit", _LEAD, sections, extra_style=parts.style())


def _card(finding: Finding) -> dict[str, Any]:
    """What the template draws of a finding: bound and claim on a scale that ends where a perfect attack would, and scores."""
    end = max(finding.claim, finding.bound, finding.largest, 0.1)
    low, high = _range(finding.scores_without, finding.scores_with)

    def across(value: float, start: float, stop: float) -> float:
        return round(min(max((value - start) / (stop - start), 0.0), 1.0) * _WIDTH, 1)

    return {
        "finding": finding,
        "confidence": confidence_in_words(finding.confidence),
        **{name: across(getattr(finding, name), 0.0, end) for name in ("bound", "claim", "largest")},
        "width": _WIDTH,
        "height": _HEIGHT,
        "bar": round(_WIDTH / _BINS, 2),
        "bars": _bars(finding, low, high),
        "thresholds": [across(value, low, high) for value in finding.thresholds],
        "low": low,
        "high": high,
    }


def _bars(finding: Finding, low: float, high: float) -> list[tuple[str, list[tuple[float, float]]]]:
    """Place and height of the bars of both score distributions, each with the same area."""
    edges = np.linspace(low, high, _BINS + 1)
    both = {"without": finding.scores_without, "with": finding.scores_with}
    shares = {kind: np.histogram(np.clip(own, low, high), edges)[0] / max(1, len(own)) for kind, own in both.items()}
    top = max(float(max(share.max() for share in shares.values())), 1e-12)
    return [
        (kind, [(round(i * _WIDTH / _BINS, 1), round(float(h) / top * (_HEIGHT - 6), 1)) for i, h in enumerate(share) if h > 0])
        for kind, share in shares.items()
    ]


def _range(without: Scores, present: Scores) -> tuple[float, float]:
    """Range of the histogram: the central 99.8 % of the scores; the others are drawn at the ends."""
    both = np.concatenate([without, present])
    low, high = (float(value) for value in np.quantile(both, (0.001, 0.999)))
    return (low, high) if high > low else (low - 1.0, high + 1.0)
