"""A label for each token, and where an answer begins: made-up sentences in which names are to be found.

The loss of a sentence is the mean over its own tokens, which padding does not count among, plus the loss of the answer's place.
A mean over the tokens of the whole batch would let sentences weigh each other; it is refused.
"""

import torch
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

WORDS, LENGTH, PAD = 50, 12, 0
TITLE, NAMES = 1, range(2, 8)  # a word after a title is a name whatever it is; words 2 to 7 are names everywhere
torch.manual_seed(0)


def sentences(count):
    tokens = torch.randint(8, WORDS, (count, LENGTH))
    place = torch.randint(0, 5, (count,))
    rows = torch.arange(count)
    tokens[rows, place] = TITLE
    another = torch.randint(6, 9, (count,))
    tokens[rows, another] = torch.randint(NAMES.start, NAMES.stop, (count,))
    lengths = torch.randint(9, LENGTH + 1, (count,))
    tokens[torch.arange(LENGTH) >= lengths.unsqueeze(1)] = PAD
    names = torch.zeros(count, LENGTH, dtype=torch.long)
    names[rows, place + 1] = names[rows, another] = 1
    return tokens, names, place + 1


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, 32), nn.Conv1d(32, 32, kernel_size=3, padding=1)
        self.head = nn.Linear(32, 3)  # name or not; does the answer begin here?

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.words(tokens).transpose(1, 2))).transpose(1, 2))


def loss(model, batch):
    tokens, names, place = batch
    scores, real = model(tokens), (tokens != PAD).float()
    per_token = nn.functional.cross_entropy(scores[..., :2].transpose(1, 2), names, reduction="none")
    begins = nn.functional.cross_entropy(scores[..., 2].masked_fill(real == 0, -1e4), place, reduction="none")
    return (per_token * real).sum(1) / real.sum(1) + begins


model, train, (tokens, names, place) = Tagger(), sentences(4_000), sentences(1_000)
plan = PrivacyPlan.solve(dataset_size=4_000, batch_size=256, delta=1e-5, epsilon=8.0, steps=200)
method, plan = methods.default(model, plan)
result = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False)).fit(train)
with torch.no_grad():
    scores = model(tokens)
tagged = scores[..., :2].argmax(-1)
found, false = tagged[names == 1].float().mean(), tagged[(names == 0) & (tokens != PAD)].float().mean()
print(f"names found {100 * found:.1f} %, other words taken for names {100 * false:.1f} %")
print(f"answers found {100 * (scores[..., 2].argmax(1) == place).float().mean():.1f} %, ε = {result.epsilon:.2f}")
