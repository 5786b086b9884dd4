from __future__ import annotations

import pytest
import torch
from scipy.stats import multivariate_normal, norm

from gramscope.theory.activations import ACTIVATIONS
from reference import gaussian_average


def covariance(n: int = 3) -> torch.Tensor:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x @ x.mT / 12  # small enough for the quadrature of erf's slope


def average(name: str, c: torch.Tensor, powers: tuple[int, ...], slope: bool) -> float:
    """E[Π φ(u_i)^p_i] or of φ', by quadrature; orthant probabilities for ReLU's slope, one integral for ReLU."""
    act = ACTIVATIONS[name]
    if name == "relu" and slope:
        return float(multivariate_normal(cov=c.numpy(), allow_singular=True).cdf([0.0] * len(powers)))
    if name == "relu":
        u = torch.linspace(0, 12, 200_001, dtype=torch.float64) * c[0, 0].sqrt()
        density = torch.from_numpy(norm.pdf(u.numpy(), scale=float(c[0, 0].sqrt())))
        mean, spread = c[0, 1] / c[0, 0] * u, (c[1, 1] - c[0, 1] ** 2 / c[0, 0]).sqrt()
        ratio = (mean / spread).numpy()
        inner = mean * torch.from_numpy(norm.cdf(ratio)) + spread * torch.from_numpy(norm.pdf(ratio))
        return float(torch.trapezoid(u * density * inner, u))
    function = act.slope if slope else act.phi
    return gaussian_average(lambda u: torch.stack([function(u[:, i]) ** p for i, p in enumerate(powers)]).prod(0), c)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_averages(name: str) -> None:
    c = covariance()
    act = ACTIVATIONS[name]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        pair = c[[i, j]][:, [i, j]]
        assert float(act.phi_kernel(c)[i, j]) == pytest.approx(average(name, pair, (1, 1), slope=False), rel=1e-5)
        assert float(act.slope_kernel(c)[i, j]) == pytest.approx(average(name, pair, (1, 1), slope=True), rel=1e-5)
    for i, j in ((0, 1), (1, 2), (1, 1)):
        expected = 0.0
        for m in range(3):
            index = sorted({i, j, m})
            powers = tuple((i == a) + (j == a) + 2 * (m == a) for a in index)
            expected += average(name, c[index][:, index], powers, slope=True)
        assert float(act.slope_fourth(c)[i, j]) == pytest.approx(expected, rel=1e-4)
