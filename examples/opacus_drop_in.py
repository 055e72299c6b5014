"""MicroAdam inside Opacus: the optimizer is the only line that changes. Needs opacus and scikit-learn."""

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn

from dp_microadam import MicroAdam

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = (images / 16).float()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images[train], labels[train]), batch_size=256)

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = MicroAdam(model.parameters(), lr=1e-3)
model, optimizer, data = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=data, target_epsilon=8.0, target_delta=1e-5, epochs=400, max_grad_norm=1.0
)
for _ in range(400):
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
print(f"test accuracy {(model(images[test]).argmax(1) == labels[test]).float().mean():.1%} at ε = 8")
