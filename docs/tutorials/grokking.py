# %% [markdown]
# # Grokking and target linearity
#
# A network that learns to add modulo a prime first *memorises* the training pairs. Much later, with weight decay, it suddenly
# *generalises*: it groks. Does target linearity of the layers show it coming? This is a small version of Figure 13 of the
# weight-Gram paper (`gramscope reproduce gram-fig13` runs the published one), with the control that the question needs: the
# same net without weight decay, which never groks.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.data import load

data = load("modular-arithmetic", seed=0, p=31, train_fraction=0.75)
x, y, x_test, y_test = data.x_train, data.y_train, data.x_test, data.y_test
print(len(x), "training pairs,", len(x_test), "test pairs, as one-hot vectors")


# %%
def train(weight_decay):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(62, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 31),
    )
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=0.003, weight_decay=weight_decay, betas=(0.9, 0.98)
    )
    names = ["target_linearity"]  # needs no backward pass, so this is cheap
    monitor = gs.Monitor(net, (x, y), measures=names, samples=1000, every=25)
    accuracies = []
    for step in range(1000):
        if step % 25 == 0:
            with torch.no_grad():
                right = net(x).argmax(1) == y, net(x_test).argmax(1) == y_test
            accuracies.append([float(each.double().mean()) for each in right])
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        monitor.step()
    return accuracies, monitor.series["target_linearity"]


runs = {decay: train(decay) for decay in (2.0, 0.0)}
for decay, (accuracies, linearity) in runs.items():
    readout = linearity["4"]
    at = next(25 * i for i, (known, _) in enumerate(accuracies) if known == 1)
    print(f"weight decay {decay:g}: test accuracy {accuracies[-1][1]:.2f} at the end;")
    print(f"  all memorised at step {at}, target linearity of layer 4")
    print(f"  {readout[at]:.2f} then, {readout[1000]:.2f} at the end")

# %% [markdown]
# ## What the layers do meanwhile

# %%
figure, axes = plt.subplots(2, 2, figsize=(8, 4.4), sharex=True, sharey="row")
for column, (decay, (accuracies, linearity)) in enumerate(runs.items()):
    above, below = axes[:, column]
    steps = [25 * index for index in range(len(accuracies))]
    above.plot(steps, [known for known, _ in accuracies], label="training")
    above.plot(steps, [test for _, test in accuracies], label="test")
    above.set_title(f"weight decay {decay:g}")
    for layer, values in linearity.items():
        below.plot(
            list(values), list(values.values()), label=f"inputs of layer {layer}"
        )
    below.set_xlabel("step")
axes[0, 0].set_ylabel("accuracy")
axes[1, 0].set_ylabel("target linearity")
axes[0, 0].legend()
axes[1, 0].legend(fontsize=8)
plt.show()

# %% [markdown]
# With weight decay target linearity of the hidden layers goes on rising after memorisation, long before the test accuracy does.
# But it rises without decay too, where the test accuracy stays at 0. So a rise alone announces nothing
# ([sixty runs](../over-training.md#does-it-predict)).
