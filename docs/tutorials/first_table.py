# %% [markdown]
# # Your first layer table
#
# We train a small network on the digits that come with gramscope, and ask what each of its layers has learned. You need
# `gramscope[lab]`.

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.data import load

data = load("digits").flat()  # images of 8 × 8 pixels, ten classes
x, y, x_test, y_test = data.x_train, data.y_train, data.x_test, data.y_test
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 96),
    nn.ReLU(),
    nn.Linear(96, 96),
    nn.ReLU(),
    nn.Linear(96, 96),
    nn.ReLU(),
    nn.Linear(96, 10),
)
initial = copy.deepcopy(model)  # some measures compare with the start of training
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(15):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
accuracy = (model(x_test).argmax(1) == y_test).double().mean()
print(f"test accuracy {accuracy:.3f}")

# %% [markdown]
# ## Measure
#
# One call. Without `measures=` you get the usual columns; here we name five, so that the table is easy to read.

# %%
names = ["target_linearity", "nfa", "nfa_null", "effective_rank", "weight_change"]
table = gs.measure(model, (x, y), loss, measures=names, reference=initial)
print(table)

# %% [markdown]
# A row is a layer, named after its module (`0` is the first of the `nn.Sequential`).
#
# - **target_linearity**: how much of the labels a *linear* map of this layer's **inputs** explains, from 0 to 1.
# - **nfa**: how well the layer's weights agree with the directions in which the network's output is sensitive. Read it only
#   beside **nfa_null**, which is what random directions give. The star says that the last layer's value is trivial.
# - **effective_rank**: over how many directions the weights spread.
# - **weight_change**: how far the weights have moved, relative to their start.
#
# ## Before and after

# %%
before = gs.measure(initial, (x, y), measures=["target_linearity"])
figure, axes = plt.subplots(figsize=(5, 2.8))
for label, found in (("at the start", before), ("trained", table)):
    values = list(found.column("target_linearity").values())
    axes.plot(range(1, 5), values, marker="o", label=label)
axes.set(xlabel="inputs of layer", ylabel="target linearity")
axes.set(ylim=(0, 1), xticks=range(1, 5))
axes.legend()
plt.show()

# %% [markdown]
# At the start depth does not help: a random layer only mixes what it gets. After training target linearity rises with every
# layer. That is the *sequential linearization* of the weight-Gram paper, seen in your own network. It does not say that the
# network generalises: a net that memorised random labels shows the same.
#
# The table holds plain numbers: `table["2"]["nfa"]`, `table.column("nfa")`, `table.to_pandas()`, and notes in `table.notes`.
