# %% [markdown]
# # FreeMuon against tuned SGD, AdamW and Muon
#
# Every optimizer has a learning rate, and a comparison is fair only if the others' rates are tuned. Here each of them
# gets a grid of rates and is judged on data it has not been chosen on. The set is small (the shipped digits) so that the
# page builds in seconds: it shows *how* to compare. [FreeMuon](../free-muon.md) has the results on larger sets.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.data import load

data = load("digits").flat()
split = 1100  # training images; the rest of the training set chooses the rates
x, y = data.x_train[:split], data.y_train[:split]
x_valid, y_valid, x_test, y_test = (
    data.x_train[split:],
    data.y_train[split:],
    data.x_test,
    data.y_test,
)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def muon(model, lr):
    matrices, rest = gs.param_groups(
        model
    )  # which weights Muon should have, and which AdamW
    return [torch.optim.Muon([matrices], lr=lr), torch.optim.AdamW([rest], lr=3e-3)]


def free(model, lr):
    optimizer = gs.FreeMuon(model)
    for group in optimizer.param_groups:
        group["lr"] *= lr
    return [optimizer]


def sgd(model, lr):
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)]


def adamw(model, lr):
    return [torch.optim.AdamW(model.parameters(), lr=lr)]


METHODS = {
    "SGD, momentum": (sgd, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    "AdamW": (adamw, (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)),
    "Muon": (muon, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
    "FreeMuon": (free, (0.1, 0.3, 1.0, 3.0, 10.0)),  # multiples of its built-in lengths
}

# %% [markdown]
# ## Every method at every rate, 30 steps
#
# The rates of the first three fall linearly to 0 at the last step, which they have to know. FreeMuon has no schedule:
# between steps the model has its averaged weights.

# %%


def train(method, rate, seed, steps=30):
    model = net(seed)
    optimizers = METHODS[method][0](model, rate)
    order = torch.Generator().manual_seed(seed)
    falling = torch.optim.lr_scheduler.LinearLR
    schedules = [
        falling(each, 1.0, 0.0, steps) for each in optimizers if method != "FreeMuon"
    ]
    for step in range(steps):
        rows = torch.randint(len(x), (64,), generator=order)
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    with torch.no_grad():
        return [
            float((model(a).argmax(1) == b).double().mean())
            for a, b in ((x_valid, y_valid), (x_test, y_test))
        ]


found = {
    method: [
        torch.tensor([train(method, rate, seed) for seed in range(3)]).mean(0)
        for rate in rates
    ]
    for method, (_, rates) in METHODS.items()
}

# %% [markdown]
# ## The table
#
# *Best* is the test accuracy at the rate that the validation part chose, for FreeMuon that of the bare call. *Spread* is the
# difference between the best and the worst rate of the grid: what a wrong guess costs. A best rate at the edge of its grid
# would say that the grid is too narrow.

# %%
print(f"{'method':15} {'best':>6} {'rate':>6} {'spread':>7}")
for method, values in found.items():
    rates = METHODS[method][1]
    chosen = max(range(len(values)), key=lambda index: float(values[index][0]))
    if method == "FreeMuon":
        chosen = rates.index(1.0)
    tests = [100 * float(value[1]) for value in values]
    edge = "  at the edge of its grid" if chosen in (0, len(rates) - 1) else ""
    print(
        f"{method:15} {tests[chosen]:6.1f} {rates[chosen]:6g} {max(tests) - min(tests):7.1f}{edge}"
    )

# %%
figure, axes = plt.subplots(figsize=(5.5, 3))
for method, values in found.items():
    rates = METHODS[method][1]
    accuracies = [100 * float(value[1]) for value in values]
    axes.plot([rate / rates[2] for rate in rates], accuracies, marker="o", label=method)
axes.set(
    xscale="log",
    xlabel="rate / third rate of the grid",
    ylabel="test accuracy after 30 steps (%)",
)
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# At the best of its seven rates Muon is a little ahead of the bare FreeMuon here. Three seeds, one small data set and one
# budget decide nothing in general. What the picture shows is the shape: how flat each
# curve is.
