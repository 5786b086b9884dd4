from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from cases import normal, randoms, refused
from gramscope.measures.regression_collapse import nrc1, nrc2, nrc3


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
