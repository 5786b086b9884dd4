"""What several training tests need."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.method_options import METHODS
from gramscope_lab.training.reporter import Interrupted, Reporter
from gramscope_lab.training.train import Trained, train

Config = Callable[..., TrainConfig]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Any configuration: every method, and values of every kind in each table."""
    method = draw(st.sampled_from(sorted(METHODS)))
    floats = [key for key, value in METHODS[method]() if isinstance(value, float)]
    sweep = {f"method.{floats[0]}": [0.1, 0.5]} if floats else {}
    data = {"name": draw(st.sampled_from(["digits", "my data.npz"])), "seed": draw(st.integers(0, 5)), "d": 3}
    hidden, activation = draw(st.lists(st.integers(1, 9), max_size=2)), draw(st.text("a =\"'", max_size=5))
    names = draw(st.lists(st.sampled_from(["nfa", "nc1"]), max_size=2))
    tree: dict[str, Any] = {
        "data": {**data, "validation": draw(st.floats(0, 0.9))},
        "model": {"name": "mlp", "hidden": hidden, "bias": draw(st.booleans()), "activation": activation},
        "method": {"name": method, **{key: draw(st.floats(0, 10)) for key in floats}},
        "schedule": draw(
            st.sampled_from([{}, {"name": "step", "every": 2.0}])
            | st.builds(dict, name=st.sampled_from(["linear", "cosine"]), final=st.floats(0, 1))
        ),
        "measure": {"every": draw(st.floats(0, 3)), "names": names},
        "sweep": draw(st.sampled_from([{}, sweep, {"model.hidden": [[3], [4, 5]]}])),
        "seeds": draw(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True)),
        "epochs": draw(st.floats(0, 9)),
        "evaluate_train": draw(st.booleans()),
    }
    return TrainConfig.from_dict(tree)


def weights(trained: Trained) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trained.members.values() for p in m.model.parameters()])


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


class StopAfter(Reporter):
    """Interrupts as a user would, during step ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, done: int) -> None:
        if done == self.step:
            signal.raise_signal(signal.SIGINT)


def train_until(step: int, settings: TrainConfig, out: Path, **options: Any) -> None:
    """Trains, and interrupts during step ``step``; the message says how to go on."""
    with pytest.raises(Interrupted, match=rf"saved; continue with: gramscope train --resume .*{out.name}"):
        train(settings, out, reporter=StopAfter(step), **options)


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
