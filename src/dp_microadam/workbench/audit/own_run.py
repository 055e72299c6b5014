"""Audit of one's own run: a lower bound on ε of the very model that was trained, from canaries in its training data.

The attack is black-box. It has the final weights and the canaries, and guesses that those took part whose label the model finds
most probable. How often it is right bounds ε by Steinke et al.'s analysis (``statistics.py``), and μ by that of f-differential
privacy (``f_dp.py``), which also tests the whole trade-off curve that the run claims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dp_microadam.accounting.costs import PrivacyCost, epsilon
from dp_microadam.accounting.meaning import meaning
from dp_microadam.accounting.trade_off import trade_off
from dp_microadam.workbench.audit.f_dp import curve_of, one_run_mu, refutes
from dp_microadam.workbench.audit.finding import Finding
from dp_microadam.workbench.audit.one_run import GUESSED_PARTS, correct_guesses, judge
from dp_microadam.workbench.recipes.canaries import Canaries

CANNOT_SHOW = (
    "that the run is private: a number below the claim only says that this attack found no more",
    "what a better attack would find: this one sees the final weights alone, not the steps between",
    "how well real examples are hidden: canaries are noise, and may be remembered more or less easily than they are",
    "a claim beyond what so many canaries can show, even if every guess were right",
)


@dataclass(frozen=True)
class OwnAudit:
    """The result: a finding by Steinke et al., a lower bound on μ, and whether the run's whole curve is refuted.

    All three hold together at ``confidence``.
    """

    finding: Finding
    mu_bound: float
    mu_claimed: float | None
    curve_refuted: bool
    confidence: float

    @property
    def violated(self) -> bool:
        """Whether what the run claims is refuted, by either analysis."""
        return self.finding.violated or self.curve_refuted

    def to_dict(self) -> dict[str, Any]:
        return {
            "violated": self.violated,
            "summary": self.summary(),
            "confidence": self.confidence,
            "epsilon": self.finding.claim,
            "epsilon_bound": self.finding.bound,
            "delta": self.finding.delta,
            "mu": self.mu_claimed,
            "mu_bound": self.mu_bound,
            "curve_refuted": self.curve_refuted,
            "canaries": self.finding.size,
            "findings": [self.finding.to_dict()],
            "checks": [],
            "cannot_show": list(CANNOT_SHOW),
        }

    def summary(self) -> str:
        """The result in one line."""
        found, sure = self.finding, f"at {100 * self.confidence:.10g} % confidence"
        shown = (
            f"{found.size:,} canaries show ε ≥ {found.bound:.2f} of the claimed {found.claim:.2f} at δ = {found.delta:g}, and "
            f"μ ≥ {self.mu_bound:.2f}" + (f" of {self.mu_claimed:.2f}" if self.mu_claimed is not None else "")
        )
        if self.violated:
            return f"VIOLATION of the privacy claim, {sure}: {shown}"
        reach = "" if found.in_reach else f"; even perfect guesses would show {found.largest:.2f} at most, less than the claim"
        return f"no violation found, {sure}: {shown}{reach}"


def canary_scores(model: nn.Module, canaries: Canaries, prepare: Callable[[Any], Any], batch_size: int = 512) -> Tensor:
    """For each canary how much more probable the model finds its label than all others together, as a logarithm."""
    device = next(model.parameters()).device
    modes = {module: module.training for module in model.modules()}
    model.eval()
    scores = []
    try:
        with torch.no_grad():
            for rows in torch.arange(len(canaries)).split(batch_size):
                labels = canaries.labels[rows].to(device)
                inputs, labels = prepare((canaries.inputs[rows].to(device), labels))
                logits = model(inputs).double()
                own = logits.gather(1, labels[:, None]).squeeze(1)
                others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
                scores.append((own - others).cpu())
    finally:
        for module, mode in modes.items():
            module.training = mode
    return torch.cat(scores)


def audit_own_run(
    present: Tensor,
    scores: Tensor,
    spent: Sequence[PrivacyCost],
    delta: float,
    *,
    confidence: float = 0.95,
    guessed_parts: Sequence[float] = GUESSED_PARTS,
) -> OwnAudit:
    """Bound ε and μ of the run that took the steps in ``spent``: how well do ``scores`` tell which canaries were ``present``?

    Formal guarantees: if the run has the privacy that its steps claim, and ``present`` was drawn by fair coins that ``scores``
    depend on through the run's outputs alone, ``violated`` is true with probability at most 1 − ``confidence``. The bounds on ε
    and μ hold together with that confidence.
    """
    claim = epsilon(spent, delta, "pld")
    here, found = present.numpy().astype(bool), scores.numpy().astype(np.float64)
    share = (1 - confidence) / 3  # for ε, for μ and for the curve
    finding = judge(here, found, claim, delta, confidence=1 - share, guessed_parts=guessed_parts)
    each = share / len(guessed_parts)
    order = np.argsort(found, kind="stable")
    guesses = [_guesses(here, order, part) for part in guessed_parts]
    told = meaning(spent, delta)
    curve = None if "not_computed" in told else curve_of(trade_off(spent))
    return OwnAudit(
        finding,
        max(one_run_mu(len(here), count, correct, 1 - each) for count, correct in guesses),
        told.get("mu"),
        curve is not None and any(refutes(curve, len(here), count, correct, each) for count, correct in guesses),
        confidence,
    )


def _guesses(present: NDArray[np.bool_], order: NDArray[np.intp], part: float) -> tuple[int, int]:
    """How many guesses are made, half of them "in", and how many are right."""
    half = max(1, round(len(present) * part / 2))
    return 2 * half, correct_guesses(present, order, half)
