"""A training loop of Accelerate with FreeMuon, whose measures go to the trackers of the accelerator."""

import json
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramscope as gs
from gramscope.instruments.log import scalars


class JsonLines(GeneralTracker):
    """Any tracker will do: TensorBoard, Weights & Biases, or this one."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        return self.path

    @on_main_process
    def store_init_configuration(self, values):
        pass

    @on_main_process
    def log(self, values, step=None, **options):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


torch.manual_seed(0)
x = torch.randn(1000, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "log.jsonl"
    accelerator = Accelerator(cpu=True, log_with=JsonLines(path))
    accelerator.init_trackers("example")
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    model, optimizer, loader = accelerator.prepare(
        net, gs.FreeMuon(net), DataLoader(TensorDataset(x[:800], y[:800]), batch_size=50)
    )
    for epoch in range(4):
        if accelerator.is_main_process:
            held_out = x[800:], y[800:]
            table = gs.measure(accelerator.unwrap_model(model), held_out, nn.CrossEntropyLoss(), process_group=False)
            accelerator.log(scalars(table.to_dict()), step=epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        print(f"epoch {row['step']}: target linearity {row['gramscope/target_linearity/2']:.3f}")
