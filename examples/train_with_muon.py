"""Muon for the hidden matrices of a Transformer and AdamW for everything else."""

import torch
from torch import nn

import gramscope as gs

torch.manual_seed(0)
tokens = torch.randint(12, (128, 8))
labels = (tokens == 3).any(1).long()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)).mean(1))


model = Classifier()
matrices, rest = gs.param_groups(model, matrix={"lr": 0.02}, rest={"lr": 3e-3})
print("Muon: ", ", ".join(matrices["param_names"]))
print("AdamW:", ", ".join(rest["param_names"]))
optimizers = torch.optim.Muon([matrices]), torch.optim.AdamW([rest])
for step in range(41):
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
