"""Generated sets: the target is the documented function of the inputs, in the training and in the test part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gramscope_lab.data import DataSet, load, synthetic
from gramscope_lab.data.synthetic import swiss_roll
from refusals import assert_refused


def both(data: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the training and the test part together, in float64."""
    return torch.cat([data.x_train, data.x_test]).double(), torch.cat([data.y_train, data.y_test]).double()


@pytest.mark.parametrize(
    ("name", "options", "target"),
    [
        ("chain-monomial", {"d": 7, "rank": 3}, lambda x: synthetic.chain_monomial(x, 3)),
        ("merged-staircase", {"unit_target": True}, lambda x: synthetic.merged_staircase(x, 4)),
        ("merged-staircase", {"degree": 2}, lambda x: synthetic.merged_staircase(x, 2)),
    ],
)
def test_polynomial_targets(name: str, options: dict[str, Any], target: Any) -> None:
    x, y = both(load(name, n_train=50, n_test=20, seed=5, **options))
    wanted = target(x) if "degree" in options else target(x) / target(x)[:50].std()
    torch.testing.assert_close(y[:, 0], wanted, rtol=1e-4, atol=1e-5)


def test_high_rank_polynomial_is_one_quadratic_form_for_both_parts() -> None:
    data = load("high-rank-polynomial", n_train=400, n_test=100, d=5)
    x, y = both(data)
    pairs = torch.stack([x[:, i] * x[:, j] for i in range(5) for j in range(i, 5)], 1)
    fit = pairs @ torch.linalg.lstsq(pairs[:400], y[:400]).solution
    torch.testing.assert_close(fit, y, rtol=1e-3, atol=1e-4)
    assert float(data.y_train.std()) == pytest.approx(1, abs=1e-4)


def test_gaussian_has_a_linear_target_and_the_spectrum_it_was_asked_for() -> None:
    data = load("gaussian", n_train=20000, n_test=10, d=6, alpha=2.0)
    x, y = data.x_train.double(), data.y_train.double()
    wanted = 1 / (1 + torch.arange(1, 7, dtype=torch.float64) ** 2)
    torch.testing.assert_close(torch.linalg.eigvalsh(x.mT @ x / len(x)).flip(0), wanted, rtol=0.05, atol=0)
    torch.testing.assert_close(x @ torch.linalg.lstsq(x, y).solution, y, rtol=1e-3, atol=1e-4)


def test_swiss_roll_fills_the_unit_box_and_its_target_is_the_position() -> None:
    data = load("swiss-roll", n_train=500, n_test=100)
    for values in (data.x_train, data.y_train):
        assert values.amin(0).tolist() == pytest.approx([0] * values.shape[1])
        assert values.amax(0).tolist() == pytest.approx([1] * values.shape[1])
    points, t = swiss_roll(600, torch.Generator().manual_seed(0))
    torch.testing.assert_close(points, torch.stack([t * t.cos(), t * t.sin()], 1))
    low, high = t[:500].min(), t[:500].max()
    torch.testing.assert_close(both(data)[1][:, 0], (t - low) / (high - low), check_dtype=False)


def test_modular_arithmetic_splits_every_pair_once() -> None:
    one_hot, tokens = (
        load("modular-arithmetic", p=7, operation="x/y", train_fraction=0.5, encoding=encoding)
        for encoding in ("one_hot", "tokens")
    )
    every, labels = both(tokens)
    assert len(every.unique(dim=0)) == len(every) == 42
    assert torch.equal(labels * every[:, 1] % 7, every[:, 0])
    assert torch.equal(F.one_hot(tokens.x_train, 7).flatten(1).float(), one_hot.x_train)
    for wrong in ({"train_fraction": 0.0}, {"encoding": "binary"}, {"operation": "x&y"}):
        assert_refused(next(iter(wrong)), load, "modular-arithmetic", **({"p": 7} | wrong))


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
