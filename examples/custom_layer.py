"""A clipping rule for a layer of your own: here PReLU, max(x, 0) + a·min(x, 0), whose gradient is Σ δ·min(x, 0).

Every layer is clipped exactly without a rule too, by repeating its forward pass for each example; a rule makes that cheap.
"""

import torch
from torch import nn

from dp_microadam import ClippedGradients, register_rule
from dp_microadam.clipping.per_example import per_example_gradients
from dp_microadam.clipping.rules.rule import LayerRule


class PReLURule(LayerRule):
    """How the gradients of one module are clipped."""

    def gradients(self, inputs, deltas, rows):
        """One row per example: a slope for all channels, or one for each."""
        terms = (deltas * inputs.clamp(max=0)).unflatten(0, (-1, rows))  # of several rows per example, such as views
        slopes = terms.flatten(3).sum((1, 3)) if self.module.num_parameters > 1 else terms.flatten(1).sum(1, keepdim=True)
        return {"weight": slopes}


register_rule(nn.PReLU, PReLURule)

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(4), nn.Flatten(), nn.Linear(4 * 36, 3))
batch = torch.rand(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1])


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


engine = ClippedGradients(model, loss, max_grad_norm=1.0)  # a rule that is wrong is refused before the first step
norms = engine.accumulate(batch)
rows = per_example_gradients(model, loss, batch)  # one by one
slow = torch.stack([torch.cat([part.flatten() for part in row.values()]).norm() for row in rows])
print(f"largest difference from gradients taken one by one: {float((norms - slow).abs().max()):.1e}")
engine.explain()
