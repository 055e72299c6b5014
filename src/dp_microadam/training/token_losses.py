"""Loss and accuracy of causal language models, per document: the unit of privacy is a document, not a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Tokens [B, length], negative where there is none, and labels, which are not used."""


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of each document's own tokens given those before them; 0 for a document of a single token.

    Formal guarantees: the loss of a document depends on its own tokens alone. Its length does not weigh it: a long document is
    clipped as a short one is.
    """
    losses, counted = _token_losses(model, batch[0])
    return losses.sum(1) / counted.sum(1).clamp(min=1)


def next_token_hits(model: nn.Module, batch: Batch) -> Tensor:
    """The fraction of each document's tokens that are the most likely one, given those before them."""
    scores, targets, counted = _shifted(model, batch[0])
    hits = (scores.argmax(-1) == targets) & counted
    return hits.sum(1) / counted.sum(1).clamp(min=1)


def document_hits(model: nn.Module, batch: Batch) -> Tensor:
    """The number of each document's tokens that are the most likely one."""
    scores, targets, counted = _shifted(model, batch[0])
    return ((scores.argmax(-1) == targets) & counted).sum(1)


def document_nats(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of each document's cross-entropies; with :func:`document_tokens` it gives the perplexity."""
    return _token_losses(model, batch[0])[0].sum(1)


def document_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """The number of predicted tokens of each document."""
    return (batch[0][:, 1:] >= 0).sum(1)


def _token_losses(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    scores, targets, counted = _shifted(model, tokens)
    losses = nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    return torch.where(counted, losses, 0.0), counted


def _shifted(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all tokens but the last, the tokens after them, and which of these exist."""
    targets = tokens[:, 1:]
    return model(tokens)[:, :-1], targets.clamp(min=0).long(), targets >= 0
