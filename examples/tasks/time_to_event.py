"""Survival times: an LSTM reads a patient's made-up measurements, a series of any length, and predicts the risk of an event.

Series are padded to one length, and the output at a patient's own last measurement is read. The likelihood of a patient needs
nobody else: an exponential hazard, with patients who left early counted until then. Cox's partial likelihood compares patients
with each other; it is refused.
"""

import torch
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods

LENGTH, PATIENTS = 12, 2_400
torch.manual_seed(0)


def patients(count):
    lengths = torch.randint(4, LENGTH + 1, (count,))
    slope = torch.randn(count)
    series = slope.view(-1, 1, 1) * torch.linspace(0, 1, LENGTH).view(1, -1, 1) + 0.3 * torch.randn(count, LENGTH, 1)
    series[torch.arange(LENGTH) >= lengths.unsqueeze(1)] = 0
    event = torch.distributions.Exponential((1.5 * slope).exp()).sample()
    left = 2 * torch.rand(count)
    return series, lengths, torch.minimum(event, left), (event <= left).float()


class Risk(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, series, lengths):
        read, _ = self.lstm(series)
        last = read.gather(1, (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, 16)).squeeze(1)
        return self.head(last).squeeze(1)


def loss(model, batch):
    series, lengths, time, happened = batch
    log_hazard = model(series, lengths)
    return log_hazard.exp() * time - happened * log_hazard


model, train, (series, lengths, time, happened) = Risk(), patients(PATIENTS), patients(800)
plan = PrivacyPlan.solve(dataset_size=PATIENTS, batch_size=200, delta=1e-4, epsilon=8.0, steps=200)
method, plan = methods.default(model, plan)
result = PrivateTrainer(model, method, plan, loss, record=RecordSettings(show_progress=False)).fit(train)
with torch.no_grad():
    risk = model(series, lengths)
comparable = (time.unsqueeze(1) < time) & (happened.unsqueeze(1) > 0)  # the first had the event before the second's last word
concordance = (risk.unsqueeze(1) > risk)[comparable].float().mean()
print(f"of two patients the one with the earlier event has the higher risk in {100 * concordance:.1f} % of cases")
print(f"ε = {result.epsilon:.2f}")
