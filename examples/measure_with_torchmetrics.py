"""Target linearity and neural collapse as torchmetrics, updated with the batches of an epoch."""

import torch
from torch import nn
from torchmetrics import MetricCollection

from gramscope.integrations.torchmetrics import NeuralCollapse, Surrogate, TargetLinearity

torch.manual_seed(0)
x = torch.randn(600, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
features, readout = nn.Sequential(nn.Linear(10, 32), nn.ReLU()), nn.Linear(32, 2)
optimizer = torch.optim.Adam([*features.parameters(), *readout.parameters()], lr=0.01)

sizes = {"num_features": 32, "num_classes": 2}
metrics = MetricCollection([TargetLinearity(**sizes), Surrogate(**sizes, normalized=True), NeuralCollapse(**sizes)])
for epoch in range(5):
    for i in range(0, len(x), 60):
        h = features(x[i : i + 60])
        loss = nn.functional.cross_entropy(readout(h), y[i : i + 60])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(h, y[i : i + 60])
    values = metrics.compute()
    print(f"epoch {epoch}: target linearity {values['TargetLinearity']:.3f}, NC1 {values['nc1']:.2f}")
    metrics.reset()
