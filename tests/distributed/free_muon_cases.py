"""gs.FreeMuon in several processes: the steps of one process, with the orthogonalisations divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checkpoint_cases import fewer, shared
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from vcl_cases import assert_same_bits, error, global_batches, mine, network, train, weights

import gramscope as gs
from gramscope.errors import LayerError, NumericalError
from gramscope.optim import directions


def case_free_muon_equals_one_process(folder: Path) -> None:
    """Also from a state that one process saves alone, and each process orthogonalises some of the matrices."""
    model, alone = network(), network()
    parallel = DistributedDataParallel(model)
    optimizer, mirror = gs.FreeMuon(parallel), gs.FreeMuon(alone, process_group=False)
    counts = {"own": 0}
    whole = directions.orthogonalise_

    def counted(D: torch.Tensor) -> torch.Tensor:
        counts["own"] += len(D)
        return whole(D)

    batches = global_batches(12)
    directions.orthogonalise_ = counted  # type: ignore[assignment]
    try:
        train(parallel, optimizer, [[mine(*batch)] for batch in batches[:6]])  # type: ignore[misc]
    finally:
        directions.orthogonalise_ = whole
    train(alone, mirror, [[batch] for batch in batches[:6]])
    total = torch.tensor(float(counts["own"]))
    dist.all_reduce(total)
    assert total == 6 * 3
    assert_same_bits(weights(model))
    state: dict[str, Any] = {}
    if dist.get_rank() == 0:  # not collective
        state = {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}
        again = network()
        again.load_state_dict({name.removeprefix("module."): value for name, value in state["model"].items()})
        resumed = gs.FreeMuon(again, process_group=False)
        resumed.load_state_dict(state["optimizer"])
        train(again, resumed, [[batch] for batch in batches[6:]])
    train(parallel, optimizer, [[mine(*batch)] for batch in batches[6:]])  # type: ignore[misc]
    train(alone, mirror, [[batch] for batch in batches[6:]])
    assert error(weights(model), weights(alone)) < 1e-8
    if dist.get_rank() == 0:
        assert error(weights(again), weights(alone)) < 1e-8


def case_free_muon_comes_back_at_another_number_of_processes(folder: Path) -> None:
    path = shared(folder, "free")
    batches = global_batches(8)
    parallel, alone = DistributedDataParallel(network()), network()
    optimizer, mirror = gs.FreeMuon(parallel), gs.FreeMuon(alone, process_group=False)
    train(parallel, optimizer, [[mine(*batch)] for batch in batches[:4]])  # type: ignore[misc]
    train(alone, mirror, [[batch] for batch in batches])
    dcp.save({"model": parallel.module.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    if dist.get_rank() == 0:
        dcp_to_torch_save(path, path / "whole.pt")
        state = torch.load(path / "whole.pt", weights_only=True)
        again = network()
        again.load_state_dict(state["model"])
        resumed = gs.FreeMuon(again, process_group=False)
        resumed.load_state_dict(state["optimizer"])
        train(again, resumed, [[batch] for batch in batches[4:]])
        assert error(weights(again), weights(alone)) < 1e-8


def case_free_muon_compares_gradients(folder: Path) -> None:
    """Without DistributedDataParallel processes would train different models."""
    (batch,) = global_batches(1)
    for group in (None, False):
        model = network()
        optimizer = gs.FreeMuon(model, process_group=group)  # type: ignore[arg-type]
        x, y = mine(*batch)
        F.cross_entropy(model(x), y).backward()
        if group is None:
            with pytest.raises(LayerError, match=r"gradients of the processes differ.*process_group=False"):
                optimizer.step()
        else:
            optimizer.step()


class Net(nn.Module):
    """Matrices that are wide, square and tall, one of few rows and one of several parts of its input, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.body = nn.Sequential(
            nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 1), nn.GELU(), nn.Linear(1, 5)
        )
        self.filters, self.head = nn.Conv1d(1, 3, 2), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.norm(self.words((4 * x).long().clamp(-5, 5) + 5).mean(1)))
        result: torch.Tensor = self.head(self.filters(h.unsqueeze(1)).flatten(1))
        return result


def sharded(mesh: DeviceMesh) -> tuple[nn.Module, gs.FreeMuon]:
    torch.manual_seed(0)
    model = Net().double()
    for layer in (model.body, model.words):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, gs.FreeMuon(model)


def case_free_muon_trains_shards_and_comes_back_at_another_number_of_processes(folder: Path) -> None:
    path, data = shared(folder, "free shards"), global_batches(16)
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    alone = Net().double()
    mirror = gs.FreeMuon(alone, process_group=False)

    def steps(model: nn.Module, optimizer: Any, batches: Any, count: int = 1, rank: int = 0) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x.chunk(count)[rank]), y.chunk(count)[rank]).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(x)  # leaves weights gathered
            model.train()

    def same(model: nn.Module) -> None:
        whole = torch.cat([p.full_tensor().flatten() for p in model.state_dict().values()])
        assert error(whole, weights(alone)) < 1e-9

    model, optimizer = sharded(init_device_mesh("cpu", (size,)))
    assert optimizer.param_groups[0]["matrices"] == mirror.param_groups[0]["matrices"]
    steps(model, optimizer, data[:8], size, rank)
    steps(alone, mirror, data[:8])
    same(model)
    model(data[0][0])  # to the newest weights
    state = get_state_dict(model, optimizer)
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=path)
    steps(model, optimizer, data[8:], size, rank)
    steps(alone, mirror, data[8:])
    same(model)
    half, group = fewer()
    if rank < half:
        model, optimizer = sharded(DeviceMesh.from_group(group, "cpu"))
        state = get_state_dict(model, optimizer)
        loaded = {"model": state[0], "optimizer": state[1]}
        dcp.load(loaded, checkpoint_id=path, process_group=group)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        steps(model, optimizer, data[8:], half, rank)
        same(model)


def case_free_muon_names_a_gradient_of_shards_that_is_not_finite_in_every_process(folder: Path) -> None:
    model, optimizer = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    x, y = global_batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    if dist.get_rank() == 0:
        model.get_parameter("words.weight").grad.to_local()[0, 0] = torch.nan
    with pytest.raises(NumericalError, match=r"words\.weight has NaN"):
        optimizer.step()
