"""Members in processes and on a Ray cluster of two nodes: the bits of one process, also when a process or a node dies."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gramscope.errors import GramscopeError
from gramscope_lab.data import DataSet
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import STOP
from gramscope_lab.training import job, sweep
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import build_model, load_data
from gramscope_lab.training.reporter import Interrupted
from gramscope_lab.training.train import Parallel, resume_run, train
from lab.training.helpers import Config, Notes, weights, without_time
from refusals import assert_refused


class Events(Notes):
    """Keeps what was told, and calls ``act`` with its name once a member, or so many, have trained an epoch."""

    def __init__(self, act: Callable[[str], object], members: int = 1) -> None:
        super().__init__()
        self._act, self._members, self._seen = act, members, set[str]()

    def records(self, records: Any, label: str = "") -> None:
        if records[0]["step"] and len(self._seen) < self._members:
            self._seen.add(label)
            if len(self._seen) == self._members:
                self._act(label)


def kill(out: Path, name: str) -> None:
    """Kill the process that trains a member."""
    os.kill(RunDirectory(out).member(name).lock.holder()["pid"], signal.SIGKILL)


@pytest.fixture
def gated(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Three epochs of four steps; training waits in the second one until the file ``gate`` is there, or the request to stop."""
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.05)
    gates = [str(tmp_path / "gate"), str(tmp_path / "run" / STOP)]
    return config(
        "adamw",
        data={"name": "digits", "samples": 64},
        model={"name": "lab.training.gated:build", "gates": gates, "parent": os.getpid()},
        seeds=[0, 1],
        checkpoint_every=1,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spark",), "--parallel spark: use auto, stack, a number of processes, ray or ray:ADDRESS"),
        (("0",), "--parallel 0"),
        (("2", 0.5), "is for a Ray cluster"),
        (("ray", 1.5), "--gpus 1.5: give a share between 0 and 1, or whole GPUs"),
        (("ray", 0.0), "--gpus 0"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    assert_refused(message, Parallel, *arguments)


def test_objects_cannot_be_sent_to_processes(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    settings = config(seeds=[0, 1])
    assert_refused("cannot be sent", train, settings, tmp_path / "x", data=blobs, parallel="2")
    assert_refused("a run directory is needed", train, settings, parallel="2")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_process_is_replaced(tmp_path: Path, gated: TrainConfig) -> None:
    def act(name: str) -> None:
        kill(tmp_path / "run", name)
        (tmp_path / "gate").touch()

    reporter = Events(act)
    found = train(gated, tmp_path / "run", reporter=reporter, parallel="2")
    whole = train(gated, parallel="1")
    assert reporter.notes[0] == "2 runs in processes, as asked"
    assert reporter.notes[1:] == ["a process died; its runs start again from their last checkpoints"]
    assert torch.equal(weights(found), weights(whole))
    assert without_time(found.records) == without_time(whole.records)


@pytest.mark.slow
def test_an_interrupt_saves_all_and_a_failure_names_its_member(tmp_path: Path, gated: TrainConfig) -> None:
    interrupt = Events(lambda name: signal.raise_signal(signal.SIGINT), 2)
    with pytest.raises(Interrupted, match="stopped and saved; continue with: gramscope train --resume"):
        train(gated, tmp_path / "run", reporter=interrupt, parallel="2")
    assert RunDirectory.open(tmp_path / "run").status() == "stopped"
    assert not (tmp_path / "run" / STOP).exists()
    (tmp_path / "gate").touch()
    (tmp_path / "run" / "seed-1" / "records.jsonl").write_text("{}\n{}\n")
    with pytest.raises(GramscopeError, match="seed-1: .*records"):
        resume_run(tmp_path / "run", parallel="2", trust=True)


def test_it_is_given_up_without_new_checkpoints(tmp_path: Path, config: Config) -> None:
    class Dying(sweep.Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            future: sweep.Future[str] = sweep.Future()
            future.set_exception(sweep.BrokenExecutor())
            return future

    notes = Notes()
    tasks = [sweep.MemberTask("a", config(), tmp_path / "a", {})]
    with pytest.raises(GramscopeError, match="a: its process died 4 times without a new checkpoint"):
        sweep.run_members(tasks, Dying, notes)
    assert len(notes.notes) == 3


def test_a_sweep_needs_one_net_in_the_parent_and_loads_data_once_a_worker(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("vcl", sweep={"method.gamma": [0.1 * i for i in range(1, 21)]}, epochs=1)
    nets: list[weakref.ref[torch.nn.Module]] = []
    loaded: list[str] = []

    def counted(*arguments: Any) -> torch.nn.Module:
        gc.collect()
        assert [net for net in nets if net() is not None] == []
        net = build_model(*arguments)
        nets.append(weakref.ref(net))
        return net

    def noted(table: Any, dtype: torch.dtype | None = None) -> DataSet:
        loaded.append(table.name)
        return load_data(table, dtype)

    monkeypatch.setattr(job, "build_model", counted)
    monkeypatch.setattr(job, "load_data", noted)
    tasks: list[sweep.MemberTask] = []
    monkeypatch.setattr(sweep, "run_members", lambda found, executor, reporter: tasks.extend(found))
    train(settings, tmp_path / "run", parallel="2")
    assert (len(tasks), loaded) == (20, ["digits"])
    nets.clear()
    sweep._preparer.cache_clear()
    threads = torch.get_num_threads()
    try:  # what a worker does, here
        assert [sweep.train_member(task) for task in tasks[:3]] == ["finished"] * 3
    finally:
        torch.set_num_threads(threads)
    assert (len(nets), loaded) == (3, ["digits"] * 2)


# -- Ray ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each; the second can be taken away."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # a dead node is noticed soon, while a slow one has 10 s to answer; workers get as much of a loaded machine as others
    settings = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "worker_niceness": 0}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import the gated net
        made = Cluster(initialize_head=True, head_node_args=head)
        made.add_node(num_cpus=1)
        yield made
        ray.shutdown()
        made.shutdown()


ray_test = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray"), pytest.mark.xdist_group("ray")]


@pytest.mark.parametrize("fault", [pytest.param(name, marks=ray_test) for name in ("driver", "node")])
def test_faults_on_a_cluster_change_no_bit(tmp_path: Path, gated: TrainConfig, cluster: Any, fault: str) -> None:
    parallel, out, gate = Parallel(f"ray:{cluster.address}"), tmp_path / "run", tmp_path / "gate"

    def lose_a_node(name: str) -> None:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        gate.touch()

    if fault == "driver":
        with pytest.raises(Interrupted, match="stopped and saved"):
            train(gated, out, parallel=parallel, reporter=Events(lambda name: signal.raise_signal(signal.SIGINT)))
        assert RunDirectory.open(out).status() == "stopped"
        gate.touch()
        found = resume_run(out, parallel=parallel, trust=True)
    else:
        found = train(gated, out, parallel=parallel, reporter=Events(lose_a_node, 2))
    local = train(gated, parallel="1")
    assert torch.equal(weights(found), weights(local))
    assert without_time(found.records) == without_time(local.records)


@pytest.mark.parametrize("gpus", [pytest.param(0.5, marks=ray_test)])
def test_a_share_of_a_gpu_that_is_not_there(tmp_path: Path, config: Config, cluster: Any, gpus: float) -> None:
    parallel = Parallel(f"ray:{cluster.address}", gpus)
    assert_refused("has no GPU", train, config(seeds=[0, 1], epochs=1), tmp_path / "run", parallel=parallel)
