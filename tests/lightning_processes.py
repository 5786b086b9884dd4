"""``FOLDER``: trains under DDP in two processes, each of which saves its metrics, weights and steps of records."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gramscope.distributed.exchange import leave_together
from gramscope.integrations.lightning import GramscopeCallback
from lightning_module import Net, data


def main() -> None:
    x, y = data()
    measures = ["target_linearity", "gradient_norm", "weight_change"]
    callback = GramscopeCallback((x[:24], y[:24]), nn.CrossEntropyLoss(), measures=measures, every_n_steps=3)
    passing = GramscopeCallback(None, measures=["surrogate"], every_n_epochs=1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, callbacks=[callback, passing],
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    net = Net("vcl")
    rank = int(os.environ.get("LOCAL_RANK", "0"))  # Lightning starts the second process with a rank
    every_second = DistributedSampler(TensorDataset(x, y), num_replicas=2, rank=rank, shuffle=False)
    trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=8, sampler=every_second))
    saved = {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": net.state_dict(),
        "steps": [record["step"] for record in callback.records],
        "passing": [record["layers"]["net.0"]["surrogate"] for record in passing.records],
    }
    torch.save(saved, Path(sys.argv[1]) / f"rank{trainer.global_rank}.pt")
    leave_together()


if __name__ == "__main__":
    main()
