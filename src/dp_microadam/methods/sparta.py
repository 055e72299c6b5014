"""SPARTA: selects rows of weights by noisy scores, then trains only those.

Makni et al., "SPARTA: An Optimization Framework for Differentially Private Sparse Fine-Tuning" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.methods.parts import head_of, vectors_of, weights_of
from dp_microadam.methods.step_optimizers import make_optimizer
from dp_microadam.training.method import GRADIENTS, ROW_NORMS, Method, Phase, PlanLike
from dp_microadam.validation import require_in_closed_open, require_in_open_closed, require_one_of, require_positive

FIRST, SCORING, ROWS = "head, biases, norms", "scoring", "selected rows"
MOMENTUM = 0.9


def sparta(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    keep: float = 0.2,
    scores: str = "sum",
    first_phase: float = 0.2,
    scoring_epochs: float = 1.0,
    rows_only: bool = False,
    head: str | None = None,
    base_optimizer: str = "sgd",
    **options: Any,
) -> Method:
    """SPARTA: sparse fine-tuning in three phases under one plan.

    The first phase trains head, biases and normalization; the second scores rows of weights, at learning rate 0; the third
    trains the rows with the highest scores.

    Arguments:
        keep: the fraction of each weight's rows that is selected, at least one row of each.
        scores: ``"sum"`` or ``"norms"``, see :class:`Sparta`.
        first_phase: the fraction of all steps that the first phase takes; 10 of 50 epochs in the paper.
        scoring_epochs: length of the scoring phase; an epoch is ``dataset_size / batch_size`` steps.
        rows_only: train only the selected rows in the third phase; by default head, biases and normalization train too.
        head: name of the head's module; by default the one with the model's last parameter.
        base_optimizer: ``"sgd"`` (with momentum 0.9), ``"adam"``, ``"adamw"`` or ``"microadam"``; ``options``
            are that optimizer's.

    Raises:
        InputError: for a value out of range, or a model without weights outside its head.
    """
    given = {"momentum": MOMENTUM, **options} if base_optimizer == "sgd" else options
    choices = ("sgd", "adam", "adamw", "microadam")
    return Sparta(
        model,
        lambda params: make_optimizer(base_optimizer, params, lr, given, choices=choices),
        keep=keep,
        scores=scores,
        first_phase=first_phase,
        scoring_epochs=scoring_epochs,
        rows_only=rows_only,
        head=head,
    )


class Sparta(Method):
    """SPARTA's phases, scores and selection. Arguments as in :func:`sparta`; ``optimizer_of(parameters)`` makes the optimizer.

    Formal guarantees: rows are selected from noisy quantities alone, so the selection costs nothing beyond the scoring steps,
    which are sampled, clipped, noised and accounted like all others:

    - ``scores="sum"``: a scoring step publishes g̃ = (Σᵢ clip(gᵢ, C) + noise)/B over the scored weights, of sensitivity C. The
      score of a row is the norm of that row of Σₜ g̃ₜ: post-processing.
    - ``scores="norms"``: a scoring step publishes, for every row r of all scored weights, Σᵢ ‖row r of clip(gᵢ, C)‖ with
      noise. One example changes these numbers by the norms of the rows of its clipped gradient, a vector of norm
      ‖clip(gᵢ, C)‖ ≤ C. So their sensitivity is C too, and the same noise protects them
      (:class:`~dp_microadam.clipping.row_norms.ClippedRowNorms`). The score is their sum over steps. Gradients of different
      examples that cancel each other count here, but not with ``"sum"``.

    The third phase clips, sums and adds noise over the selected rows alone; which rows those are follows from the published
    scores.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        keep: float = 0.2,
        scores: str = "sum",
        first_phase: float = 0.2,
        scoring_epochs: float = 1.0,
        rows_only: bool = False,
        head: str | None = None,
    ) -> None:
        self._keep = require_in_open_closed("keep", keep, 0.0, 1.0)
        self._query = {"sum": GRADIENTS, "norms": ROW_NORMS}[require_one_of("scores", scores, ("sum", "norms"))]
        self._first_phase = require_in_closed_open("first_phase", first_phase, 0.0, 1.0)
        self._scoring_epochs = require_positive("scoring_epochs", scoring_epochs)
        self._rows_only = rows_only
        own_head = head_of(model, head)
        self.first = own_head | vectors_of(model)
        """Names of the parameters that the first phase trains."""
        self.scored = weights_of(model) - own_head
        """Names of the weights whose rows are scored."""
        if not self.scored:
            raise InputError("model has no trainable weight outside its head; sparta needs rows to choose from")
        chosen = self.first | self.scored
        super().__init__(optimizer_of([parameter for name, parameter in model.named_parameters() if name in chosen]))
        self._totals: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        first = round(self._first_phase * plan.steps)
        scoring = max(1, round(self._scoring_epochs * plan.dataset_size / plan.batch_size))
        rest = plan.steps - first - scoring
        if rest < 1:
            raise InputError(
                f"steps is {plan.steps}; sparta's first phase takes {first} and scoring {scoring}, so it must be larger, or "
                "first_phase or scoring_epochs smaller"
            )
        last = self.scored if self._rows_only else self.scored | self.first
        phases = (
            Phase(FIRST, first, self.first),
            Phase(SCORING, scoring, self.scored, rate=0.0, query=self._query),
            Phase(ROWS, rest, last),
        )
        return phases if first else phases[1:]

    def begin(self, phase: Phase) -> None:
        if phase.name == ROWS:
            self._totals = {name: row_scores(total) for name, total in self._totals.items()}
            self._masks = {name: top_rows(scores, self._keep) for name, scores in self._totals.items()}

    def receive(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.phase.name == SCORING:
            for name, mean in means.items():
                self._totals[name] = self._totals[name] + mean if name in self._totals else mean.clone()
        return means

    def row_masks(self) -> Mapping[str, Tensor]:
        return self._masks if self.phase.name == ROWS else {}

    def extra_state(self) -> dict[str, Any]:
        return {"totals": dict(self._totals)}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._totals = {name: total.clone() for name, total in state["totals"].items()}


def row_scores(total: Tensor) -> Tensor:
    """The norm of each row; a tensor with one number per row is returned as it is."""
    return total if total.dim() == 1 else torch.linalg.vector_norm(total.flatten(1), dim=1)


def top_rows(scores: Tensor, keep: float) -> Tensor:
    """A mask of the ⌈keep·rows⌉ rows with the largest scores; ties go to the first.

    >>> top_rows(torch.tensor([1.0, 3.0, 3.0, 2.0]), 0.25)
    tensor([False,  True, False, False])
    """
    # The subtraction keeps 0.07 · 100 = 7.000000000000001 from becoming 8.
    count = max(1, math.ceil(keep * len(scores) - 1e-9))
    order = torch.argsort(scores, descending=True, stable=True)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[order[:count]] = True
    return mask
