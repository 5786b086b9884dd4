"""Does virtual covariance learning stay sound over a very long run? Memory and the bases of the recursion, step by step.

    python studies/long_run.py --steps 100000 --out studies/reliability/long_run.json

Every hundredth of the run prints the memory of the process and the largest entry of |UUᵀ − I| over all bases U. The net has
one layer for each form of the recursion: all directions kept in a basis that grows, all kept from the start, and fewer
directions kept than the layer has inputs.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.errors import RescueWarning
from gramscope.linalg.budget import trim_malloc

WIDTHS = (160, 24, 300, 16, 4)
BATCH = 8


@dataclass(frozen=True)
class Look:
    """What is seen after ``step`` steps.

    Attributes:
        resident: bytes of the process in memory.
        objects: Python objects that the garbage collector tracks.
        deviation: largest entry of |UUᵀ − I|, by layer.
        loss: of the last batch.
    """

    step: int
    resident: int
    objects: int
    deviation: dict[str, float]
    loss: float


def long_run(steps: int, looks: int = 100, seed: int = 0) -> Iterator[Look]:
    """Train a small net with VCL on labels that a random linear map of the inputs gives."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layers = [part for sizes in pairwise(WIDTHS) for part in (nn.Linear(*sizes), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    teacher = torch.randn(WIDTHS[0], WIDTHS[-1], generator=generator)
    optimizer = gs.VCL(model, gamma=0.01)
    for step in range(1, steps + 1):
        x = torch.randn(BATCH, WIDTHS[0], generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        if step % max(1, steps // looks) == 0:
            gc.collect()
            trim_malloc()  # what the C library keeps is no leak
            yield Look(step, _resident(), len(gc.get_objects()), _deviations(optimizer), float(loss.detach()))


def _deviations(optimizer: gs.VCL) -> dict[str, float]:
    bases = {name: state["basis"].double() for name, state in _states(optimizer).items()}
    return {name: float((U @ U.mT - torch.eye(len(U)).double()).abs().max()) for name, U in bases.items()}


def _states(optimizer: gs.VCL) -> dict[str, dict[str, torch.Tensor]]:
    names = {id(p): n for n, p in optimizer.model.named_parameters()}
    return {names[id(p)]: state for p, state in optimizer.state.items() if "basis" in state}


def _resident() -> int:
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def main() -> None:
    """Run, print a line for each look, and store all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", RescueWarning)
    began = time.perf_counter()
    found = []
    for look in long_run(arguments.steps, seed=arguments.seed):
        found.append(asdict(look))
        sizes = ", ".join(f"{name} {value:.1e}" for name, value in look.deviation.items())
        print(f"step {look.step}: {look.resident >> 20} MiB, {look.objects} objects, {sizes}", flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"seed": arguments.seed, "seconds": round(time.perf_counter() - began), "torch": torch.__version__}
        arguments.out.write_text(json.dumps({**facts, "looks": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
