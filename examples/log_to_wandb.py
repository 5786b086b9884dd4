"""The records of a monitor in a run of Weights & Biases, here in offline mode."""

import os
import tempfile

import torch
import wandb
from torch import nn

import gramscope as gs
from gramscope.integrations.loggers import WandbLog

os.environ["WANDB_SILENT"] = "true"
torch.manual_seed(0)
x = torch.randn(500, 8)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tempfile.TemporaryDirectory() as folder:
    with wandb.init(mode="offline", project="gramscope-example", dir=folder) as run:
        monitor = gs.Monitor(model, (x, y), nn.CrossEntropyLoss(), every=10, log=WandbLog(run))
        for _ in range(30):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            monitor.step()
            run.log({"loss": loss.item()})  # the program's own numbers
        summary = dict(run.summary)
    wandb.teardown()
for name, value in sorted(summary.items()):
    if name.startswith("gramscope/"):
        print(f"{name}: {value:.4g}")
