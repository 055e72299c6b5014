"""Audit of one's own run: a lower bound on ε of the very model that was trained, from canaries in its training data.

The attack is black-box. It has the final weights and the canaries, and guesses that those took part whose label the model finds
most probable. How often it is right bounds ε by Steinke et al.'s analysis, and μ by that of f-differential privacy, which also
tests the whole trade-off curve that the run claims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dp_microadam.accounting.costs import PrivacyCost, epsilon
from dp_microadam.accounting.meaning import meaning
from dp_microadam.accounting.trade_off import trade_off
from dp_microadam.workbench.audit.one_run import guesses_of, judge
from dp_microadam.workbench.audit.statistics import Audit, curve_of, one_run_mu, refutes
from dp_microadam.workbench.recipes.canaries import Canaries

CANNOT_SHOW = (
    "that the run is private: a number below the claim only says that this attack found no more",
    "what a better attack would find: this one sees the final weights alone, not the steps between",
    "how well real examples are hidden: canaries are noise, and may be remembered more or less easily than they are",
    "a claim beyond what so many canaries can show, even if every guess were right",
)


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
    present: Tensor, scores: Tensor, spent: Sequence[PrivacyCost], delta: float, *, confidence: float = 0.95
) -> Audit:
    """Bound ε and μ of the run that took the steps in ``spent``: how well do ``scores`` tell which canaries were ``present``?

    Formal guarantees: if the run has the privacy that its steps claim, and ``present`` was drawn by fair coins that ``scores``
    depend on through the run's outputs alone, ``violated`` is true with probability at most 1 − ``confidence``. The bounds on ε
    and μ hold together with that confidence.
    """
    here, scored = present.numpy().astype(bool), scores.numpy().astype(np.float64)
    share = (1 - confidence) / 3  # for ε, for μ and for the curve
    found = judge(here, scored, epsilon(spent, delta, "pld"), delta, confidence=1 - share)
    guesses = guesses_of(here, scored)
    each = share / len(guesses)
    told = meaning(spent, delta)
    mu, mu_bound = told.get("mu"), max(one_run_mu(len(here), count, correct, 1 - each) for count, correct in guesses)
    curve = None if "not_computed" in told else curve_of(trade_off(spent))
    curve_refuted = curve is not None and any(refutes(curve, len(here), count, correct, each) for count, correct in guesses)
    violated = found.violated or curve_refuted
    summary = (
        f"{'VIOLATION of the privacy claim' if violated else 'no violation found'}, at {100 * confidence:.10g} % confidence: "
        f"{found.size:,} canaries show ε ≥ {found.bound:.2f} of the claimed {found.claim:.2f} at δ = {delta:g}, and "
        f"μ ≥ {mu_bound:.2f}" + ("" if mu is None else f" of {mu:.2f}")
    )
    if found.claim >= found.largest:
        summary += f"; even perfect guesses would show {found.largest:.2f} at most, less than the claim"
    more = {"mu": mu, "mu_bound": mu_bound, "curve_refuted": curve_refuted, "canaries": found.size}
    return Audit((found,), confidence, violated, summary, CANNOT_SHOW, more)
