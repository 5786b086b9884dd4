"""A small LightningModule, and its data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import gramscope as gs


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Net(pl.LightningModule):
    """A net with the optimizer ``kind``, whose learning rate is halved after each epoch."""

    def __init__(self, kind: str, accumulated: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.kind, self.accumulated = kind, accumulated

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.kind == "vcl":
            optimizer = gs.VCL(self, gamma=0.1, reduction=lambda n: self.accumulated * n)
        elif self.kind == "whitened":
            optimizer = gs.GramWhitened(optimizer, self)
        elif self.kind == "free":
            return gs.FreeMuon(self)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule}
