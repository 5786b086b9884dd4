"""Measurements of data that is divided among processes against one process with all data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gramscope as gs
from comparing import assert_same
from gramscope.distributed import exchange
from gramscope.errors import InputError, NumericalError, ResultWarning
from routed_experts import OPTIONS, routed

N = 23


def network() -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(5)
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
    return model


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator, dtype=torch.float64), torch.randint(3, (N,), generator=generator)


def divisions() -> list[list[Tensor]]:
    """Ways to divide the samples: nearly even, uneven, and with processes that have none."""
    size = dist.get_world_size()
    even = list(torch.arange(N).chunk(size))
    uneven = [
        torch.arange(1),
        torch.arange(1, N - size + 2),
        *(torch.tensor([N - size + 1 + i]) for i in range(1, size - 1)),
    ]
    empty = [torch.arange(0)] * (size - 1) + [torch.arange(N)]
    return [even, uneven, empty]


def parts(rows: Tensor, batch: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Rows as batches of unequal numbers; none where there are no rows."""
    x, y = data()
    return [(x[part], y[part]) for part in rows.split(batch)] if len(rows) else []


def mine(division: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return parts(division[dist.get_rank()])


def assert_same_tables(a: Any, b: Any) -> None:
    assert list(a) == list(b)
    assert a.columns == b.columns
    for layer in a:
        for name in a.columns:
            left, right = a[layer][name], b[layer][name]
            assert (left is None) == (right is None), (layer, name, left, right)
            if left is not None:
                # the power is where a smooth function is largest, which rounding leaves uncertain by its root
                tolerance = 1e-7 if name == "nfa_power" else 1e-10
                assert abs(left - right) <= tolerance * max(1, abs(right)), (layer, name, left, right)
    for name, value in b.network.items():
        assert abs(a.network[name] - value) <= 1e-10 * max(1, abs(value)), name


def case_collect(folder: Path) -> None:
    reference = network()
    options: dict[str, Any] = {"jacobians": True, "residuals": True, "autograd": True, "outputs": ["1"]}
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    whole = gs.collect(model, data(), F.cross_entropy, reference=reference, process_group=False, **options)
    assert whole.processes == 1
    for division in divisions():
        found = gs.collect(model, mine(division), F.cross_entropy, reference=reference, **options)
        assert found.processes == dist.get_world_size()
        assert_same(_one(found), whole, 1e-10)
        assert found.all_reduce() is found
        own = gs.collect(model, parts(torch.arange(2)), F.cross_entropy, process_group=False)
        assert own.n == 2
        assert own.all_reduce().n == 2 * dist.get_world_size()


def _one(statistics: Any) -> Any:
    return replace(statistics, processes=1)


def case_experts_that_some_processes_do_not_see(folder: Path) -> None:
    model, x, y = routed()
    whole = gs.collect(model, (x, y), F.cross_entropy, process_group=False, **OPTIONS)
    parts = x.tensor_split(dist.get_world_size()), y.tensor_split(dist.get_world_size())
    own = parts[0][dist.get_rank()], parts[1][dist.get_rank()]
    assert_same(_one(gs.collect(model, own, F.cross_entropy, **OPTIONS)), whole, 1e-10)


def case_real_targets_and_kept_rows(folder: Path) -> None:
    """Moments of real targets add up; rows of wide layers are sent and merged until they are too many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(0)
    for n in (N, 700):
        x, y = (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (600, 2))
        options: dict[str, Any] = {"outputs": ["1"], "residuals": True}
        whole = gs.collect(model, (x, y), F.mse_loss, process_group=False, **options)
        assert (whole["0"].features.rows is not None) == (n == N)
        parts = (t[:1] if dist.get_rank() == 0 else t[1:] for t in (x, y))
        own = tuple(parts) if dist.get_rank() < 2 else (x[:0], y[:0])
        assert_same(_one(gs.collect(model, own, F.mse_loss, **options)), whole, 1e-10)


def case_measure(folder: Path) -> None:
    model, reference = DistributedDataParallel(network()), network()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    held = data()[0].flip(0), data()[1]
    given: dict[str, Any] = {"measures": "all", "reference": reference, "weight_decay": 0.1}
    whole = gs.measure(model, data(), F.cross_entropy, held_out=held, process_group=False, **given)
    assert "nc4" in whole.columns
    for division in divisions():
        rows = division[dist.get_rank()]
        held_out = [(held[0][rows], held[1][rows])] if len(rows) else []
        assert_same_tables(gs.measure(model, mine(division), F.cross_entropy, held_out=held_out, **given), whole)


def case_kernels(folder: Path) -> None:
    model, (x, _) = network(), data()
    agop = gs.agop(model, x, process_group=False)
    kernels = gs.tangent_kernel(model, x, reference=network(), process_group=False)
    for division in divisions():
        rows = division[dist.get_rank()]
        for name, found in gs.agop(model, x[rows]).items():
            torch.testing.assert_close(found, agop[name], rtol=1e-10, atol=1e-10)
        for name, pair in gs.tangent_kernel(model, x[rows], reference=network()).items():
            torch.testing.assert_close(pair.K, kernels[name].K, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(pair.K_centered, kernels[name].K_centered, rtol=1e-10, atol=1e-10)


def case_cka(folder: Path) -> None:
    """The batches of all processes as those of one; too small ones, and processes with none."""
    model, other = (
        DistributedDataParallel(network()),
        nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2)).double(),
    )
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype))
    for division in divisions():
        own = parts(division[dist.get_rank()], 6)
        everything = [batch for rows in division for batch in parts(rows, 6)]
        for against in (None, other):
            whole = gs.cka(model, everything, against, process_group=False)
            found = gs.cka(model, own, against)
            assert (found.rows, found.columns, found.samples) == (whole.rows, whole.columns, whole.samples)
            torch.testing.assert_close(found.values, whole.values, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="no batch"):
        gs.cka(model, [])
    with pytest.raises(InputError, match="at least 4 samples"):
        gs.cka(model, parts(torch.arange(2)))
    kept = ["0"] if dist.get_rank() == 0 else ["0", "3"]
    with pytest.raises(InputError, match="different layers"):
        gs.cka(model, data(), layers=kept)


def case_large_layers(folder: Path) -> None:
    """Products with probes add up."""
    torch.manual_seed(0)
    model, reference = (
        nn.Sequential(nn.Linear(4200, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 3)).double()
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4200, generator=generator, dtype=torch.float64), torch.arange(40) % 3
    estimated = [
        "nfa", "nfa_null", "nfa_double", "double_ratio", "kernel_spread", "vcs_cosine", "vcs_null", "fact",
        "crh_inputs_gw",
    ]  # fmt: skip
    names = [*estimated, "fle_residual", "weight_norm", "nc2_equinorm"]
    given: dict[str, Any] = {"measures": names, "reference": reference, "memory": 2**12}
    whole = gs.measure(model, (x, y), F.cross_entropy, process_group=False, **given)
    assert set(whole.errors["0"]) == set(estimated)
    assert not [name for name in names if whole["0"][name] is None]
    for rows in (torch.arange(40).tensor_split(dist.get_world_size()), [torch.arange(40)] + [torch.arange(0)] * 3):
        own = rows[dist.get_rank()]
        part = [(x[own], y[own])] if len(own) else []
        assert_same_tables(gs.measure(model, part, F.cross_entropy, **given), whole)


class Writer:
    """A TensorBoard writer, of process 0 alone."""

    def __init__(self) -> None:
        self.tags: set[str] = set()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.tags.add(tag)

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> None:
        self.tags.add(tag)

    def add_image(self, tag: str, img_tensor: Tensor, global_step: int) -> None:
        self.tags.add(tag)


def case_monitor_with_a_log_in_one_process(folder: Path) -> None:
    log = Writer() if dist.get_rank() == 0 else None
    names = ["nfa", "target_linearity", "weight_norm", "nc1", "nfa_centered"]
    for division in divisions():
        torch.manual_seed(0)
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = data()
        options: dict[str, Any] = {"measures": names, "every": 2}
        monitor = gs.Monitor(model, mine(division), F.cross_entropy, log=log, **options)
        alone = gs.Monitor(model, (x, y), F.cross_entropy, process_group=False, **options)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
            alone.step()
        assert [record["step"] for record in monitor.records] == [0, 2, 4]
        for a, b in zip(monitor.records, alone.records, strict=True):
            assert a["network"]["samples"] == N
            for layer, row in b["layers"].items():
                for name, value in row.items():
                    found = a["layers"][layer][name]
                    assert (found is None) == (value is None)
                    assert value is None or abs(found - value) <= 1e-10 * max(1, abs(value)), (layer, name)
    assert log is None or "gramscope/weight_norm/0" in log.tags


def case_one_process_alone(folder: Path) -> None:
    model, (x, y) = DistributedDataParallel(network()), data()
    if dist.get_rank() == 0:
        gs.measure(model, (x, y), F.cross_entropy, process_group=False)
    F.cross_entropy(model(x), y).backward()
    assert gs.collect(model, (x, y), F.cross_entropy).n == N * dist.get_world_size()


def case_a_process_that_waits_says_for_which(folder: Path) -> None:
    processes, rank, last = exchange.Exchange(dist.group.WORLD), dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        dist.barrier()  # after the warnings of the others
        processes.wait_for_all()
        return
    patience, exchange.PATIENCE = exchange.PATIENCE, 0.0
    with pytest.warns(ResultWarning, match=rf"process {rank} has waited 0 s for processes .*{last}\]"):
        processes.wait_for_all()
    exchange.PATIENCE = patience
    dist.barrier()


def case_an_error_in_one_process_ends_all(folder: Path) -> None:
    model, (x, y) = network(), data()
    last = dist.get_world_size() - 1
    x = x * torch.nan if dist.get_rank() == last else x
    with pytest.raises(NumericalError, match="NaN" if dist.get_rank() == last else f"process {last}: .*NaN"):
        gs.measure(model, (x, y), F.cross_entropy)
    with pytest.raises(InputError, match="different options"):
        gs.collect(model, data(), F.cross_entropy, features=dist.get_rank() == 0)
    with pytest.raises(InputError, match="all processes yielded no batch"):
        gs.collect(model, [], F.cross_entropy)

    class Strange(Exception):
        """An error that cannot be sent to other processes."""

    def failing() -> Any:
        yield data()
        raise Strange("the disk is gone")

    with pytest.raises(Strange if dist.get_rank() == last else RuntimeError, match="the disk is gone"):
        gs.collect(model, failing() if dist.get_rank() == last else data(), F.cross_entropy)
    names = ["nc1", "nc4"] if dist.get_rank() == last else ["nc1"]
    with pytest.raises(InputError, match="measure different things"):
        gs.measure(model, data(), F.cross_entropy, measures=names)
    once = iter([data()]) if dist.get_rank() == last else data()
    table = gs.measure(model, once, F.cross_entropy, measures=["nc1", "nc4"])
    assert "can be read once" in table.notes["5.nc4"].text
    other = network()
    with torch.no_grad():
        other[0].weight += dist.get_rank()
    with pytest.raises(InputError, match="different weights"):
        gs.collect(other, data(), F.cross_entropy)


def case_group_and_mesh(folder: Path) -> None:
    model, size = network(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    own = pairs[dist.get_rank() // 2]
    assert gs.collect(model, data(), F.cross_entropy, process_group=own).n == 2 * N
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("a", "b"))
    assert gs.measure(model, data(), F.cross_entropy, process_group=mesh["b"].get_group()).network["samples"] == 2 * N
    with pytest.raises(InputError, match="get_group"):
        gs.collect(model, data(), F.cross_entropy, process_group=mesh)
