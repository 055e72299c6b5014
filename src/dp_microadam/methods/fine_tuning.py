"""Methods that train a part of a model: DP-BiTFiT and SPARTA.

Bu, Wang, Zha and Karypis, "Differentially Private Bias-Term Fine-tuning of Foundation Models" (2024); Makni et al., "SPARTA:
An Optimization Framework for Differentially Private Sparse Fine-Tuning" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.methods.registry import make_optimizer
from dp_microadam.methods.table import BASE_OPTIMIZERS
from dp_microadam.training.method import GRADIENTS, ROW_NORMS, Method, Phase, PlanLike
from dp_microadam.validation import require_in_closed_open, require_in_open_closed, require_one_of, require_positive

FIRST, SCORING, ROWS = "head, biases, norms", "scoring", "selected rows"


def dp_bitfit(
    model: nn.Module, *, lr: float = 1e-3, head: str | None = None, base_optimizer: str = "sgd", **options: Any
) -> Method:
    """DP-BiTFiT: trains only the biases and the head.

    ``base_optimizer`` is ``"sgd"`` (with momentum 0.9), ``"adam"``, ``"adamw"`` or ``"microadam"``; ``options`` are that
    optimizer's. ``head`` is the name of the head's module, by default the one with the model's last parameter. All
    other parameters are frozen while the trainer runs: their gradients are neither computed nor clipped. Biases need no stored
    activations, since the gradient of a bias is the output gradient summed over positions.

    Raises:
        InputError: for a model without trainable biases outside its head.
    """
    own_head = head_of(model, head)
    chosen = own_head | {name for name in _trainable_names(model) if name.endswith("bias")}
    if chosen == own_head:
        raise InputError("model has no trainable bias outside its head; dp-bitfit needs a model with biases")
    return TrainOnly(_optimizer(base_optimizer, model, chosen, lr, options), chosen)


class TrainOnly(Method):
    """A method with one phase, in which only the parameters with these names train."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: frozenset[str]) -> None:
        super().__init__(optimizer)
        self._names = names

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        return (Phase("training", plan.steps, self._names),)


class Sparta(Method):
    """SPARTA: sparse fine-tuning in three phases under one plan.

    The first phase trains head, biases and normalization; the second scores rows of weights, at learning rate 0; the third
    trains the rows with the highest scores.

    Arguments:
        keep: the fraction of each weight's rows that is selected, at least one row of each.
        scores: ``"sum"`` or ``"norms"``, see below.
        first_phase: the fraction of all steps that the first phase takes; 10 of 50 epochs in the paper.
        scoring_epochs: length of the scoring phase; an epoch is ``dataset_size / batch_size`` steps.
        rows_only: train only the selected rows in the third phase; by default head, biases and normalization train too.
        head, base_optimizer, options: as for :func:`dp_bitfit`.

    Raises:
        InputError: for a value out of range, or a model without weights outside its head.

    Formal guarantees: rows are selected from noisy quantities alone, so the selection costs nothing beyond the scoring steps,
    which are sampled, clipped, noised and accounted like all others:

    - ``scores="sum"``: a scoring step publishes g̃ = (Σᵢ clip(gᵢ, C) + noise)/B over the scored weights, of sensitivity C. The
      score of a row is the norm of that row of Σₜ g̃ₜ: post-processing.
    - ``scores="norms"``: a scoring step publishes, for every row r of all scored weights, Σᵢ ‖row r of clip(gᵢ, C)‖ with
      noise. One example changes these numbers by the norms of the rows of its clipped gradient, a vector of norm
      ‖clip(gᵢ, C)‖ ≤ C. So their sensitivity is C too, and the same noise protects them
      (:class:`~dp_microadam.clipping.engine.ClippedRowNorms`). The score is their sum over steps. Gradients of different
      examples that cancel each other count here, but not with ``"sum"``.

    The third phase clips, sums and adds noise over the selected rows alone; which rows those are follows from the published
    scores.
    """

    def __init__(
        self,
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
    ) -> None:
        self._keep = require_in_open_closed("keep", keep, 0.0, 1.0)
        self._query = {"sum": GRADIENTS, "norms": ROW_NORMS}[require_one_of("scores", scores, ("sum", "norms"))]
        self._first_phase = require_in_closed_open("first_phase", first_phase, 0.0, 1.0)
        self._scoring_epochs = require_positive("scoring_epochs", scoring_epochs)
        self._rows_only = rows_only
        own_head = head_of(model, head)
        dimensions = {name: model.get_parameter(name).dim() for name in _trainable_names(model)}
        self.first = own_head | {name for name, count in dimensions.items() if count < 2}
        """Names of the parameters that the first phase trains."""
        self.scored = frozenset(name for name, count in dimensions.items() if count >= 2 and name.endswith("weight")) - own_head
        """Names of the weights whose rows are scored: one per linear output, convolution channel or embedding entry."""
        if not self.scored:
            raise InputError("model has no trainable weight outside its head; sparta needs rows to choose from")
        super().__init__(_optimizer(base_optimizer, model, self.first | self.scored, lr, options))
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
        phases = (
            Phase(FIRST, first, self.first),
            Phase(SCORING, scoring, self.scored, rate=0.0, query=self._query),
            Phase(ROWS, rest, self.scored if self._rows_only else self.scored | self.first),
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


def head_of(model: nn.Module, head: str | None) -> frozenset[str]:
    """Names of the head's trainable parameters: of the module called ``head``, or of the one with the last parameter.

    >>> sorted(head_of(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)), None))
    ['2.bias', '2.weight']
    """
    names = _trainable_names(model)
    if not names:
        raise InputError("model has no trainable parameter; call requires_grad_(True) on those to be trained")
    owner = names[-1].rpartition(".")[0] if head is None else head
    members = frozenset(name for name in names if name.startswith(f"{owner}.") or not owner)
    if not members:
        raise InputError(f"head is {head!r}; it must name a module of the model that has trainable parameters")
    return members


def _trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that require gradients, in the model's order."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _optimizer(name: str, model: nn.Module, chosen: frozenset[str], lr: float, options: Mapping[str, Any]) -> Any:
    """A base optimizer of the chosen parameters; SGD has momentum, as in the papers."""
    require_one_of("base_optimizer", name, BASE_OPTIMIZERS)
    given = {"momentum": 0.9, **options} if name == "sgd" else options
    return make_optimizer(name, [parameter for own, parameter in model.named_parameters() if own in chosen], lr, given)
