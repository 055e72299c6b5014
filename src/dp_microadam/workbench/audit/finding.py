"""The result of one audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """Result of an audit: a lower bound on ε, the claimed ε, and the attack's scores.

    ``bound`` exceeds the true ε at ``delta`` with probability at most 1 − ``confidence``. ``largest`` is the bound of a perfect
    attack of this size: a claim above it cannot be refuted. Larger scores mean that the example seems to be present.
    """

    name: str
    question: str
    claim: float
    delta: float
    bound: float
    confidence: float
    largest: float
    size: int
    unit: str
    scores_without: Scores
    scores_with: Scores
    thresholds: tuple[float, ...]

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        return self.bound > self.claim

    @property
    def in_reach(self) -> bool:
        """Whether a perfect attack would refute the claim; if not, passing says nothing."""
        return self.claim < self.largest

    @property
    def verdict(self) -> str:
        """The result in two or three words."""
        return "claim refuted" if self.violated else "within the claim" if self.in_reach else "claim out of reach"

    def to_dict(self) -> dict[str, Any]:
        """All but the scores, for JSON."""
        return {
            "name": self.name,
            "question": self.question,
            "claim": self.claim,
            "delta": self.delta,
            "bound": self.bound,
            "confidence": self.confidence,
            "largest": self.largest,
            self.unit: self.size,
            "violated": self.violated,
        }
