"""The records of a monitor as a pandas DataFrame and a Parquet file."""

import tempfile
from pathlib import Path

import pandas as pd
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.runs.export import to_arrow, write_records

torch.manual_seed(0)
x, y = torch.randn(200, 6), torch.arange(200) % 2
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gs.Monitor(model, (x, y), nn.CrossEntropyLoss(), every=10)
for _ in range(20):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    monitor.step()

frame = to_arrow(monitor.records).to_pandas()  # one row per step and layer, and one of the network
print(frame.pivot_table(index="step", columns="layer", values="target_linearity"))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "records.parquet"
    write_records(monitor.records, path, "parquet")  # for a stored run: gramscope runs export RUN
    print(pd.read_parquet(path).shape)
