"""The HTML report of an audit, as one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from dp_microadam.ledger.statement import round_up
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.workbench.audit.check import Check, in_words, range_in_words, together
from dp_microadam.workbench.audit.finding import Finding, Scores
from dp_microadam.workbench.reporting.formats import confidence_in_words
from dp_microadam.workbench.reporting.page import style

_BINS = 48
_WIDTH, _HEIGHT, _AXIS = 560, 150, 22

_STYLE = """
:root { --without: #7a8699; --with: #d9730d }
@media (prefers-color-scheme: dark) { :root { --without: #8b97ab; --with: #f0954a } }
.question { color: var(--faint); margin: 2px 0 10px }
svg { max-width: none }
svg text { font-size: 12px; fill: var(--faint) }
.ruler { margin: 0 0 12px }
.without { fill: var(--without); fill-opacity: .55 }
.with { fill: var(--with); fill-opacity: .55 }
.threshold { stroke: var(--ink); stroke-dasharray: 4 3 }
.axis { stroke: var(--line) }
.legend { font-size: 13px; color: var(--faint); margin: 4px 0 0 }
.legend i { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 0; opacity: .7 }
.legend i + span { margin-right: 14px }
.checks .scroll { max-height: none }
.checks table { width: 100% }
.checks td { min-width: 9ch }
.checks th small { max-width: 44ch }
.good { color: var(--good) }
.bad-row th, .bad-row td { background: var(--tint) }
.bad-row .state { color: var(--bad); font-weight: 600 }
"""


_PARTS = {
    "pipeline": "The pipeline",
    "sampling": "Sampling: who takes part in a step",
    "clipping": "Clipping: how far one example moves the sum",
    "noise": "Noise: what is added",
    "accounting": "Accounting: what is stated",
}


def audit_page(
    findings: Sequence[Finding], plan: PrivacyPlan, confidence: float, summary: str, checks: Sequence[Check] = ()
) -> str:
    """A whole HTML document about ``checks`` and ``findings``, the first of which is the one-run audit of ``plan``."""
    broken = any(finding.violated for finding in findings) or any(check.violated for check in checks)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy audit</title>
<style>
{style()}{_STYLE}</style>
</head>
<body>
<main>
<h1>Privacy audit</h1>
<p>The real training pipeline (sampler, clipping, noise and optimizer) was checked, and attacked by an adversary who sees every
privatized gradient and knows every example but one.</p>
<p class="verdict{" bad" if broken else ""}">{escape(summary[0].upper() + summary[1:])}.</p>
{_attacks(findings)}
{_checks(checks)}
{_limits(findings, confidence, checks)}
{_setting(plan) if findings else ""}
</main>
</body>
</html>
"""


def _attacks(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    cards = "\n".join(_card(finding) for finding in findings)
    return f"""<h2>Attacks: claims and what was shown</h2>
<div class="cards">
{cards}
</div>"""


def _checks(checks: Sequence[Check]) -> str:
    """A table for each part of the mechanism: what was tested, the statistic, the accepted range and the verdict."""
    if not checks:
        return ""
    tables = "\n".join(
        _check_table(title, own) for part, title in _PARTS.items() if (own := [check for check in checks if check.part == part])
    )
    return f"""<h2>Checks: promises and what was measured</h2>
<p>The proof of privacy assumes a Poisson sample, a sum that one example moves by at most the clipping norm, fresh Gaussian
noise of the plan's variance in every coordinate and step, and a count of all steps. Each is measured on the running code. An
honest pipeline fails one of these {len(checks)} checks with a probability below {together(checks):.1g}; those without a
rate have no chance in them.</p>
{tables}"""


def _check_table(title: str, checks: Sequence[Check]) -> str:
    names = ("check", "tested", "statistic", "value", "accepted", "false alarms", "verdict")
    figures = {"value", "accepted", "false alarms"}
    head = "".join(f'<th scope="col"{" class=figure" if name in figures else ""}>{name}</th>' for name in names)
    rows = []
    before = ""
    for check in checks:
        # Families of layers are asked the same question.
        question = "" if check.question == before else f"<small>{escape(check.question)}</small>"
        before = check.question
        detail = f"<small>{escape(check.detail)}</small>" if check.detail else ""
        measured = in_words(check.value) if check.size else "refused"
        accepted = range_in_words(check.low, check.high) if check.size else "–"
        rows.append(
            f"<tr{' class=bad-row' if check.violated else ''}><th scope=row>{escape(check.name)}{question}</th>"
            f"<td>{escape(check.size)}</td><td>{escape(check.statistic)}{detail}</td><td class=figure>{measured}</td>"
            f"<td class=figure>{accepted}</td><td class=figure>{f'{check.false_alarm:.1g}' if check.false_alarm else '–'}</td>"
            f'<td class="state{"" if check.violated else " good"}">{"claim refuted" if check.violated else "holds"}</td></tr>'
        )
    return f"""<div class="table checks">
<h3>{escape(title)}</h3>
<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{"".join(rows)}
</tbody>
</table></div>
</div>"""


def _card(finding: Finding) -> str:
    verdict = "claim refuted" if finding.violated else "within the claim" if finding.in_reach else "claim out of reach"
    doubt = "" if finding.in_reach and not finding.violated else " bad"
    facts = (
        ("Claim", f"ε = {finding.claim:.3g} at δ = {finding.delta:g}"),
        ("Shown", f"ε ≥ {finding.bound:.3g}" if finding.bound else "nothing (ε ≥ 0)"),
        ("Confidence", confidence_in_words(finding.confidence)),
        (finding.unit.capitalize(), f"{finding.size:,}" + (" in each world" if finding.unit == "repetitions" else "")),
        ("A perfect attack would show", f"ε ≥ {finding.largest:.3g}"),
    )
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"""<section class="card">
<header><h3>{escape(finding.name.capitalize())}</h3><span class="badge{doubt}">{verdict}</span></header>
<p class="question">{escape(finding.question.capitalize())}</p>
{_ruler(finding)}
{_histogram(finding)}
<p class="legend"><i style="background:var(--without)"></i><span>without the example</span>
<i style="background:var(--with)"></i><span>with it</span> <span>dashed: threshold</span></p>
<dl>{rows}</dl>
</section>"""


def _ruler(finding: Finding) -> str:
    """Bound and claim on one scale that ends where a perfect attack would."""
    end = max(finding.claim, finding.bound, finding.largest, 0.1)
    values = {"bound": finding.bound, "claim": finding.claim, "largest": finding.largest}
    x = {name: _WIDTH * value / end for name, value in values.items()}
    colour = "var(--bad)" if finding.violated else "var(--good)"
    anchor = "end" if x["claim"] > _WIDTH / 2 else "start"
    shift = -6 if anchor == "end" else 6
    label = f"shown {finding.bound:.2f}, claimed {finding.claim:.2f}"
    return f"""<svg class="ruler" viewBox="0 0 {_WIDTH} 50" role="img" aria-label="{label}">
<rect x="0" y="20" width="{_WIDTH}" height="10" rx="3" fill="var(--line)"/>
<rect x="0" y="20" width="{x["bound"]:.1f}" height="10" rx="3" fill="{colour}"/>
<line x1="{x["claim"]:.1f}" x2="{x["claim"]:.1f}" y1="15" y2="34" stroke="var(--ink)" stroke-width="2"/>
<text x="{x["claim"] + shift:.1f}" y="12" text-anchor="{anchor}">claim {finding.claim:.3g}</text>
<text x="0" y="46">shown {finding.bound:.3g}</text>
<text x="{x["largest"]:.1f}" y="46" text-anchor="end">a perfect attack {finding.largest:.3g}</text>
</svg>"""


def _histogram(finding: Finding) -> str:
    """Both score distributions, each with the same area."""
    low, high = _range(finding.scores_without, finding.scores_with)
    edges = np.linspace(low, high, _BINS + 1)
    shares = [
        np.histogram(np.clip(scores, low, high), edges)[0] / max(1, len(scores))
        for scores in (finding.scores_without, finding.scores_with)
    ]
    top = max(float(max(share.max() for share in shares)), 1e-12)
    bar = _WIDTH / _BINS

    def bars(share: Scores, kind: str) -> str:
        heights = share / top * (_HEIGHT - 6)
        return "".join(
            f'<rect class="{kind}" x="{i * bar:.1f}" y="{_HEIGHT - h:.1f}" width="{bar:.2f}" height="{h:.1f}"/>'
            for i, h in enumerate(heights)
            if h > 0
        )

    def position(value: float) -> float:
        return min(max((value - low) / (high - low), 0.0), 1.0) * _WIDTH

    lines = "".join(
        f'<line class="threshold" x1="{position(value):.1f}" x2="{position(value):.1f}" y1="0" y2="{_HEIGHT}"/>'
        for value in finding.thresholds
    )
    return f"""<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _AXIS}" role="img" aria-label="distributions of the attack's scores">
{bars(shares[0], "without")}{bars(shares[1], "with")}{lines}
<line class="axis" x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}"/>
<text x="0" y="{_HEIGHT + 16}">{low:.3g}</text>
<text x="{_WIDTH / 2}" y="{_HEIGHT + 16}" text-anchor="middle">score of the attack</text>
<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{high:.3g}</text>
</svg>"""


def _range(without: Scores, present: Scores) -> tuple[float, float]:
    """Range of the histogram: the central 99.8 % of the scores; the others are drawn at the ends."""
    both = np.concatenate([without, present])
    low, high = (float(value) for value in np.quantile(both, (0.001, 0.999)))
    return (low, high) if high > low else (low - 1.0, high + 1.0)


def _limits(findings: Sequence[Finding], confidence: float, checks: Sequence[Check]) -> str:
    return f"""<h2>What an audit can and cannot show</h2>
<ul>
{_limits_of_attacks(findings, confidence) if findings else ""}
{_LIMITS_OF_CHECKS if checks else ""}
<li>Audited are the pipeline's code and its randomness, on examples made for it. A model of yours in which examples interact,
data seen before training, metrics shown on purpose and timing are outside; the first is refused by the library, for the rest
see the privacy statement of the run.</li>
</ul>"""


_LIMITS_OF_CHECKS = """<li>A check sees the faults it was made for, if they are large enough for the sizes above: noise of a
standard deviation less than about a thousandth too small, or a rate less than about half a percent too high, stays inside the
accepted ranges of the quick profile, and so does what happens in one of a thousand steps.</li>
<li>Statistics tell neither a good generator from one whose seed somebody knows, nor a true normal number from one that is
rounded finely enough.</li>"""


def _limits_of_attacks(findings: Sequence[Finding], confidence: float) -> str:
    one_run = findings[0]
    beyond = (
        f"<li><strong>The claim audited here, ε = {one_run.claim:.3g}, is above {one_run.largest:.2g}, the most that one "
        f"run with {one_run.size:,} canaries can show: that audit could not have refuted it.</strong></li>"
        if not one_run.in_reach
        else ""
    )
    return f"""<li>An attack shows that ε is <em>at least</em> a number. A number above the claim means that the claim is
wrong, except with a probability of {100 * (1 - confidence):.3g} % for a false alarm in any attack of this page.</li>
<li>A number below the claim is not a proof of privacy. It means that this attack, at this size, did not refute the claim; the
proof is the mathematics of clipping, noise and accounting. A better attack may show more.</li>
<li>One run saturates: at 95 % confidence and with every guess right, 1,000 canaries show at most ε = 5.8 and 10,000 at most
7.8 (δ = 1e-5), so a claim of ε = 8 cannot be audited by one run. With the same code and a claim around 1 faults show long
before that. With these settings the most is {one_run.largest:.2g}.</li>
{beyond}
<li>Two-world audits bound ε at a large δ, where a thousand repetitions are enough. Noise and sampling determine an ε for
every δ, so the claim there is as binding as the one at δ = 1e-5.</li>"""


def _setting(plan: PrivacyPlan) -> str:
    return f"""<h2>The audited run</h2>
<p>{plan.dataset_size:,} canaries, each present with probability ½, with orthogonal gradients; each step
samples {100 * plan.sample_rate:.3g} % of them, clips, adds noise of {plan.noise_multiplier:g} times the clipping norm, and
passes the mean to MicroAdam. {plan.steps} steps, ε = {round_up(plan.epsilon)} at δ = {plan.delta:g} by the PLD accountant. The
score of a canary is the component of the summed privatized gradients in its direction. The highest scores are guessed
present, the lowest absent, and the attack abstains from the rest; the bound accounts for three numbers of guesses.</p>"""
