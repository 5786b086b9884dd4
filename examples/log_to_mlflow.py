"""The records of a monitor as metrics of a run of MLflow, here in plain files."""

import os
import tempfile
import warnings

import torch
from torch import nn

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow prefers a database or a server
warnings.simplefilter("default")
import mlflow  # noqa: E402

import gramscope as gs  # noqa: E402
from gramscope.integrations.loggers import MlflowLog  # noqa: E402

torch.manual_seed(0)
x = torch.randn(500, 8)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(f"file:{folder}/runs")
    with mlflow.start_run() as run:
        monitor = gs.Monitor(model, (x, y), nn.CrossEntropyLoss(), every=10, log=MlflowLog())
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "gramscope/target_linearity/2")
    for metric in history:
        print(f"step {metric.step}: target linearity {metric.value:.3f}")
