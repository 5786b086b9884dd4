"""Stacked runs on a GPU, where a step is replayed as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gramscope.data import DataSet
from gramscope.training.config import TrainConfig
from gramscope.training.interrupt import Interrupted
from gramscope.training.job import prepare
from gramscope.training.stacking import StackedEngine
from gramscope.training.train import train
from training.helpers import StopAfter, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
Config = Callable[..., TrainConfig]


@pytest.mark.parametrize("method", ["sgd", "adam", "adamw", "muon", "whiten-sgd"])
def test_graphed_stack_equals_one_by_one(config: Config, blobs: DataSet, method: str) -> None:
    settings = config(method, seeds=[0, 1, 2], device="cuda", schedule={"name": "linear"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a graph that cannot be captured is announced by a warning
        stacked = train(replace(settings, execution="vectorised"), data=blobs)
    alone = train(replace(settings, execution="one-by-one"), data=blobs)
    torch.testing.assert_close(weights(stacked), weights(alone), rtol=5e-3, atol=5e-3)


def test_capture_leaves_the_state_as_it_was(config: Config, blobs: DataSet) -> None:
    """The warm-up steps before a capture are undone: one step is one step, for both batch sizes."""
    settings = config("adamw", seeds=[0, 1], device="cuda")
    jobs = [prepare(member, name, data=blobs) for name, member in settings.members().items()]
    graphed, eager = StackedEngine(jobs), StackedEngine(jobs)
    eager._recorded = eager._step  # type: ignore[assignment]
    for step in range(graphed.plan.steps_per_epoch + 1):
        graphed.advance(step)
        eager.advance(step)
        for one, other in zip(graphed._state_tensors(), eager._state_tensors(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["adamw", "muon"])
@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_resumed_on_a_gpu_bit_identically(
    tmp_path: Path, config: Config, blobs: DataSet, method: str, seeds: list[int]
) -> None:
    settings = config(method, seeds=seeds, device="cuda", checkpoint_every=0.4)
    whole = train(settings, data=blobs)
    with pytest.raises(Interrupted):
        train(settings, tmp_path / "run", data=blobs, reporter=StopAfter(7))
    assert torch.equal(weights(train(settings, tmp_path / "run", data=blobs, resume=True)), weights(whole))
