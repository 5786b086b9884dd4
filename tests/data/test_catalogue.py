"""What the catalogue says of each set that needs no download is true, and seeds do what they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gramscope.data import catalogue, load
from gramscope.errors import InputError

LOCAL = [entry for entry in catalogue() if entry.source is None]


@pytest.mark.parametrize("entry", LOCAL, ids=lambda entry: entry.name)
def test_the_catalogue_tells_the_truth(entry: Any, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    data = load(entry.name, tmp_path, download=False)
    assert torch.equal(before, torch.get_rng_state())
    assert (data.name, len(data.x_train), len(data.x_test)) == (entry.name, entry.train, entry.test)
    assert (data.input_shape, data.classes) == (entry.input_shape, entry.classes)
    assert data.x_train.dtype == torch.float32
    assert data.citation == entry.citation
    assert list(tmp_path.iterdir()) == []
    again, other = load(entry.name, seed=0), load(entry.name, seed=1)
    assert torch.equal(data.x_train, again.x_train)
    assert torch.equal(data.y_test, again.y_test)
    if entry.kind == "generated":
        assert not torch.equal(data.x_train, other.x_train)


def test_names_are_unique_and_every_download_has_a_digest() -> None:
    names = [entry.name for entry in catalogue()]
    assert len(set(names)) == len(names)
    for entry in catalogue():
        for file in entry.source.archives if entry.source else ():
            assert len(file.sha256) == 64
            assert int(file.sha256, 16)
            assert file.size > 0
            assert all(url.startswith(("http://", "https://")) for url in file.urls)


def test_unknown_names_and_options_are_explained() -> None:
    with pytest.raises(InputError, match="did you mean cifar10"):
        load("cifra10")
    with pytest.raises(InputError, match="there are: digits"):
        load("zzz")
    with pytest.raises(InputError, match=r"chain-monomial has no option ranks; it has: n_train, n_test, d, rank"):
        load("chain-monomial", ranks=3)


def test_polynomial_targets_are_functions_of_the_inputs() -> None:
    data = load("chain-monomial", n_train=50, n_test=20, d=7, rank=3, seed=5)
    x = torch.cat([data.x_train, data.x_test]).double()
    y = x[:, 0] * x[:, 1] + x[:, 1] * x[:, 2] + x[:, 2] * x[:, 0]
    y = y / y[:50].std()
    torch.testing.assert_close(torch.cat([data.y_train, data.y_test])[:, 0].double(), y, rtol=1e-4, atol=1e-5)

    data = load("merged-staircase", n_train=30, n_test=5, seed=5)
    x = data.x_train
    y = x[:, 0] + x[:, 0] * x[:, 1] + x[:, 0] * x[:, 1] * x[:, 2] + x[:, 0] * x[:, 1] * x[:, 2] * x[:, 3]
    torch.testing.assert_close(data.y_train[:, 0], y, rtol=1e-4, atol=1e-5)

    data = load("high-rank-polynomial", n_train=400, n_test=100, d=5)
    features = torch.cat([data.x_train, data.x_test]).double()
    pairs = torch.stack([features[:, i] * features[:, j] for i in range(5) for j in range(i, 5)], 1)
    y = torch.cat([data.y_train, data.y_test]).double()
    fit = pairs @ torch.linalg.lstsq(pairs[:400], y[:400]).solution  # a quadratic form, the same for train and test
    torch.testing.assert_close(fit, y, rtol=1e-3, atol=1e-4)
    assert float(data.y_train.std()) == pytest.approx(1, abs=1e-4)


def test_gaussian_has_the_spectrum_it_was_asked_for() -> None:
    data = load("gaussian", n_train=20000, n_test=10, d=6, alpha=2.0)
    x = data.x_train.double()
    found = torch.linalg.eigvalsh(x.mT @ x / len(x)).flip(0)
    wanted = 1 / (1 + torch.arange(1, 7, dtype=torch.float64) ** 2)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0)
    fit = x @ torch.linalg.lstsq(x, data.y_train.double()).solution
    torch.testing.assert_close(fit, data.y_train.double(), rtol=1e-3, atol=1e-4)


def test_swiss_roll_fills_the_unit_box_and_its_target_is_the_position() -> None:
    data = load("swiss-roll", n_train=500, n_test=100)
    for values in (data.x_train, data.y_train):
        assert values.amin(0).tolist() == pytest.approx([0] * values.shape[1])
        assert values.amax(0).tolist() == pytest.approx([1] * values.shape[1])
    raw = load("swiss-roll", n_train=500, n_test=100, unit_target=False)
    t = raw.y_train[:, 0]
    assert 1.5 * np.pi <= float(t.min()) < float(t.max()) <= 4.5 * np.pi
    points = torch.stack([t * t.cos(), t * t.sin()], 1)
    low, high = points.amin(0), points.amax(0)
    torch.testing.assert_close(raw.x_train, (points - low) / (high - low), rtol=1e-4, atol=1e-5)
    assert load("swiss-roll", dimensions=3).input_shape == (3,)


@pytest.mark.parametrize(("operation", "pairs"), [("x+y", 49), ("x/y", 42), ("x^2+xy+y^2", 49)])
def test_modular_arithmetic_splits_every_pair_once(operation: str, pairs: int) -> None:
    one_hot = load("modular-arithmetic", p=7, operation=operation, train_fraction=0.5)
    tokens = load("modular-arithmetic", p=7, operation=operation, train_fraction=0.5, encoding="tokens")
    every = torch.cat([tokens.x_train, tokens.x_test])
    assert len(every.unique(dim=0)) == len(every) == pairs
    assert torch.equal(F.one_hot(tokens.x_train, 7).flatten(1).float(), one_hot.x_train)
    x, y = every.T
    z = torch.cat([tokens.y_train, tokens.y_test])
    if operation == "x/y":
        assert torch.equal(z * y % 7, x)
    else:
        assert torch.equal(z, (x + y if operation == "x+y" else x * x + x * y + y * y) % 7)
    for wrong in ({"train_fraction": 0.0}, {"encoding": "binary"}, {"operation": "x&y"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            load("modular-arithmetic", **({"p": 7} | wrong))


def test_faces_differ_by_glasses_only_and_can_be_told_apart() -> None:
    data = load("faces", n_train=300, n_test=200, image_size=32, seed=3)
    assert data.y_train.float().mean() == pytest.approx(0.5, abs=0.1)
    assert 0 <= float(data.x_train.min()) < float(data.x_train.max()) <= 1
    difference = (data.x_train[data.y_train == 1].mean(0) - data.x_train[data.y_train == 0].mean(0))[0]
    eyes, mouth = difference[10:18], difference[22:]
    assert float(eyes.abs().mean()) > 3 * float(mouth.abs().mean())
    x = torch.cat([data.flat().x_train, torch.ones(300, 1)], 1).double()
    weights = torch.linalg.solve(x.mT @ x + 30 * torch.eye(x.shape[1]), x.mT @ (2.0 * data.y_train.double() - 1))
    guess = torch.cat([data.flat().x_test, torch.ones(200, 1)], 1).double() @ weights > 0
    assert float((guess == data.y_test.bool()).float().mean()) > 0.9
    with pytest.raises(InputError, match="n_train=0"):
        load("faces", n_train=0)
