"""Other readings of published claims that do not hold: vcl-fig1, gram-fig4 and gram-fig2 on CIFAR-10.

python studies/readings.py agop|shapes|whitening --data-dir DATA --out readings.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramscope as gs
from gramscope_lab.data.named_sets import load

SCALINGS = {
    "raw": (0.0, 1.0),
    "centred": (0.5, 0.5),
}  # pixels become (x − first) / second; "centred" has them in [−1, 1]


def batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of one epoch."""
    yield from torch.randperm(n, generator=generator).split(size)


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers."""
    with torch.no_grad():
        return float((net(x).argmax(1) == y).double().mean())


# -- vcl-fig1: which gradient the AGOP is made of -----------------------------------------------------------------
def output_directions(f: Tensor, y: Tensor) -> dict[str, Tensor]:
    """For each reading the vectors u ``[n, m, c]``: gradients of u·f with respect to the inputs enter the AGOP."""
    n, c = f.shape
    identity = torch.eye(c).expand(n, c, c)
    p = f.softmax(1)
    softmax = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    predicted = f.argmax(1)
    return {
        "every output": identity,
        "sum of the outputs": torch.ones(n, 1, c),
        "output of the predicted class": F.one_hot(predicted, c).float()[:, None],
        "output of the true class": F.one_hot(y, c).float()[:, None],
        "every softmax probability": softmax,
        "softmax probability of the predicted class": softmax[torch.arange(n), predicted][:, None],
        "every log-softmax": identity - p[:, None, :],
        "loss": (p - F.one_hot(y, c))[:, None],
    }


def agop_diagonals(net: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Diagonal of WᵀKW for every reading, of its square root for the first, and of the mean gradient's outer product."""
    W, A = net[0].weight.detach(), net[2].weight.detach()
    with torch.no_grad():
        z = x @ W.T
        slope = torch.func.vmap(torch.func.vmap(torch.func.grad(F.gelu)))(z)
        found = {}
        for name, u in output_directions(net(x), y).items():
            delta = (u @ A) * slope[:, None, :]
            K = torch.einsum("nmk,nml->kl", delta, delta) / len(x)
            found[name] = (W * (K @ W)).sum(0)
            if name == "every output":
                values, vectors = torch.linalg.eigh(K.double())
                factor = (vectors * values.clamp(min=0).sqrt()).T @ W.double()
                _, s, right = torch.linalg.svd(factor, full_matrices=False)
                found["square root of the AGOP"] = ((right**2) * s[:, None]).sum(0).float()
                found["mean gradient first"] = ((delta.mean(0) @ W) ** 2).sum(0)
    return found


def agop(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Train the net of vcl-fig1 and correlate diagonals at several epochs."""
    for scaling, batch, seed, epochs in (
        ("raw", 64, 0, 40),
        ("centred", 64, 0, 20),
        ("raw", 64, 1, 20),
        ("raw", 256, 0, 20),
        ("raw", 16, 0, 5),
    ):
        data = load("cifar10", args.data_dir).flat()
        shift, scale = SCALINGS[scaling]
        x, x_test = ((part - shift) / scale for part in (data.x_train, data.x_test))
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3072, 256, bias=False), nn.GELU(), nn.Linear(256, 10))
        start = net[0].weight.detach().clone()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(1, epochs + 1):
            for rows in batches(len(x), batch, generator):
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), data.y_train[rows]).backward()
                optimizer.step()
            if epoch not in (1, 2, 5, 10, 15, 20, 30, 40):
                continue
            W = net[0].weight.detach()
            grams = {"WᵀW": (W**2).sum(0), "WᵀW − W₀ᵀW₀": (W**2 - start**2).sum(0), "W̄ᵀW̄": ((W - start) ** 2).sum(0)}
            record = {"study": "agop", "inputs": scaling, "batch": batch, "seed": seed, "epoch": epoch}
            record["test_accuracy"] = accuracy(net, x_test, data.y_test)
            for part, (inputs, labels) in {
                "train": (x[:5000], data.y_train[:5000]),
                "test": (x_test[:5000], data.y_test[:5000]),
            }.items():
                for name, diagonal in agop_diagonals(net, inputs, labels).items():
                    for gram, other in grams.items():
                        pearson = float(gs.cosine(diagonal.double(), other.double(), center=True))
                        cosine = float(gs.cosine(diagonal.double(), other.double()))
                        yield {
                            **record,
                            "part": part,
                            "reading": name,
                            "gram": gram,
                            "pearson": pearson,
                            "cosine": cosine,
                        }


# -- gram-fig4: the shape of the curves, early and late -----------------------------------------------------------
def shapes(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Target linearity and surrogate of the last layer's inputs, measured often at the start."""
    data = load("cifar10", args.data_dir).flat()
    x, y = data.x_train, data.y_train
    for lr, momentum, epochs in ((5e-4, 0.8, 20), (5e-3, 0.8, 20)):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for d in (3072, 256, 256, 256):
            layers += [nn.Linear(d, 256), nn.GELU()]
        net = nn.Sequential(*layers, nn.Linear(256, 10))
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
        generator = torch.Generator().manual_seed(0)
        step, steps = 0, -(-len(x) // 64)
        for _ in range(epochs):
            for rows in batches(len(x), 64, generator):
                if step % (steps // 8) == 0 if step < 4 * steps else step % steps == 0:
                    yield {
                        "study": "shapes",
                        "lr": lr,
                        "momentum": momentum,
                        "epoch": step / steps,
                        **last_layer(net, x, y),
                    }
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
                step += 1


def last_layer(net: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, float]:
    """Measures of the features that enter the readout."""
    with torch.no_grad():
        H, labels = net[:-1](x[:5000]), y[:5000]
        return {
            "target_linearity": float(gs.target_linearity(H, labels)),
            "surrogate": float(gs.surrogate(H, labels)),
            "surrogate_normalized": float(gs.surrogate(H, labels, normalized=True, center=True)),
            "train_loss": float(F.cross_entropy(net[-1](H), labels)),
        }


# -- gram-fig2: inputs and where the comparison begins ------------------------------------------------------------
def whitening(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Plain and whitened SGD with equal settings, raw and centred pixels."""
    data = load("cifar10", args.data_dir).flat()
    for scaling, lr, momentum in (("centred", 0.01, 0.9), ("raw", 0.05, 0.9)):
        shift, scale = SCALINGS[scaling]
        x, x_test = ((part - shift) / scale for part in (data.x_train, data.x_test))
        for whitened in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(3072, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
            optimizer = gs.GramWhitened(optimizer, net) if whitened else optimizer
            generator = torch.Generator().manual_seed(0)
            for epoch in range(1, 9):
                for rows in batches(len(x), 64, generator):
                    optimizer.zero_grad()
                    F.cross_entropy(net(x[rows]), data.y_train[rows]).backward()
                    optimizer.step()
                setting = {"inputs": scaling, "lr": lr, "momentum": momentum, "whitened": whitened, "epoch": epoch}
                yield {"study": "whitening", **setting, "test_accuracy": accuracy(net, x_test, data.y_test)}


def main() -> None:
    """Run one study and append its records to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=["agop", "shapes", "whitening"])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with Path(args.out).open("a", encoding="utf-8") as file:
        for record in {"agop": agop, "shapes": shapes, "whitening": whitening}[args.study](args):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
