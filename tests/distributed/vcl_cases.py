"""gs.VCL under DistributedDataParallel against one process on the same global batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gramscope as gs
from gramscope.errors import LayerError, NumericalError

#: samples that a process has of every batch
SHARE = 6


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).to(dtype)


def global_batches(count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    n = SHARE * dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 7, generator=generator).to(dtype), torch.randint(3, (n,), generator=generator))
        for _ in range(count)
    ]


def mine(*tensors: Tensor) -> tuple[Tensor, ...]:
    """This process's part of every tensor."""
    rank = dist.get_rank()
    return tuple(tensor[rank * SHARE : (rank + 1) * SHARE] for tensor in tensors)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def assert_same_bits(tensor: Tensor) -> None:
    """All processes have this tensor, bit for bit."""
    first = tensor.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, tensor)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: list[list[tuple[Tensor, Tensor]]],
    between: Callable[[], object] = lambda: None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> None:
    """One step for each group of micro-batches; all but the last backward of a group under no_sync."""
    for group in groups:
        optimizer.zero_grad()
        for index, (x, y) in enumerate(group):
            waits = index + 1 == len(group) or not isinstance(model, DistributedDataParallel)
            with contextlib.nullcontext() if waits else model.no_sync():
                loss(model(x), y).backward()
        between()
        optimizer.step()


def both(
    groups: list[list[tuple[Tensor, Tensor]]],
    clip: float | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    local_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[nn.Module, gs.VCL, nn.Module, gs.VCL]:
    """One process on whole batches, and all processes on their parts."""
    alone, shared = network(dtype), network(dtype)
    one = gs.VCL(alone, process_group=False, **options)
    ddp = DistributedDataParallel(shared)
    several = gs.VCL(ddp, **options)

    def clipped(model: nn.Module) -> Callable[[], object]:
        return lambda: clip and nn.utils.clip_grad_norm_(model.parameters(), clip)

    train(alone, one, groups, clipped(alone), loss)
    train(ddp, several, [[mine(*batch) for batch in group] for group in groups], clipped(shared), local_loss or loss)
    assert_same_bits(weights(shared))
    return alone, one, shared, several


EXACT = {"gamma": 0.1, "solver": "exact", "readout": partial(torch.optim.SGD, lr=0.1)}


def case_exact_solver_equals_one_process(folder: Path) -> None:
    alone, _, shared, _ = both([[batch] for batch in global_batches(5)], **EXACT)
    assert error(weights(shared), weights(alone)) < 1e-10


def case_accumulation_with_and_without_no_sync(folder: Path) -> None:
    data = global_batches(6)
    groups = [data[:2], data[2:5], data[5:]]
    for form in ({"solver": "recursive"}, {}):
        alone, _, shared, _ = both(groups, clip=0.5, **{**EXACT, **form})
        assert error(weights(shared), weights(alone)) < 1e-10
    for bucket_view in (False, True):  # every backward pass averages
        model = network()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        optimizer = gs.VCL(ddp, **EXACT)
        for group in groups:
            optimizer.zero_grad()
            for batch in group:
                x, y = mine(*batch)
                F.cross_entropy(ddp(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert error(weights(model), weights(alone)) < 1e-10


def case_other_forms_of_the_algorithm(folder: Path) -> None:
    groups = [[batch] for batch in global_batches(4)]
    forms: list[dict[str, Any]] = [{}, {"rank": 9}, {"solver": "exact", "alpha": 0.5}]
    for form in forms:
        alone, _, shared, _ = both(groups, gamma=0.05, **form)
        assert error(weights(shared), weights(alone)) < 1e-10, form


def case_uneven_parts_of_a_summed_loss(folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    n = SHARE * size
    bounds = [0, *(1 + i for i in range(1, size)), n]  # 2, 1, …, and the rest
    alone, ddp = network(), DistributedDataParallel(network())
    one = gs.VCL(alone, reduction=float(n), process_group=False, **EXACT)
    several = gs.VCL(ddp, reduction=float(SHARE), **EXACT)
    for x, y in global_batches(3):
        train(alone, one, [[(x, y)]], loss=lambda f, t: F.cross_entropy(f, t, reduction="sum") / n)
        part = slice(bounds[rank], bounds[rank + 1])
        scaled = [[(x[part], y[part])]]
        train(ddp, several, scaled, loss=lambda f, t: F.cross_entropy(f, t, reduction="sum") / SHARE)
    assert_same_bits(weights(ddp.module))
    assert error(weights(ddp.module), weights(alone)) < 1e-10


def case_the_state_is_in_every_process(folder: Path) -> None:
    groups = [[batch] for batch in global_batches(2)]
    _, _, shared, several = both(groups, **EXACT)
    state = several.state_dict()
    for i in range(3):
        assert_same_bits(state["state"][i]["matrix"])
    again = network()
    again.load_state_dict(shared.state_dict())
    ddp = DistributedDataParallel(again)
    resumed = gs.VCL(ddp, **EXACT)
    resumed.load_state_dict(copy.deepcopy(state))
    train(ddp, resumed, [[mine(*batch)] for batch in global_batches(4)[2:]])
    straight = both([[batch] for batch in global_batches(4)], **EXACT)[2]
    # DistributedDataParallel adds in another order in the first steps after it was made
    assert error(weights(again), weights(straight)) < 1e-13


def case_errors_are_raised_by_every_process(folder: Path) -> None:
    (x, y), *_ = global_batches(1)
    x, y = mine(x, y)
    ddp = DistributedDataParallel(network())
    optimizer = gs.VCL(ddp, **EXACT)
    before = weights(ddp.module)
    F.cross_entropy(ddp(x), y).backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.grad.fill_(torch.nan)
    with pytest.raises(NumericalError, match="NaN"):
        optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(weights(ddp.module), before)
    with ddp.no_sync():
        F.cross_entropy(ddp(x), y).backward()
    with pytest.raises(LayerError, match="gradients of the processes differ"):
        optimizer.step()
    optimizer.zero_grad()
    size = 2 + dist.get_rank()
    F.cross_entropy(ddp(x[:size]), y[:size]).backward()
    with pytest.raises(LayerError, match="different sizes"):
        optimizer.step()
    assert torch.equal(weights(ddp.module), before)
    optimizer.close()


def case_a_readout_gradient_that_is_not_finite_in_one_process(folder: Path) -> None:
    """No process waits for the one that finds it, and none changes anything."""
    (x, y), *_ = global_batches(1)
    ddp = DistributedDataParallel(network())
    optimizer = gs.VCL(ddp, gamma=0.1)
    for bad in range(dist.get_world_size()):
        before = weights(ddp.module)
        optimizer.zero_grad()
        F.cross_entropy(ddp(mine(x)[0]), mine(y)[0]).backward()
        if dist.get_rank() == bad:
            ddp.module[-1].weight.grad[0, 0] = torch.nan
        where = "" if dist.get_rank() == bad else f"process {bad}: "
        with pytest.raises(NumericalError, match=rf"^{where}the gradient of 6\.weight has NaN"):
            optimizer.step()
        assert torch.equal(weights(ddp.module), before)
        train(ddp, optimizer, [[mine(x, y)]])
        assert_same_bits(weights(ddp.module))
    optimizer.zero_grad()
    with pytest.raises(LayerError, match="no gradient in any process"):
        optimizer.step()
    optimizer.close()


def case_model_of_its_own_in_every_process(folder: Path) -> None:
    """With process_group=False nothing is sent, so that processes may even take different numbers of steps."""
    model = network()
    optimizer = gs.VCL(model, process_group=False, **EXACT)
    train(model, optimizer, [[batch] for batch in global_batches(1 + dist.get_rank())])


def case_group(folder: Path) -> None:
    groups = [[batch] for batch in global_batches(2)]
    default = both(groups, **EXACT)[2]
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = gs.VCL(model, **EXACT, process_group=dist.group.WORLD)  # the model inside the wrapper
    train(ddp, optimizer, [[mine(*batch) for batch in group] for group in groups])
    assert torch.equal(weights(model), weights(default))


def case_fewer_samples_than_outputs(folder: Path) -> None:
    """The gradient of all samples has few rows; a changed gradient has full rank."""

    def noise(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.grad += 1e-3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    n = SHARE * dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    data = [
        [(torch.randn(n, 70, generator=generator).double(), torch.randint(3, (n,), generator=generator))]
        for _ in range(6)
    ]
    for changed in (False, True):
        found = []
        for size in (1, dist.get_world_size()):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(70, 32), nn.Tanh(), nn.Linear(32, 3)).double()
            wrapped = DistributedDataParallel(model) if size > 1 else model
            optimizer = gs.VCL(wrapped, 0.05, rank=36, process_group=None if size > 1 else False)
            batches = [[mine(*batch) for batch in group] for group in data] if size > 1 else data
            train(wrapped, optimizer, batches, partial(noise, model) if changed else lambda: None)
            found.append(weights(model))
        assert_same_bits(found[1])
        assert error(found[1], found[0]) < 1e-10
