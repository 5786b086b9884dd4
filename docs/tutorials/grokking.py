# %% [markdown]
# # Grokking and target linearity
#
# A network that learns to add modulo a prime first *memorises* the training pairs. Much later, with weight decay, it suddenly
# *generalises*: it groks. Training accuracy cannot show what happens in between, since it is 100 % all the while. Target
# linearity of the layers can. This is a small version of Figure 13 of the weight-Gram paper; `gramscope reproduce gram-fig13`
# runs the published one.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.data import load

data = load("modular-arithmetic", seed=0, p=31, train_fraction=0.75)
x, y, x_test, y_test = data.x_train, data.y_train, data.x_test, data.y_test
print(
    len(x),
    "training pairs,",
    len(x_test),
    "test pairs, as two one-hot vectors of length 31",
)

# %% [markdown]
# ## Train for long after the training set is known
#
# `gs.Monitor` measures a fixed sample at the steps we ask for. Target linearity needs no backward pass, so this is cheap.

# %%
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(62, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 31)
)
optimizer = torch.optim.AdamW(
    net.parameters(), lr=0.003, weight_decay=2.0, betas=(0.9, 0.98)
)
monitor = gs.Monitor(net, (x, y), measures=["target_linearity"], samples=1000, every=25)
accuracies = []


def accuracy(inputs, labels):
    with torch.no_grad():
        return float((net(inputs).argmax(1) == labels).double().mean())


for step in range(1000):
    if step % 25 == 0:
        accuracies.append((accuracy(x, y), accuracy(x_test, y_test)))
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    monitor.step()
print(
    f"training accuracy {accuracies[-1][0]:.2f}, test accuracy {accuracies[-1][1]:.2f}"
)

# %% [markdown]
# ## What the layers do meanwhile

# %%
steps = [25 * index for index in range(len(accuracies))]
figure, (above, below) = plt.subplots(2, 1, figsize=(6, 4.4), sharex=True)
above.plot(steps, [train for train, _ in accuracies], label="training")
above.plot(steps, [test for _, test in accuracies], label="test")
above.set_ylabel("accuracy")
above.legend()
for layer, values in monitor.series["target_linearity"].items():
    below.plot(list(values), list(values.values()), label=f"inputs of layer {layer}")
below.set(xlabel="step", ylabel="target linearity")
below.legend(fontsize=8)
plt.show()

# %% [markdown]
# The training curve reaches 1 early and says nothing more. Target linearity of the hidden features goes on rising while the
# test accuracy is still low, and the representation is reorganised long before it shows on unseen pairs. Inputs have the
# linearity of the data (layer 0): a sum modulo a prime is not linear in one-hot vectors at all.
