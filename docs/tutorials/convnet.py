# %% [markdown]
# # A ConvNet and its first-layer diagonals
#
# What does a convolution look at? Its weight is a matrix $W$ on patches, so $W^\top W$ has one row for every pixel of a
# patch, and the **diagonal** says how strongly each pixel is used. The AGOP at the same place, $W^\top K W$, says how
# strongly the *output of the network* depends on it. The neural feature ansatz claims that the two agree after training.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.data import load

data = load("faces", seed=0)  # drawn faces; the label says whether they wear glasses
x = nn.functional.avg_pool2d(data.x_train[:800], 2)
y = data.y_train[:800]
print(tuple(x.shape))

figure, axes = plt.subplots(1, 6, figsize=(7, 1.3))
for place, image, label in zip(axes, x, y, strict=False):
    place.imshow(image[0].numpy(), cmap="gray")
    place.set(title="glasses" if label else "none", xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## Train twice
#
# Once with plain SGD, once with weight decay. Both learn the task. `gs.agop` runs one backward pass per output and never
# forms a Jacobian of the size of the input. Convolutions are handled in patch space, so both matrices are 49 × 49 for 7 ×
# 7 patches.

# %%
loss = nn.CrossEntropyLoss()


def train(weight_decay, epochs=8):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 7, stride=2, padding=3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=weight_decay)
    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model


models = {"at the start": train(0.0, epochs=0), "plain SGD": train(0.0), "with weight decay": train(0.01)}
for name, model in models.items():
    print(f"{name}: training accuracy {(model(x).argmax(1) == y).double().mean():.3f}")

# %%
figure, axes = plt.subplots(2, 3, figsize=(6.5, 4.4))
for column, (name, model) in zip(axes.T, models.items(), strict=True):
    gram = gs.weight_gram(model[0].weight.detach())
    agop = gs.agop(model, x, layers="0")["0"]
    for place, matrix, title in zip(column, (gram, agop), ("WᵀW", "AGOP"), strict=True):
        place.imshow(matrix.diagonal().reshape(7, 7).numpy(), cmap="magma")
        place.set(title=f"{title}, {name}", xticks=[], yticks=[])
    print(f"{name}: cosine of AGOP and WᵀW {float(gs.cosine(agop, gram)):.3f}")
plt.show()

# %% [markdown]
# The ansatz is no law of nature. With weight decay what the weights hold beyond the task is forgotten, and the two matrices
# agree almost exactly. Without it, this short training leaves much of the random start in the weights, and agreement is
# *lower* than at the start.
#
# ## Is the number large?
#
# Compare it with the same $W$ and a $K$ whose eigenvectors are random. The table of `gs.measure` has this null beside the
# value, for every layer, and a note where the value is trivial, as it is for a readout of two classes.

# %%
for name in ("plain SGD", "with weight decay"):
    print(name)
    print(gs.measure(models[name], (x, y), loss, measures=["nfa", "nfa_null", "target_linearity"]))
