"""The numbers that processes send and keep, against the formulas of docs/scale.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from vcl_cases import global_batches, mine, train

import gramscope as gs
from gramscope.distributed.exchange import Exchange, find_exchange
from gramscope.linalg.budget import Budget
from gramscope.linalg.psd import SymmetricSum
from gramscope.statistics.collect import collect_planned
from gramscope.statistics.features import Features
from gramscope.statistics.matrix_sums import Covariance, Gradient, Kernel
from gramscope.statistics.sums import Plan, Sum

#: operations of one tensor
PLAIN = ("add", "largest", "add_on", "send_from", "gather_on", "scatter_from")


def numbers_in(value: Any) -> int:
    """Entries of all tensors in an object."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(numbers_in, value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(numbers_in(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, Sum | SymmetricSum):
        return sum(map(numbers_in, vars(value).values()))
    return sum(map(numbers_in, value)) if isinstance(value, list | tuple) else 0


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the entries of the tensors that this process hands to each operation."""
    total: Counter[str] = Counter()
    before = {name: getattr(Exchange, name) for name in (*PLAIN, "object_from", "gather_objects", "merged")}

    def counting(name: str) -> Any:
        def call(self: Exchange, *args: Any) -> Any:
            given = args[0] if name == "merged" else args[1] if name in ("gather_on", "scatter_from") else args[-1]
            total[name] += numbers_in(given)
            return before[name](self, *args)

        return call

    try:
        for name in before:
            setattr(Exchange, name, counting(name))
        yield total
    finally:
        for name, method in before.items():
            setattr(Exchange, name, method)


SIZES = (7, 9, 8, 3)


def network() -> nn.Module:
    layers = [nn.Linear(d, k, bias=False) for d, k in pairwise(SIZES)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


def shapes(trained: int) -> list[tuple[int, int]]:
    return [(k, d) for d, k in pairwise(SIZES)][:trained]


def case_vcl_step(folder: Path) -> None:
    ddp = DistributedDataParallel(network())
    optimizer = gs.VCL(ddp, 0.1, solver="exact")
    with counted() as sent:
        train(ddp, optimizer, [[mine(*batch)] for batch in global_batches(1)])
    layers = shapes(2)
    assert sent["add"] == sum(2 * k + k * k for k, _ in layers)
    assert sent["send_from"] == sum(k * d for k, d in layers)
    assert sent["largest"] == 5 * len(layers) + 2
    assert not sent["add_on"] + sent["object_from"] + sent["gather_objects"]


def case_vcl_state(folder: Path) -> None:
    torch.manual_seed(0)
    k, d, rank = 5, 40, 9
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(d, k, bias=False), nn.Tanh(), nn.Linear(k, 3)))
    for solver in ("exact", "recursive"):
        optimizer = gs.VCL(ddp, 0.01, solver=solver, rank=rank)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(ddp(torch.randn(6, d)), torch.arange(6) % 3).backward()
            optimizer.step()
        p = min(k, d)
        kept = numbers_in(dict(optimizer.state[ddp.module[0].weight]))
        assert kept == (d * d if solver == "exact" else rank * d + rank**2 + k * p + k * d)
        optimizer.close()


def case_whitened_step(folder: Path) -> None:
    ddp = DistributedDataParallel(network())
    optimizer = gs.GramWhitened(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    with counted() as sent:
        train(ddp, optimizer, [[mine(*batch)] for batch in global_batches(1)])
    layers = shapes(3)
    assert sent["send_from"] == sum(k * d for k, d in layers)
    assert sent["largest"] == 2
    size, (k, d) = dist.get_world_size(), (6, 10)
    mesh = init_device_mesh("cpu", (size,))
    for axis in (0, 1):
        values, gradient = torch.randn(k, d), torch.randn(k, d)
        parameter = nn.Parameter(distribute_tensor(values, mesh, [Shard(axis)]))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(axis)])
        optimizer = gs.GramWhitened(torch.optim.SGD([parameter], lr=0.01))
        with counted() as sent:
            optimizer.step()
        part = -(-(k, d)[axis] // size) * (d, k)[axis]
        assert sent == {"largest": 2, "gather_on": 2 * part, "scatter_from": part}


def case_measurement(folder: Path) -> None:
    model, c = network(), 3
    x, y = mine(*global_batches(1)[0])
    with counted() as sent:
        gs.collect(model, (x, y), F.cross_entropy, jacobians=True)
    layers = shapes(3)
    sums = sum(k * d + 2 * k * k for k, d in layers)  # D, Σ and JᵀJ
    moments = sum(d * d + c * d + c * c + d + c for _, d in layers)
    of_output = 3 * c * c + 2 * c
    assert sent["merged"] == sums + moments + of_output
    assert not sent["send_from"] + sent["add"] + sent["gather_objects"]


def case_large_layer_and_cka(folder: Path) -> None:
    k, d, r, c = 70, 4200, 64, 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d, k, bias=False), nn.Tanh(), nn.Linear(k, c, bias=False)).double()
    x, y = torch.randn(6, d, dtype=torch.float64), torch.arange(6) % c
    options: dict[str, Any] = {"layers": ["0"], "budget": Budget(2**12)}
    with counted() as sent:
        plan = Plan((Gradient, Covariance, Kernel, Features), jacobians=True, estimates=True, **options)
        collect_planned(model, (x, y), F.cross_entropy, plan, None, find_exchange(), progress=False)
    of_output = 3 * c * c + 2 * c
    assert sent["merged"] == k * d + k * (r + 1) + k * (r + 65) + c * d + c * c + d + c + of_output
    with counted() as sent:
        gs.cka(model, x)
    assert sent["merged"] == 2 * 2 + 2 + 2
