"""Models sharded over processes (FSDP2, DTensor): measures, whitened updates, and clear refusals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure_cases import assert_same_tables, data, divisions, mine, network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from vcl_cases import assert_same_bits, error

import gramscope as gs
from comparing import assert_same
from gramscope.errors import LayerError


def world() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=world())
    fully_shard(model, mesh=world())
    return model


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def case_measures_of_a_model_sharded_by_fsdp2(folder: Path) -> None:
    alone, model = network(), sharded(network())
    before = whole(model)
    table = gs.measure(alone, data(), F.cross_entropy, process_group=False)
    everything = gs.collect(alone, data(), F.cross_entropy, jacobians=True, process_group=False)
    for division in divisions():
        assert_same_tables(gs.measure(model, mine(division), F.cross_entropy), table)
        found = gs.collect(model, mine(division), F.cross_entropy, jacobians=True)
        assert found.processes == dist.get_world_size()
        for layer in found:
            torch.testing.assert_close(layer.D, everything[layer.name].D, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(layer.K, everything[layer.name].K, rtol=1e-10, atol=1e-10)
    assert_same(gs.collect(model, data(), F.cross_entropy, jacobians=True, process_group=False), everything, 1e-10)
    monitor = gs.Monitor(model, data(), F.cross_entropy, measures=["nfa"])
    # the model is sharded as before and still trains
    assert torch.equal(whole(model), before)
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(whole(model), before)
    assert monitor.record()["layers"]["0"]["nfa"] is not None


def case_measures_of_a_tensor_parallel_model(folder: Path) -> None:
    def two_layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    model = parallelize_module(two_layers(), world(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    table = gs.measure(two_layers(), data(), F.cross_entropy, process_group=False)
    assert_same_tables(gs.measure(model, data(), F.cross_entropy, process_group=False), table)


SHAPES = {"wide": (6, 10), "square": (7, 7), "tall": (11, 5), "few rows": (1, 9)}


def case_whitened_updates_of_shards(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        for kind in (gs.GramWhitened, gs.GramFixed):
            for axis in (0, 1):
                values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]
                gradients = [[torch.randn(v.shape, generator=generator).to(dtype) for v in values] for _ in range(3)]
                plain = [nn.Parameter(v.clone()) for v in values]
                placed = [nn.Parameter(distribute_tensor(v, world(), [Shard(axis)])) for v in values]
                one = kind(torch.optim.SGD(plain, lr=0.02, momentum=0.9), method="svd")
                several = kind(torch.optim.SGD(placed, lr=0.02, momentum=0.9), method="svd")
                for step in gradients:
                    for p, q, g in zip(plain, placed, step, strict=True):
                        p.grad, q.grad = g.clone(), distribute_tensor(g, world(), [Shard(axis)])
                    one.step()
                    several.step()
                for p, q in zip(plain, placed, strict=True):
                    full = q.full_tensor().detach()
                    assert_same_bits(full)
                    assert error(full, p.detach()) < tolerance, (dtype, kind, axis, tuple(p.shape))


def case_whitened_training_with_fsdp2(folder: Path) -> None:
    alone, model = network().eval(), sharded(network().eval())
    one = gs.GramWhitened(torch.optim.AdamW(alone.parameters(), lr=0.01), alone)
    several = gs.GramWhitened(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    assert "0.weight" in several.summary()
    x, y = data()
    size = dist.get_world_size()
    rows = torch.arange(20).tensor_split(size)[dist.get_rank()]
    for _ in range(4):
        for optimizer, net, part in ((one, alone, torch.arange(20)), (several, model, rows)):
            optimizer.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    found, expected = whole(model), torch.cat([p.detach().flatten() for p in alone.parameters()])
    assert_same_bits(found)
    assert error(found, expected) < 1e-8  # AdamW divides by roots of squares, which enlarges rounding
    with pytest.raises(LayerError, match="no layer.*sharded over processes: use DistributedDataParallel"):
        gs.VCL(model)


def case_gradients_that_are_not_finite_in_one_process(folder: Path) -> None:
    from gramscope.errors import NumericalError

    model = sharded(network().eval())
    optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    before = whole(model)
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local().fill_(torch.nan)
    with pytest.raises(NumericalError, match="0.weight"):
        optimizer.step()
    assert torch.equal(whole(model), before)


def case_the_first_fsdp_is_refused(folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (
        lambda: gs.measure(model, data(), F.cross_entropy),
        lambda: gs.collect(model, data(), F.cross_entropy),
        lambda: gs.agop(model, data()[0]),
        lambda: gs.VCL(model),
        lambda: gs.GramWhitened(optimizer, model),
    ):
        with pytest.raises(LayerError, match=r"FSDP1.*fully_shard \(FSDP2\)"):
            call()
