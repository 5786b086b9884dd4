"""Neural collapse of classes and of regression against the written-out definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch import Tensor

import gramscope as gs
import reference
from cases import normal, randoms, refused
from gramscope.errors import InputError, ResultWarning
from gramscope.linalg.moments import moments
from gramscope.measures.collapse import neural_collapse_from_moments, nrc1, nrc2, nrc3
from gramscope.measures.linearity import label_rows


def data(n: int, d: int, c: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(c), torch.randint(c, (n - c,), generator=generator)])
    means = 3 * torch.randn(c, d, dtype=torch.float64, generator=generator) + 1
    return means[labels] + torch.randn(n, d, dtype=torch.float64, generator=generator), labels


def simplex(c: int) -> Tensor:
    return torch.eye(c, dtype=torch.float64) - 1 / c


@given(st.integers(2, 4), st.integers(2, 7) | st.just(40), st.integers(0, 4))
def test_equals_the_definitions(c: int, d: int, seed: int) -> None:
    H, labels = data(25, d, c, seed)
    W, b = torch.randn(c, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), torch.arange(c) / 5.0
    result = gs.neural_collapse(H, labels, (W, b))
    nc1, M = reference.scatter_ratio(H, labels)
    norms = M.norm(dim=1)
    cosines = torch.tensor([float(M[i] @ M[j] / norms[i] / norms[j]) for i in range(c) for j in range(c) if i != j])
    assert result.nc1 == pytest.approx(float(nc1), rel=1e-8)
    assert result.nc2_equinorm == pytest.approx(float(norms.std(correction=0) / norms.mean()), rel=1e-9, abs=1e-12)
    assert result.nc2_equiangular == pytest.approx(float(cosines.std(correction=0)), rel=1e-5, abs=1e-7)
    assert result.nc2_simplex == pytest.approx(float((cosines + 1 / (c - 1)).abs().mean()), rel=1e-5, abs=1e-7)
    assert result.nc3 == pytest.approx(float((W / W.norm() - M / M.norm()).square().sum()), rel=1e-9)
    means = M + H.mean(0)
    nearest = torch.tensor([int((h - means).norm(dim=1).argmin()) for h in H])
    assert result.nc4 == pytest.approx(float((nearest == (H @ W.T + b).argmax(1)).double().mean()))
    assert result.missing == {}
    assert result.classes == c


def test_full_collapse() -> None:
    M = simplex(4)
    H = M.repeat(5, 1) @ torch.linalg.qr(torch.ones(4, 4, dtype=torch.float64) + torch.eye(4))[0] + 7
    readout = torch.nn.utils.skip_init(torch.nn.Linear, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        readout.weight.copy_(H[:4] - H.mean(0))
        readout.bias.copy_(-readout.weight @ H.mean(0))
    result = gs.neural_collapse(H, torch.arange(4).repeat(5), readout)
    for value in (result.nc1, result.nc2_equinorm, result.nc2_equiangular, result.nc2_simplex, result.nc3):
        assert value == pytest.approx(0.0, abs=1e-12)
    assert result.nc4 == 1.0


def test_from_merged_moments() -> None:
    H, labels = data(30, 5, 3)
    whole = gs.neural_collapse(H, labels)
    parts = [moments(H[i::2], label_rows(labels[i::2], 3)) for i in range(2)]
    merged = neural_collapse_from_moments(parts[0].merge(parts[1]))
    assert merged.nc1 == pytest.approx(whole.nc1, rel=1e-10)
    assert merged.nc3 is merged.nc4 is None
    assert merged.missing == {"nc3": "needs a readout", "nc4": "needs the samples and a readout"} == whole.missing


def test_labels_are_rows_of_the_readout() -> None:
    H, labels = data(30, 5, 3)
    W = normal(9, 5)
    moved = gs.neural_collapse(H, labels * 2 + 1, W)
    plain = gs.neural_collapse(H, labels, W[[1, 3, 5]])
    assert moved.nc3 == pytest.approx(plain.nc3)
    assert moved.nc4 <= plain.nc4  # a prediction of a class that does not occur cannot agree
    refused(gs.neural_collapse, H, labels, W[:2], match="labels run from 0 to 2 but the readout has rows 0 to 1")
    refused(gs.neural_collapse, H, labels, W[:, :4], match="width 5")


def test_classes_of_one_sample_and_of_none() -> None:
    H, labels = data(30, 5, 3)
    full = gs.neural_collapse(H, labels)
    sparse = neural_collapse_from_moments(moments(H, label_rows(labels * 2, 6)))
    assert sparse.classes == 3
    assert sparse.nc1 == pytest.approx(full.nc1, rel=1e-12)
    assert gs.neural_collapse(*data(3, 5, 3)).nc1 == pytest.approx(0.0, abs=1e-30)  # no scatter within


def test_bad_input_is_named() -> None:
    H = torch.ones(4, 2)
    refused(gs.neural_collapse, H, torch.zeros(4, dtype=torch.int64), match="one class only")
    refused(gs.neural_collapse, H, torch.zeros(4), match="vector of integer labels")
    refused(gs.neural_collapse, H, torch.tensor([0, 1]), match="same samples")
    one = torch.tensor([[1.0, 0.0]] * 3)
    refused(neural_collapse_from_moments, moments(one, one), match="at least two classes")
    without = neural_collapse_from_moments(moments(*data(30, 5, 3)[:1], label_rows(data(30, 5, 3)[1]), gram=False))
    assert without.nc1 is None
    assert "gram=True" in without.missing["nc1"]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_collapse_does_not_depend_on_the_scale(scale: float) -> None:
    H, labels = data(30, 5, 3)
    W = normal(3, 5)
    plain, scaled = gs.neural_collapse(H, labels, W), gs.neural_collapse(scale * H, labels, scale * W)
    for name in ("nc1", "nc2_equinorm", "nc2_equiangular", "nc2_simplex", "nc3", "nc4"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-8)


def test_readouts_in_every_form() -> None:
    H, labels = data(30, 5, 3)
    layer = torch.nn.Linear(5, 3, dtype=torch.float64)
    W, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    expected = gs.neural_collapse(H, labels, (W, b))
    for readout in ([W, b], [W.numpy(), b.numpy()], layer, torch.nn.utils.parametrizations.weight_norm(layer)):
        found = gs.neural_collapse(H, labels, readout)
        assert found.nc3 == pytest.approx(expected.nc3, rel=1e-9)
        assert found.nc4 == expected.nc4
    assert gs.neural_collapse(H, labels, W.tolist()).nc3 == pytest.approx(expected.nc3, rel=1e-9)
    with pytest.raises(InputError, match="readout is a Sequential, which has no weight; give its last linear layer"):
        gs.neural_collapse(H, labels, torch.nn.Sequential(layer))
    refused(gs.neural_collapse, H, labels, (W, b[:2]), match="the bias has 2 entries but the readout has 3 rows")
    refused(gs.neural_collapse, H, labels, (W, b, b), match="readout has 3 parts")


def test_undefined_parts_are_announced() -> None:
    with pytest.warns(ResultWarning, match="class means coincide"):
        dead = gs.neural_collapse(torch.full((6, 3), 0.1), torch.tensor([0, 1, 2, 0, 1, 2]), torch.ones(3, 3))
    assert dead.nc1 != dead.nc1
    assert dead.nc3 != dead.nc3
    H = torch.tensor([[-1.0, 0.0], [-1.0, 0.5], [0.1, 0.0], [-0.1, 0.5], [1.0, 0.5], [1.0, 0.0]])
    labels = torch.tensor([2, 2, 4, 4, 7, 7])
    with pytest.warns(ResultWarning, match=r"means of classes \[4\] coincide with the mean of all samples"):
        result = gs.neural_collapse(H, labels)
    assert result.nc2_equiangular != result.nc2_equiangular
    assert result.nc1 == result.nc1
    with pytest.warns(ResultWarning, match="the readout is zero"):
        assert gs.neural_collapse(H[[0, 1, 4, 5]], labels[[0, 1, 4, 5]], torch.zeros(8, 2)).nc3 != 0


def test_shares_of_variance_by_projecting_the_rows() -> None:
    H, W = randoms((40, 6), (2, 6))
    H = (H * torch.arange(1.0, 7.0)) - (H * torch.arange(1.0, 7.0)).mean(0)
    total = H.square().sum()
    leading = torch.linalg.svd(H)[2][:2]
    rows = torch.linalg.qr(W.T)[0].T
    C = H.T @ H
    assert float(nrc1(C, 2)) == pytest.approx(float((H - H @ leading.T @ leading).square().sum() / total))
    assert float(nrc2(C, W)) == pytest.approx(float((H - H @ rows.T @ rows).square().sum() / total))
    twice = torch.cat([W, W[:1]])  # a row more does not enlarge the row space
    assert float(nrc2(C, twice)) == pytest.approx(float(nrc2(C, W)))
    assert float(nrc1(C, 6)) == 0.0


def test_collapsed_features() -> None:
    W, codes = randoms((2, 6), (40, 2))
    H = codes @ W
    C = (H - H.mean(0)).T @ (H - H.mean(0))
    assert float(nrc1(C, 2)) == pytest.approx(0.0, abs=1e-12)
    assert float(nrc2(C, W)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_readout_against_a_scan_of_gamma(seed: int) -> None:
    W, Y = randoms((3, 6), (40, 3), seed=seed)
    C = (Y * torch.tensor([1.0, 2.0, 4.0])).T @ (Y * torch.tensor([1.0, 2.0, 4.0]))
    gram, root = (W @ W.T).numpy(), sqrtm(C.numpy()).real
    gram = gram / np.linalg.norm(gram)
    scan = [root - t * np.eye(3) for t in np.linspace(0, np.linalg.eigvalsh(root)[0], 2001)]
    expected = min(((gram - A / np.linalg.norm(A)) ** 2).sum() for A in scan)
    assert float(nrc3(W, C)) == pytest.approx(expected, abs=1e-6)
    assert float(nrc3(W, C)) <= expected + 1e-12


def test_the_readout_of_a_collapsed_net() -> None:
    Y = normal(40, 3) * torch.tensor([1.0, 2.0, 4.0])
    C = Y.T @ Y
    root = torch.from_numpy(sqrtm(C.numpy()).real)
    A = root - 0.4 * torch.linalg.eigvalsh(root)[0] * torch.eye(3)
    assert float(nrc3(torch.linalg.cholesky(A), C)) == pytest.approx(0.0, abs=1e-12)
    refused(nrc3, torch.ones(2, 4), C, match="one row for each of the 3 targets")
    refused(nrc3, torch.ones(1, 4), torch.ones(1, 1), match="0 for any readout")
    assert float(nrc3(torch.eye(2), torch.eye(2))) == pytest.approx(0.0, abs=1e-12)
