"""gs.FreeMuon in several processes: the steps of one process, with the orthogonalisations divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checkpoint_cases import shared
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.parallel import DistributedDataParallel
from vcl_cases import assert_same_bits, error, global_batches, mine, network, train, weights

import gramscope as gs
from gramscope.errors import LayerError
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
