"""Follow target linearity through the blocks of a Transformer while it learns a token-counting task."""

import torch
from torch import nn

import gramscope as gs

generator = torch.Generator().manual_seed(0)
tokens = torch.randint(8, (256, 10), generator=generator)
labels = ((tokens == 3).sum(1) > (tokens == 5).sum(1)).long()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([layer, nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)])
        self.head = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
monitor = gs.Monitor(
    model,
    (tokens, labels),
    nn.CrossEntropyLoss(),
    every=20,
    layers="head",
    outputs=["blocks.0", "blocks.1"],  # the hidden state after each block, averaged over tokens
    measures=["target_linearity", "nc1"],
    log=lambda step, record: print(
        f"step {step:3d}  accuracy {record['network']['accuracy']:.2f}  target linearity "
        + "  ".join(f"{name} {row['target_linearity']:.3f}" for name, row in record["layers"].items())
    ),
)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens), labels).backward()
    optimizer.step()
    monitor.step()
