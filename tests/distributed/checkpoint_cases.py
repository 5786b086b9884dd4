"""State dicts through torch's distributed checkpoint, and back at another number of processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from vcl_cases import EXACT, both, error, global_batches, network, train, weights

import gramscope as gs


def fewer() -> tuple[int, Any]:
    """Half of the processes and their group; this process may not be among them."""
    half = dist.get_world_size() // 2
    return half, dist.new_group(list(range(half)))


def shared(folder: Path, name: str) -> Path:
    """An empty folder of all processes."""
    path = folder / name
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    dist.barrier()
    return path


def case_vcl_comes_back_at_another_number_of_processes(folder: Path) -> None:
    path = shared(folder, "vcl")
    data = global_batches(4)
    _, _, model, optimizer = both([[batch] for batch in data[:2]], **EXACT)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    alone = both([[batch] for batch in data], **EXACT)[0]
    half, group = fewer()
    rank = dist.get_rank()
    if rank == 0:
        dcp_to_torch_save(path, path / "whole.pt")
    dist.barrier()
    if rank < half:
        state = torch.load(path / "whole.pt", weights_only=True)
        again = network()
        again.load_state_dict(state["model"])
        wrapped = DistributedDataParallel(again, process_group=group) if half > 1 else again
        resumed = gs.VCL(wrapped, process_group=group if half > 1 else False, **EXACT)
        resumed.load_state_dict(state["optimizer"])
        parts = [[(x.chunk(half)[rank], y.chunk(half)[rank])] for x, y in data[2:]]
        train(wrapped, resumed, parts)
        assert error(weights(again), weights(alone)) < 1e-10


def sharded(mesh: DeviceMesh) -> tuple[nn.Module, gs.GramWhitened]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    fully_shard(model, mesh=mesh)
    return model, gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)


def case_whitened_shards_come_back_at_another_number_of_processes(folder: Path) -> None:
    path = shared(folder, "whitened")
    size, rank = dist.get_world_size(), dist.get_rank()
    data = global_batches(4)
    model, optimizer = sharded(init_device_mesh("cpu", (size,)))

    def steps(model: nn.Module, optimizer: Any, batches: Any, count: int) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x.chunk(count)[rank]), y.chunk(count)[rank]).backward()
            optimizer.step()

    steps(model, optimizer, data[:2], size)
    weights_, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights_, "optimizer": state}, checkpoint_id=path)
    steps(model, optimizer, data[2:], size)
    expected = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    half, group = fewer()
    mesh = DeviceMesh.from_group(group, "cpu") if rank < half else None
    if mesh is not None:
        model, optimizer = sharded(mesh)
        weights_, state = get_state_dict(model, optimizer)
        loaded = {"model": weights_, "optimizer": state}
        dcp.load(loaded, checkpoint_id=path, process_group=group)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        steps(model, optimizer, data[2:], half)
        found = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
        assert error(found, expected) < 1e-10
