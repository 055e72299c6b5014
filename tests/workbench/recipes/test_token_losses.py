"""Losses of language models, per document."""

from itertools import pairwise

import torch
from torch import nn

from dp_microadam.workbench.recipes.texts import document_nats, document_tokens, next_token_hits, next_token_loss


class Bigrams(nn.Module):
    """Scores of the next token depend on the token alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens):
        return self.table[tokens.clamp(min=0).long()]


DOCUMENTS = [[1, 4, 2, 2], [3, 0], [5], [6, 5, 4, 3, 2, 1]]


def padded(length):
    rows = [row + [-1] * (length - len(row)) for row in DOCUMENTS]
    return torch.tensor(rows, dtype=torch.int32), torch.zeros(len(rows), dtype=torch.int64)


def test_a_documents_loss_is_the_mean_over_its_own_tokens_whatever_the_padding():
    model = Bigrams()
    table = model.table.detach().log_softmax(1)
    for length in (6, 11):
        batch = padded(length)
        nats = [-sum(float(table[a, b]) for a, b in pairwise(row)) for row in DOCUMENTS]
        counts = [len(row) - 1 for row in DOCUMENTS]
        means = [total / max(1, count) for total, count in zip(nats, counts, strict=True)]
        torch.testing.assert_close(next_token_loss(model, batch).detach(), torch.tensor(means))
        torch.testing.assert_close(document_nats(model, batch).detach(), torch.tensor(nats))
        assert document_tokens(model, batch).tolist() == counts
        hits = [sum(int(table[a].argmax()) == b for a, b in pairwise(row)) for row in DOCUMENTS]
        shares = [hit / max(1, count) for hit, count in zip(hits, counts, strict=True)]
        torch.testing.assert_close(next_token_hits(model, batch), torch.tensor(shares))


def test_padding_and_other_documents_get_no_gradient():
    model = Bigrams()
    next_token_loss(model, padded(9))[1].backward()  # the document 3, 0
    touched = model.table.grad.abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [3]
