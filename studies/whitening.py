"""Does Gram whitening match or exceed plain SGD, in fewer epochs? And does the answer depend on the polar factor?

Trains one architecture with five updates, several seeds each, and writes the test accuracy after every epoch:

    sgd               plain SGD with momentum
    whitened          GramWhitened, every weight matrix (as the published code does)
    whitened-hidden   GramWhitened, the readout left to SGD
    fixed             GramFixed: only the part of the step that whitening removes
    published         every weight matrix whitened with the published iteration, which has not converged when it stops:
                      ten quintic Newton–Schulz steps from Frobenius scaling

All seeds of a run are trained side by side (their matrices are batched), each with its own initial weights and its own
order of the data. The settings are those of "The Weight Gram Matrix Captures Sequential Feature Linearization in Deep
Networks", Fig. 2 (mlp) and Fig. 6 (cnn): two hidden layers of 256 GELU units with bias, or three 3×3 convolutions of 16
channels with ReLU and two max-pools; cross-entropy, batch 64, 20 epochs. Pixels are scaled to [−1, 1]. MNIST is read from
mnist/*.gz, CIFAR-10 from cifar-10-batches-bin/*.bin (as many of the five training files as there are; every record says
how many images were used).

    python studies/whitening.py --data-dir DATA --out whitening.jsonl --device cuda --jobs 5
    python studies/whitening.py --out whitening.jsonl --summary

Runs already complete in the output file are not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.optim.procrustes import Nearest
from gramscope.optim.whitening import GramFixed, GramWhitened
from gramscope_lab.nets.cnn import CNN
from gramscope_lab.nets.mlp import MLP

METHODS = ("sgd", "whitened", "whitened-hidden", "fixed", "published")


class Published(GramWhitened):
    """Whitening with ten quintic iterations (15X − 10XXᵀX + 3(XXᵀ)²X)/8 from X = A/‖A‖_F, in float32."""

    verb = "whitened by the unconverged iteration"

    def corrected(self, before: Tensor, proposed: Tensor) -> Nearest:
        """The proposal, rotated by what the iteration has when it stops."""
        A = before @ proposed.mT
        X = A / A.norm(dim=(-2, -1), keepdim=True)
        for _ in range(10):
            G = X @ X.mT
            X = (15 * X - 10 * G @ X + 3 * G @ (G @ X)) / 8
        return Nearest(X @ proposed, [0.0] * len(X))


# --- data --------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> np.ndarray:
    """A gzipped idx file of bytes."""
    with gzip.open(path) as file:
        content = file.read()
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def read_cifar(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of CIFAR-10's binary files."""
    records = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 3073) for path in paths])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def load(dataset: str, folder: Path, device: str) -> list[Tensor]:
    """Training images and labels, test images and labels; images as float32 [n, channels, height, width] in [−1, 1]."""
    if dataset == "mnist":
        arrays = [
            read_idx(folder / "mnist" / f"{part}-{kind}-ubyte.gz")
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        ]
        arrays[0], arrays[2] = arrays[0][:, None], arrays[2][:, None]
    else:
        files = sorted((folder / "cifar-10-batches-bin").glob("data_batch_*.bin"))
        if not files:
            raise SystemExit(f"no cifar-10-batches-bin/data_batch_*.bin under {folder}")
        arrays = [*read_cifar(files), *read_cifar([folder / "cifar-10-batches-bin" / "test_batch.bin"])]
    tensors = [torch.from_numpy(array.copy()).to(device) for array in arrays]
    return [t.float().mul_(2 / 255).sub_(1) if t.dim() > 1 else t.long() for t in tensors]


# --- nets of several seeds side by side ----------------------------------------------------------------------------------


def build(net: str, shape: tuple[int, ...], seed: int) -> nn.Module:
    """A net with torch's default initial weights, drawn from its own generator."""
    generator = torch.Generator().manual_seed(seed)
    if net == "mlp":
        return MLP(shape, 10, (256, 256), activation="gelu", generator=generator)
    return CNN(shape, 10, (16, 16, 16), activation="relu", generator=generator)


class SideBySide(nn.Module):
    """Nets of one architecture as one: inputs [seeds, batch, channels, height, width] to logits [seeds, batch, 10]."""

    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def layers(self, kind: type[nn.Module]) -> list[list[nn.Module]]:
        """Layer by layer, the modules of all seeds."""
        return list(zip(*[[m for m in net.modules() if isinstance(m, kind)] for net in self.nets], strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every seed's net for its own inputs."""
        seeds, batch = x.shape[:2]
        convolutions, linears = self.layers(nn.Conv2d), self.layers(nn.Linear)
        if convolutions:
            x = x.transpose(0, 1).flatten(1, 2)
            for i, layer in enumerate(convolutions):
                weight, bias = (torch.cat([getattr(m, name) for m in layer]) for name in ("weight", "bias"))
                x = F.relu(F.conv2d(x, weight, bias, padding=layer[0].padding, groups=seeds))
                x = F.max_pool2d(x, 2) if i < len(convolutions) - 1 else x
            x = x.unflatten(1, (seeds, -1)).transpose(0, 1)
        x = x.reshape(seeds, batch, -1)
        for i, layer in enumerate(linears):
            weight, bias = (torch.stack([getattr(m, name) for m in layer]) for name in ("weight", "bias"))
            x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
            x = F.gelu(x) if i < len(linears) - 1 else x
        return x


def optimizer_for(method: str, model: SideBySide, lr: float, momentum: float) -> torch.optim.Optimizer:
    """SGD, wrapped as the method says."""
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, foreach=True)
    layers = [*model.layers(nn.Conv2d), *model.layers(nn.Linear)]
    if method == "sgd":
        return sgd
    if method == "whitened-hidden":
        hidden = {m for layer in layers[:-1] for m in layer}
        return GramWhitened(sgd, model, layers=[name for name, m in model.named_modules() if m in hidden])
    return {"whitened": GramWhitened, "fixed": GramFixed, "published": Published}[method](sgd, model)


def train(run: dict[str, Any], seeds: list[int], args: argparse.Namespace) -> None:
    """Train all seeds of one run and append one record per seed and epoch to the output file."""
    x, y, test_x, test_y = load(run["dataset"], args.data_dir, args.device)
    model = SideBySide([build(run["net"], tuple(x.shape[1:]), seed) for seed in seeds]).to(args.device)
    optimizer = optimizer_for(run["method"], model, run["lr"], run["momentum"])
    generators = [torch.Generator(args.device).manual_seed(1000 + seed) for seed in seeds]
    begin = time.perf_counter()
    for epoch in range(1, run["epochs"] + 1):
        order = torch.stack([torch.randperm(len(x), generator=g, device=args.device) for g in generators])
        total = torch.zeros(len(seeds), device=args.device)
        batches = order.split(args.batch, 1)
        for batch in batches:
            logits = model(x[batch])
            loss = (
                F.cross_entropy(logits.flatten(0, 1), y[batch].flatten(), reduction="none").view(len(seeds), -1).mean(1)
            )
            optimizer.zero_grad()
            loss.sum().backward()  # the sum over seeds: each net sees the gradient of its own mean loss
            optimizer.step()
            total += loss.detach() / len(batches)
        accuracy = evaluate(model, test_x, test_y, len(seeds))
        layers = [*model.layers(nn.Conv2d), *model.layers(nn.Linear)]
        norms = [[float(m.weight.detach().norm()) for m in layer] for layer in layers]
        with args.out.open("a", encoding="utf-8") as file:
            for i, seed in enumerate(seeds):
                record = {
                    **run,
                    "seed": seed,
                    "epoch": epoch,
                    "test_accuracy": accuracy[i],
                    "train_loss": float(total[i]),
                    "weight_norms": [layer[i] for layer in norms],
                    "train_images": len(x),
                    "test_images": len(test_x),
                    "batch": args.batch,
                    "seconds": round(time.perf_counter() - begin, 1),
                    "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
                    "torch": torch.__version__,
                }
                file.write(json.dumps(record) + "\n")
        done = f"{time.perf_counter() - begin:.0f} s, {100 * sum(accuracy) / len(accuracy):.2f} %"
        print(f"{describe(run)}: epoch {epoch}/{run['epochs']}, {done}", file=sys.stderr, flush=True)


@torch.no_grad()
def evaluate(model: SideBySide, x: Tensor, y: Tensor, seeds: int) -> list[float]:
    """Test accuracy of every seed."""
    right = torch.zeros(seeds, device=x.device)
    for images, labels in zip(x.split(1000), y.split(1000), strict=True):
        right += (model(images.expand(seeds, *images.shape)).argmax(-1) == labels).sum(1)
    return [float(r) / len(x) for r in right]


# --- runs and records ----------------------------------------------------------------------------------------------------


def describe(run: dict[str, Any]) -> str:
    """A run in words."""
    return "{dataset} {net} {method} lr {lr} momentum {momentum}".format(**run)


def complete(path: Path) -> dict[tuple[Any, ...], dict[int, dict[str, Any]]]:
    """Records by run and seed, then epoch, of those that reached their last epoch; later records replace earlier ones."""
    records: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = defaultdict(dict)
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            records[key(record, record["seed"])][record["epoch"]] = record
    return {name: epochs for name, epochs in records.items() if len(epochs) == name[5]}


def key(run: dict[str, Any], seed: int) -> tuple[Any, ...]:
    """What identifies one seed of one run."""
    return (*(run[name] for name in ("dataset", "net", "method", "lr", "momentum", "epochs")), seed)


def summarise(path: Path) -> None:
    """One line a run: best and last accuracy (mean ± 2σ over seeds), and epochs until SGD's best mean is reached."""
    runs: dict[tuple[Any, ...], list[list[float]]] = defaultdict(list)
    sizes: dict[tuple[Any, ...], int] = {}
    for name, epochs in complete(path).items():
        runs[name[:-1]].append([epochs[e]["test_accuracy"] for e in sorted(epochs)])
        sizes[name[:-1]] = epochs[1]["train_images"]
    heads = "dataset   net  method           lr      seeds  images  epoch 1   epoch 5  best mean (epoch)"
    print(f"{heads}     last ± 2σ  SGD's best at")
    for name in sorted(runs):
        dataset, net, method, lr, momentum, epochs = name
        curves = np.array(runs[name])
        mean = curves.mean(0)
        plain = runs.get((dataset, net, "sgd", lr, momentum, epochs))
        goal = np.array(plain).mean(0).max() if plain else np.inf
        reached = next((f"epoch {e}" for e, m in enumerate(mean, start=1) if m >= goal), "never")
        print(
            f"{dataset:8}  {net:3}  {method:15}  {lr:<6}  {len(curves):5}  {sizes[name]:6}  {100 * mean[0]:6.2f}  "
            f"{100 * mean[min(4, len(mean) - 1)]:8.2f}  {100 * mean.max():8.2f} ({mean.argmax() + 1:2})  "
            f"{100 * mean[-1]:12.2f} ± {200 * curves[:, -1].std(ddof=1) if len(curves) > 1 else 0:.2f}  {reached:>14}"
        )


def main() -> None:
    """Read the arguments; train what is missing, or summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("whitening.jsonl"))
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar10"], choices=["mnist", "cifar10"])
    parser.add_argument("--nets", nargs="+", default=["mlp"], choices=["mlp", "cnn"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--lr", nargs="+", type=float, default=[0.01])
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at once, each in a process of its own")
    parser.add_argument("--summary", action="store_true", help="print a table of the output file and stop")
    args = parser.parse_args()
    if args.summary:
        return summarise(args.out)
    settings = itertools.product(args.datasets, args.nets, args.lr, args.methods)
    runs = [
        {"dataset": d, "net": n, "method": m, "lr": lr, "momentum": args.momentum, "epochs": args.epochs}
        for d, n, lr, m in settings
    ]
    finished = complete(args.out)
    waiting = [(run, [seed for seed in args.seeds if key(run, seed) not in finished]) for run in runs]
    waiting = [(run, seeds) for run, seeds in waiting if seeds]
    if args.jobs == 1 or len(waiting) == 1:
        for run, seeds in waiting:
            train(run, seeds, args)
        return None
    return train_in_processes(waiting, args)


def train_in_processes(waiting: list[tuple[dict[str, Any], list[int]]], args: argparse.Namespace) -> None:
    """Each run in a process of its own, ``--jobs`` at a time; the first failure is reported when all have ended."""
    active: list[subprocess.Popen[bytes]] = []
    failures = 0
    for run, seeds in waiting:
        while len(active) >= args.jobs:
            time.sleep(0.2)
            failures += sum(1 for process in active if process.poll())
            active = [process for process in active if process.poll() is None]
        command = [sys.executable, __file__, "--data-dir", args.data_dir, "--out", args.out, "--device", args.device]
        command += ["--datasets", run["dataset"], "--nets", run["net"], "--methods", run["method"], "--lr", run["lr"]]
        command += ["--momentum", run["momentum"], "--epochs", run["epochs"], "--batch", args.batch, "--seeds", *seeds]
        active.append(subprocess.Popen([str(part) for part in command]))
    failures += sum(1 for process in active if process.wait())
    if failures:
        raise SystemExit(f"{failures} of {len(waiting)} runs failed")


if __name__ == "__main__":
    main()
