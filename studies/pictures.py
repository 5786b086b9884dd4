"""Draw the pictures of the pages on measures into docs/pictures. Half a minute on one core, shipped data only.

python studies/pictures.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope_lab.data import load

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
STYLE = {"figure.constrained_layout.use": True, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}


def save(figure: plt.Figure, name: str) -> None:
    """Write one picture."""
    figure.savefig(PICTURES / f"{name}.png", dpi=110, facecolor="white")
    plt.close(figure)


def deep_net(classes: int = 10) -> nn.Sequential:
    """Four hidden layers of equal width, so that target linearities can be compared."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for d in (64, 96, 96, 96):
        layers += [nn.Linear(d, 96), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(96, classes))


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, monitor: gs.Monitor | None = None) -> None:
    """Plain SGD with momentum, batches of 64."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            if monitor is not None:
                monitor.step()


def linearity() -> None:
    """first_look: target linearity by layer before and after training; linearity, rank, collapse: over training."""
    data = load("digits").flat()
    net = deep_net()
    names = ["target_linearity", "effective_rank", "feature_rank", "nc1"]
    monitor = gs.Monitor(net, (data.x_train, data.y_train), measures=names, samples=1438, every=10)
    train(net, data.x_train, data.y_train, 12, monitor)
    series = monitor.series["target_linearity"]
    figure, axes = plt.subplots(figsize=(5.4, 2.8))
    for label, moment in (("at the start", 0), ("after 12 epochs", -1)):
        axes.plot(range(1, 6), [list(values.values())[moment] for values in series.values()], marker="o", label=label)
    axes.set(xlabel="inputs of layer", ylabel="target linearity", ylim=(0, 1), xticks=range(1, 6))
    axes.legend()
    save(figure, "first_look")
    figure, axes = plt.subplots(figsize=(5.4, 2.8))
    over_training(axes, monitor, "target_linearity", "target linearity")
    axes.set_ylim(0, 1)
    save(figure, "linearity")
    figure, axes = plt.subplots(figsize=(5.4, 2.8))
    over_training(axes, monitor, "nc1", "NC1: scatter within / between classes")
    axes.set_yscale("log")
    save(figure, "collapse")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 2.8))
    over_training(left, monitor, "effective_rank", "effective rank of the weight")
    over_training(right, monitor, "feature_rank", "effective rank of the inputs")
    left.set_ylim(0), right.set_ylim(0)
    save(figure, "rank")


def over_training(axes: plt.Axes, monitor: gs.Monitor, column: str, label: str) -> None:
    """One line for each layer, from the first (dark) to the last (light)."""
    series = monitor.series[column]
    for number, values in enumerate(series.values(), 1):
        axes.plot(list(values), list(values.values()), color=plt.cm.viridis((number - 1) / 4), label=f"layer {number}")
    axes.set(xlabel="training step", ylabel=label)
    axes.legend(fontsize=7)


def swiss_roll() -> None:
    """The virtual trajectory of a Swiss roll."""
    data = load("swiss-roll", seed=0)
    x, y = data.x_train, data.y_train
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32, bias=False), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, gradients = x.clone().requires_grad_(), []
    for _ in range(60):
        loss = (net(inputs) - y).square().mean()
        optimizer.zero_grad()
        gradients += torch.autograd.grad(loss, inputs, retain_graph=True)
        loss.backward()
        optimizer.step()
    frames = gs.virtual_trajectory(x, gradients, 700.0, every=20)
    figure, axes = plt.subplots(1, len(frames), figsize=(8.5, 2.2))
    for number, (place, points) in enumerate(zip(axes, frames, strict=True)):
        place.scatter(*points.T, c=y.flatten(), s=3)
        place.set(title=f"step {20 * number}", xticks=[], yticks=[])
    save(figure, "swiss_roll")


def ansatz() -> None:
    """WᵀW, AGOP and corrupted AGOP of the first layer, in the coordinates of the data."""
    data = load("chain-monomial", seed=0, d=16, rank=5, n_train=400)
    x, y = data.x_train, data.y_train
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 128, bias=False), nn.ReLU(), nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 1)
    )
    with torch.no_grad():
        net[0].weight *= 0.1
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(800):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    W, K = net[0].weight.detach(), gs.tangent_kernel(net, x, layers="0")["0"]
    Q = gs.corrupted(K, torch.Generator().manual_seed(0))
    grams = {"WᵀW": gs.weight_gram(W), "AGOP": W.T @ K.to(W) @ W, "AGOP, random eigenvectors of K": W.T @ Q.to(W) @ W}
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.9))
    for place, (name, matrix) in zip(axes, grams.items(), strict=True):
        cosine = "" if name == "WᵀW" else f"\ncosine with WᵀW {float(gs.cosine(matrix, grams['WᵀW'])):.2f}"
        place.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-matrix.abs().max(), vmax=matrix.abs().max())
        place.set(title=name + cosine, xticks=[], yticks=[])
    save(figure, "ansatz")


def layer() -> None:
    """One layer with its forward and backward quantities."""
    figure, axes = plt.subplots(figsize=(7.2, 1.9))
    axes.set(xlim=(0, 10), ylim=(0, 2.4))
    axes.axis("off")
    box = {"boxstyle": "round,pad=0.5", "facecolor": "#e8eaf6", "edgecolor": "#3f51b5"}
    for place, text in (
        (0.8, "layers\nbefore"),
        (4.2, "W  (k × d)"),
        (7.6, "activation,\nlayers after"),
        (9.6, "loss  $L_i$"),
    ):
        axes.text(place, 1.2, text, ha="center", va="center", bbox=box)
    for (left, right), forward, backward in (
        ((1.6, 3.2), "$h_i$", r"$g_i = W^\top \delta_i$"),
        ((5.2, 6.6), "$z_i = W h_i$", r"$\delta_i = \partial L_i / \partial z_i$"),
        ((8.5, 9.0), "", ""),
    ):
        axes.annotate("", (right, 1.45), (left, 1.45), arrowprops={"arrowstyle": "->", "color": "#3f51b5"})
        axes.annotate("", (left, 0.95), (right, 0.95), arrowprops={"arrowstyle": "->", "color": "#c62828"})
        axes.text((left + right) / 2, 1.65, forward, ha="center", va="bottom", color="#3f51b5")
        axes.text((left + right) / 2, 0.75, backward, ha="center", va="top", color="#c62828")
    save(figure, "layer")


def main() -> None:
    """Draw everything."""
    PICTURES.mkdir(exist_ok=True)
    plt.rcParams.update(STYLE)
    for draw in (layer, linearity, swiss_roll, ansatz):
        draw()


if __name__ == "__main__":
    main()
