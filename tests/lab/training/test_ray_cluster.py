"""Sweeps on a Ray cluster of two nodes: the bits of local runs, also when a node dies or the driver stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.interrupt import Interrupted
from gramscope_lab.training.placement import Placement
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.train import resume_run, train
from lab.training.helpers import Config, weights, without_time
from refusals import assert_refused

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray"), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each; the second can be taken away."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


class Events(Reporter):
    """Keeps what was told, and calls ``act`` once, after the first evaluation of a member past step ``step``."""

    def __init__(self, step: int = 10**9, act: Any = None) -> None:
        self.notes: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self._step, self._act = step, act

    def note(self, text: str) -> None:
        self.notes.append(text)

    def member_ended(self, name: str, how: str) -> None:
        self.ended.append((name, how))

    def records(self, records: Any, label: str = "") -> None:
        if self._act is not None and records[0]["step"] >= self._step:
            act, self._act = self._act, None
            act(label)


def test_a_killed_worker_a_stopped_driver_and_a_lost_node_change_no_bit(
    tmp_path: Path, config: Config, cluster: Any
) -> None:
    settings = config("adamw", seeds=[0, 1, 2], epochs=30, checkpoint_every=0.5)  # longer than news takes to arrive
    local = train(replace(settings, execution="one-by-one"))
    placement, out = Placement("ray", cluster.address), tmp_path / "run"

    def kill_worker(name: str) -> None:
        facts = RunDirectory(out).member(name).lock._facts()
        os.kill(int(str(facts["pid"])), signal.SIGKILL)

    class StopsAfterTheLoss(Events):
        def note(self, text: str) -> None:
            super().note(text)
            if "starts again" in text:  # the next record of any member then interrupts the driver
                self._step, self._act = 0, lambda name: signal.raise_signal(signal.SIGINT)

    first = StopsAfterTheLoss(50, kill_worker)
    with pytest.raises(Interrupted, match="stopped and saved"):
        train(settings, out, placement=placement, reporter=first)
    assert [how for _, how in first.ended].count("lost") == 1
    assert any("starts again from its last checkpoint" in note for note in first.notes)
    assert RunDirectory.open(out).status() == "stopped"
    lost = cluster.worker_nodes.copy().pop()
    second = Events(0, lambda name: cluster.remove_node(lost, allow_graceful=False))
    found = resume_run(out, placement=placement, reporter=second)
    assert list(found.members) == list(local.members)
    assert torch.equal(weights(found), weights(local))
    assert without_time(found.records) == without_time(local.records)
    assert not ray.is_initialized()


def test_runs_share_a_gpu(tmp_path: Path, config: Config, cluster: Any) -> None:
    """Two runs at a time on a node that declares one GPU; each trains on its CPU."""
    settings = config("adamw", seeds=[0, 1, 2], epochs=1, device="cpu")
    local = train(replace(settings, execution="one-by-one"))
    node = cluster.add_node(num_cpus=4, num_gpus=1)
    try:
        engine = Placement("ray", cluster.address, 0.5).workers(3)
        assert engine.slots == 2 + 1  # and one that waits
        engine.close()
        found = train(settings, tmp_path / "run", placement=Placement("ray", cluster.address, 0.5))
    finally:
        cluster.remove_node(node)
    assert torch.equal(weights(found), weights(local))


def test_what_ray_cannot_do_is_refused(tmp_path: Path, config: Config, cluster: Any) -> None:
    settings = config(seeds=[0, 1], epochs=1)
    vectorised = replace(settings, execution="vectorised")
    out = tmp_path / "run"
    assert_refused("keeps all runs in one process", train, vectorised, out, placement=Placement("ray"))
    assert_refused("has no GPU", train, settings, out, placement=Placement("ray", cluster.address, 0.5))
    assert not out.exists()
    assert not ray.is_initialized()
