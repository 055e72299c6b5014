"""MicroAdam inside Opacus: the optimizer is the only line that changes. Needs opacus and scikit-learn."""

import tempfile

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn

from dp_microadam import MicroAdam
from dp_microadam.integrations.opacus import ledger_from_opacus, use_system_entropy

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = (images / 16).float()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images[train], labels[train]), batch_size=256)

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = MicroAdam(model.parameters(), lr=3e-3)
engine = PrivacyEngine(accountant="rdp")
model, optimizer, data = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=data, target_epsilon=8.0, target_delta=1e-4, epochs=100, max_grad_norm=1.0
)
use_system_entropy(engine, optimizer, data)  # torch's own generator follows from 32 bits of a seed
for _ in range(100):
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

# Opacus' books in ours: both accountants, the statement in words, and dp-microadam budget for several runs.
folder = tempfile.mkdtemp()
ledger = ledger_from_opacus(engine, optimizer, data, delta=1e-4, run_dir=folder)
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
rdp, pld = (ledger.epsilon(accountant=accountant) for accountant in ("rdp", "pld"))
print(f"ε = {rdp:.2f} by RDP, {pld:.2f} by PLD; see {folder}/privacy.txt")
print(f"test accuracy {100 * accuracy:.1f} %")
