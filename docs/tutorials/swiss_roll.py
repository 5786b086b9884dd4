# %% [markdown]
# # The Swiss roll and virtual covariance
#
# Gradient descent moves weights. What if it moved the *data* instead? Give every input $x$ the step that would lower its
# loss, $x^+ = x - \gamma\,\partial L/\partial x$, and never take it: this **virtual update** says where the network would
# like its inputs to be. We let it act on a Swiss roll, and see that the first layer's weights record exactly this wish.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gramscope as gs
from gramscope_lab.data import load

data = load("swiss-roll", seed=0)
x, y = data.x_train, data.y_train  # points; the target is the position along the roll
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(2, 32, bias=False),
    nn.GELU(),
    nn.Linear(32, 32),
    nn.GELU(),
    nn.Linear(32, 1),
)

# %% [markdown]
# ## Train, and remember the gradients at the inputs

# %%
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
inputs, W = x.clone().requires_grad_(), net[0].weight
start = W.detach().clone()
gradients, shift = [], torch.zeros(2, 2)
for epoch in range(60):
    loss = (net(inputs) - y).square().mean()
    optimizer.zero_grad()
    (slope,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    loss.backward()
    moved = gs.virtual_update(x, slope, gamma=0.05)
    shift += moved.T @ moved - x.T @ x  # the virtual covariance shift of this step
    gradients.append(slope)
    optimizer.step()

# %% [markdown]
# ## The roll unrolls
#
# `gs.virtual_trajectory` adds the virtual steps up (with a large step size, so that the eye sees them). Colour is the target.

# %%
frames = gs.virtual_trajectory(x, gradients, 700.0, every=20)
figure, axes = plt.subplots(1, len(frames), figsize=(9, 2.4))
for number, (place, points) in enumerate(zip(axes, frames, strict=True)):
    linearity = float(gs.target_linearity(points, y, intercept=True))
    place.scatter(*points.T, c=y.flatten(), s=3)
    place.set(
        title=f"step {20 * number}\ntarget linearity {linearity:.2f}",
        xticks=[],
        yticks=[],
    )
plt.show()

# %% [markdown]
# *Target linearity* is the R² of a linear fit of the target. It rises because the points move so that a straight line can
# read their position along the roll.
#
# ## The weights follow
#
# The theorem behind gramscope: one step of gradient descent changes $W^\top W$ by the shift of the inputs' covariance
# under the virtual update, up to a term of second order in the step size. So the sum of all shifts should point the same
# way as the change of the first layer's Gram matrix:

# %%
change = gs.weight_gram(W.detach()) - gs.weight_gram(start)
print("cosine of the two matrices:", float(gs.cosine(change, shift)))
print("change of WᵀW:\n", change, "\nsum of shifts:\n", shift)

# %% [markdown]
# The same comparison for every layer of your own network is the column `vcs_cosine` of `gs.measure`. Training *by* the shift,
# instead of watching it, is [virtual covariance learning](../vcl.md).
