"""Measure every layer of a small convolutional network and compare AGOP with the weight Gram, patch by patch."""

import torch
from torch import nn

import gramscope as gs

generator = torch.Generator().manual_seed(0)
x = torch.randn(200, 3, 12, 12, generator=generator)
y = (x[:, 0, 3:9, 3:9].mean((1, 2)) > 0).long()

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(inplace=True),
    nn.Conv2d(8, 8, 3, stride=2, groups=2),
    nn.ReLU(inplace=True),
    nn.Flatten(),
    nn.Linear(200, 2),
)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(5):
    for inputs, target in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()

table = gs.measure(model, loader, nn.CrossEntropyLoss())
print(table)

# The same numbers by hand, for the first convolution: 27-dimensional patches, three colours of 3 × 3.
G = gs.agop(model, x, layers="0")["0"]
W = model[0].weight.detach().flatten(1)
print("AGOP against WᵀW:", float(gs.cosine(G, gs.weight_gram(W))), "in the table:", table["0"]["nfa"])
