"""A two-tower recommender in which every user is protected with all their ratings. Made-up tastes: 1,000 users, 200 films.

A user's own tower is a vector that cannot be private and useful at once, so users are described by what they told of themselves
(eight numbers), and films by a vector each. The loss of a rating is that of one user and one film; losses that take the batch's
other films for negatives mix users, and are refused. Negative films are drawn at random instead.
"""

import torch
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

USERS, FILMS, TASTE = 1_000, 200, 8
torch.manual_seed(0)
people, films = torch.randn(USERS + 200, TASTE), torch.randn(FILMS, TASTE)
likes = (people @ films.T + torch.randn(USERS + 200, FILMS)).topk(20, dim=1).indices  # the films each person chose


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.person = nn.Sequential(nn.Linear(TASTE, 32), nn.Tanh(), nn.Linear(32, TASTE))
        self.film = nn.Embedding(FILMS, TASTE)

    def forward(self, people, films):
        return (self.person(people) * self.film(films)).sum(-1)


def loss(model, batch):
    people, films = batch
    others = torch.randint(FILMS, films.shape)
    return nn.functional.softplus(model(people, others) - model(people, films))  # the chosen film before a random one


model = Towers()
who = torch.arange(USERS).repeat_interleave(20)
plan = PrivacyPlan.solve(dataset_size=USERS, batch_size=200, delta=1e-4, epsilon=8.0, steps=300, examples_per_user=20)
method, plan = methods.default(model, plan)
trainer = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False))
result = trainer.fit((people[who], likes[:USERS].flatten()), users=who)

with torch.no_grad():
    new = people[USERS:].unsqueeze(1).expand(-1, FILMS, -1)
    proposed = model(new, torch.arange(FILMS)).topk(10, dim=1).indices
hits = (proposed.unsqueeze(2) == likes[USERS:].unsqueeze(1)).any(2).float().mean()
print(f"ε = {result.epsilon:.2f} for each person with all their ratings")
print(f"of ten films proposed to new people (at random 10.0 %), among the twenty they chose are {100 * hits:.1f} %")
