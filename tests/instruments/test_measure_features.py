"""Features from arrays and files: the numbers of the model that they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import InputError
from gramscope.instruments import measure_features as module


def model() -> tuple[nn.Sequential, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return net, torch.randn(80, 6, generator=generator, dtype=torch.float64), torch.arange(80) % 3


@pytest.mark.parametrize("block", [7 * 11, 2**22])
def test_numbers_are_those_of_the_model(block: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    save_file = pytest.importorskip("safetensors.torch").save_file
    net, x, y = model()
    hidden = net[:2](x).detach()
    np.save(tmp_path / "0.npy", x.numpy())
    save_file({"2": hidden}, tmp_path / "2.safetensors")
    columns = [c.name for c in gs.measures() if c.of_features and c.needs <= {"features", "gram", "targets", "labels"}]
    whole = gs.measure(net, (x, y), nn.CrossEntropyLoss(), measures=columns)
    for features in (
        {"0": x, "2": hidden.numpy()},
        tmp_path,
        {"0": tmp_path / "0.npy", "2": str(tmp_path / "2.safetensors")},
    ):
        found = gs.measure_features(features, y, measures=columns)
        assert list(found) == ["0", "2"]
        for layer in found:
            for name in columns:
                value, same = whole[layer][name], found[layer][name]
                assert (same is None) == (value is None), name
                assert value is None or same == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_positions_become_rows_as_in_measure() -> None:
    _, x, _ = model()
    h = x.view(20, 4, 6)
    labels = torch.arange(80).view(20, 4) % 5
    flat = gs.measure_features({"a": x}, labels.flatten())
    assert gs.measure_features({"a": h}, labels).rows == flat.rows
    mean = gs.measure_features({"a": h}, labels[:, 0])
    assert mean.rows == gs.measure_features({"a": h.mean(1)}, labels[:, 0]).rows


def test_without_labels_there_are_ranks() -> None:
    _, x, _ = model()
    assert gs.measure_features({"a": x}, measures=["rankme"])["a"]["rankme"] > 1
    with pytest.raises(InputError, match="needs"):
        gs.measure_features({"a": x}, measures=["target_linearity"])


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        ({}, None, "at least one layer"),
        ({"a": torch.ones(3, 2)}, torch.arange(4), "'a' has features of 3 samples, and there are 4 labels"),
        ({"a": torch.ones(3)}, None, r"shape \(3,\)"),
        ({"a": torch.ones(3, 2, dtype=torch.long)}, None, "give floating-point"),
        ({"a": "nothing.npy"}, None, "'a' cannot be read as .npy"),
        ("nowhere", None, "is no folder"),
    ],
)
def test_wrong_features_are_refused(features: object, labels: Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gs.measure_features(features, labels)  # type: ignore[arg-type]
