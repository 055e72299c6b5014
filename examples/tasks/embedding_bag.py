"""A bag of embeddings: texts of different lengths as the mean of their words' vectors, by nn.EmbeddingBag. Made-up reviews.

Words are hashed: which words occur in the texts is private, a vocabulary gathered from them would tell.
"""

import random
import zlib

import torch
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

GOOD = ["wonderful", "moving", "superb", "clever", "warm"]
BAD = ["tedious", "clumsy", "bland", "noisy", "cold"]
FILLER = [f"word{number}" for number in range(300)]
BUCKETS, LENGTH = 1_024, 20
draw = random.Random(0)
torch.manual_seed(0)


def reviews(count):
    """Word numbers, padded with zeros, and whether the review is good: three words in its favour, one against."""
    tokens, labels = torch.zeros(count, LENGTH, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for row in range(count):
        labels[row] = good = draw.random() < 0.5
        own, other = (GOOD, BAD) if good else (BAD, GOOD)
        words = draw.choices(own, k=3) + draw.choices(other, k=1) + draw.choices(FILLER, k=draw.randint(4, LENGTH - 4))
        tokens[row, : len(words)] = torch.tensor([1 + zlib.crc32(word.encode()) % (BUCKETS - 1) for word in words])
    return tokens, labels


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(BUCKETS, 16, mode="mean", padding_idx=0)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        return self.head(self.words(tokens))


def loss(model, batch):
    tokens, labels = batch
    return nn.functional.cross_entropy(model(tokens), labels, reduction="none")


model, train, (tokens, labels) = Bag(), reviews(6_000), reviews(1_000)
plan = PrivacyPlan.solve(dataset_size=6_000, batch_size=256, delta=1e-5, epsilon=8.0, steps=300)
method, plan = methods.default(model, plan)
result = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False)).fit(train)
with torch.no_grad():
    right = (model(tokens).argmax(1) == labels).float().mean()
print(f"test accuracy {100 * right:.1f} %, ε = {result.epsilon:.2f}")
