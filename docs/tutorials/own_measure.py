# %% [markdown]
# # A measure of your own
#
# gramscope collects sums over the data once, and every measure is a function of those sums. So a new measure is a few
# lines, and it works on every layer of every model at once. We build one: **how much of a layer's gradient lies in the
# directions its weights already use**.
#
# Let $W = U S V^\top$ and let $D$ be the summed gradient. The share of $D$ inside the span of the leading $r$ right singular
# vectors $V_r$ is
#
# $$\text{share} = \|D V_r\|_F^2 \,/\, \|D\|_F^2 .$$
#
# A null: for a random direction in $d$ dimensions the share would be $r/d$.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.data import load

data = load("digits").flat()
x, y = data.x_train, data.y_train
loss = nn.CrossEntropyLoss()


def gradient_share(weight, D, r=8):
    """Share of the gradient D [k, d] in the r leading right singular directions of the weight [k, d]."""
    directions = torch.linalg.svd(weight.double(), full_matrices=False).Vh[:r]
    return float((D.double() @ directions.T).square().sum() / D.double().square().sum())


# %% [markdown]
# ## On one network
#
# `gs.collect` makes one pass over the data. `stats[layer]` has the weight, `D`, `Σ` and the moments of the features.

# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
stats = gs.collect(model, (x, y), loss)
for name, layer in stats.layers.items():
    print(name, round(gradient_share(layer.weight, layer.D), 3), "null", round(8 / layer.weight.shape[1], 3))

# %% [markdown]
# ## Check it
#
# A number counts only if it can be checked. Two checks that any such share must pass: it is 1 with all directions, and it
# is what plain autograd gives.

# %%
assert abs(gradient_share(stats["0"].weight, stats["0"].D, r=64) - 1) < 1e-9
loss(model(x), y).backward()  # the mean loss: D / n
by_autograd = gradient_share(model[0].weight.detach(), model[0].weight.grad)
assert abs(by_autograd - gradient_share(stats["0"].weight, stats["0"].D)) < 1e-4
print("agrees with autograd")

# %% [markdown]
# ## Through training

# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
curves = {name: [] for name in stats.layers}
for epoch in range(12):
    stats = gs.collect(model, (x, y), loss)
    for name, layer in stats.layers.items():
        curves[name].append(gradient_share(layer.weight, layer.D) / (8 / layer.weight.shape[1]))
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()

figure, axes = plt.subplots(figsize=(5, 2.8))
for name, values in curves.items():
    axes.plot(values, marker="o", markersize=3, label=f"layer {name}")
axes.axhline(1, color="grey", linestyle=":", label="random directions")
axes.set(xlabel="epoch", ylabel="share / null")
axes.legend(fontsize=7)
plt.show()

# %% [markdown]
# ## As a column of the table
#
# To have it in `gs.measure`, `gs.Monitor`, the command line and the report, add the function to `measures/columns.py`
# together with what it needs and its formula, and its oracle to the tests. [Add a measure](../howto/extend.md#a-measure)
# has the steps.
