"""A LightningModule trained by FreeMuon, with the measures of its layers in Lightning's own logs."""

import tempfile
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("default")  # Lightning has advice about loaders and devices
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

import gramscope as gs  # noqa: E402
from gramscope.integrations.lightning import GramscopeCallback  # noqa: E402


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return gs.FreeMuon(self)


torch.manual_seed(0)
x = torch.randn(1200, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
callback = GramscopeCallback((x[1000:], y[1000:]), nn.CrossEntropyLoss(), every_n_epochs=1)
with tempfile.TemporaryDirectory() as folder:
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        callbacks=[callback],
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=50, shuffle=True))
for record in callback.records:
    layer = record["layers"]["net.4"]
    accuracy = record["network"]["accuracy"]
    print(f"step {record['step']}: accuracy {accuracy:.3f}, target linearity {layer['target_linearity']:.3f}")
