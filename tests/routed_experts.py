"""A network whose samples go to different experts, so that parts of the data see different layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

OPTIONS = {"jacobians": True, "residuals": True, "outputs": ["experts.1", "embed"]}


class Experts(nn.Module):
    """Each sample goes to the expert that its last input names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.r = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, z = self.embed(x[:, :4]), x.new_zeros(x.shape[0], 5)
        for index, expert in enumerate(self.experts):
            mine = x[:, 4] == index
            if mine.any():
                z = z.index_put((mine.nonzero()[:, 0],), expert(h[mine]))
        return self.r(torch.tanh(z))


def routed() -> tuple[nn.Module, Tensor, Tensor]:
    """Twelve samples: the first five all of expert 0, the last three of expert 2 and 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    x[:, 4] = torch.tensor([0.0] * 5 + [1, 0, 1, 1] + [2, 2, 0])
    model = Experts().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
    return model, x, torch.arange(12) % 3
