"""A graph per example: which of two rings a made-up molecule has. A graph network on padded adjacency matrices.

The unit is a whole graph. Examples that are nodes of one graph see their neighbours' data and cannot be clipped one by one.
"""

import torch
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

NODES, KINDS, GRAPHS = 12, 4, 3_000
torch.manual_seed(0)


def graphs(count):
    """Adjacency, kinds of nodes and label: graphs of label 1 have a triangle, the others a ring of five."""
    adjacency, labels = torch.zeros(count, NODES, NODES), torch.randint(2, (count,))
    sizes = torch.randint(7, NODES + 1, (count,))
    for row in range(count):
        ring = 3 if labels[row] else 5
        edges = [(node, (node + 1) % ring) for node in range(ring)]
        edges += [(int(torch.randint(node, (1,))), node) for node in range(ring, int(sizes[row]))]
        for one, other in edges:
            adjacency[row, one, other] = adjacency[row, other, one] = 1
    kinds = nn.functional.one_hot(torch.randint(KINDS, (count, NODES)), KINDS).float()
    kinds[torch.arange(NODES) >= sizes.unsqueeze(1)] = 0
    return adjacency, kinds, labels


class GraphNetwork(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.enter, self.first, self.second = nn.Linear(KINDS, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width + 1, 2)

    def forward(self, adjacency, kinds):
        exists = (kinds.sum(2, keepdim=True) > 0).float()
        x = torch.tanh(self.enter(kinds)) * exists
        x = torch.tanh(x + self.first(adjacency @ x)) * exists
        x = torch.tanh(x + self.second(adjacency @ x)) * exists
        triangles = torch.einsum("bij,bjk,bki->b", adjacency, adjacency, adjacency).unsqueeze(1) / 6
        return self.head(torch.cat([x.sum(1) / exists.sum(1), triangles], 1))


def loss(model, batch):
    adjacency, kinds, labels = batch
    return nn.functional.cross_entropy(model(adjacency, kinds), labels, reduction="none")


model, train, (*inputs, labels) = GraphNetwork(), graphs(GRAPHS), graphs(600)
plan = PrivacyPlan.solve(dataset_size=GRAPHS, batch_size=256, delta=1e-4, epsilon=8.0, steps=200)
method, plan = methods.default(model, plan)
result = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False)).fit(train)
with torch.no_grad():
    right = (model(*inputs).argmax(1) == labels).float().mean()
print(f"test accuracy {100 * right:.1f} %, ε = {result.epsilon:.2f}")
