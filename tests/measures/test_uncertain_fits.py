"""Target linearity of hard features is right to 1e-6, or a warning says how far it may be off: against 70 digits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mpf
from numpy.typing import NDArray

import gramscope as gs
from cases import target_linearity_from_moments
from gramscope.errors import RescueWarning
from gramscope.linalg.moments import moments

Array = NDArray[np.float64]
N = 24


def exact(H: Array, Y: Array, intercept: bool) -> float:
    """Target linearity by Gram–Schmidt."""
    with mpmath.workdps(70):
        numbers = np.vectorize(mpf, otypes=[object])
        columns = [numbers(h) for h in (np.hstack([np.ones((N, 1)), H]) if intercept else H).T]
        basis: list[NDArray[np.object_]] = []
        y = numbers(Y[:, 0])
        total = ((y - y.sum() / N) ** 2).sum()
        for vector, least in [*((h, mpf(10) ** -50) for h in columns), (y, mpf(0))]:
            length = mpmath.sqrt((vector * vector).sum())
            if length == 0:
                continue
            left = vector / length
            for _ in range(2):
                for other in basis:
                    left = left - other * (other * left).sum()
            size = mpmath.sqrt((left * left).sum())
            if vector is y:
                return float(1 - (size * length) ** 2 / total)
            if size > least:
                basis.append(left / size)
    raise AssertionError


def cases(intercept: bool) -> Iterator[tuple[str, Array, Array]]:
    g = np.random.default_rng(int(intercept))
    base = g.standard_normal((N, 3))
    for e in (1e-4, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12):
        extra = g.standard_normal((N, 1))
        H, Y = np.hstack([base, base[:, :1] + e * extra]), extra + 0.3 * g.standard_normal((N, 1))
        yield f"collinear {e}", H, Y
        yield f"collinear float32 {e}", H.astype(np.float32).astype(np.float64), Y
        yield f"sum {e}", np.hstack([base, base.sum(1, keepdims=True) + e * extra]), Y
        if e > 1e-9:  # at 1e6 float64 has steps of 1.2e-10: the features would differ by rounding alone
            yield f"offset, collinear {e}", H + 1e6, Y
    for scales in ((1, 1e-8, 1e8), (1, 1e-12, 1e12), (1e-30, 1e30, 1), (1e-60, 1, 1e60)):
        Y = base.sum(1, keepdims=True) + 0.5 * g.standard_normal((N, 1))
        close = np.hstack([base, base[:, :1] + 1e-5 * g.standard_normal((N, 1))])
        yield f"scales {scales}", base * np.array(scales), Y
        yield f"scales, collinear {scales}", close * np.array([*scales, 1e4]), Y
    Y = base[:, :1] + 0.5 * g.standard_normal((N, 1))
    for offset in (1e3, 1e6, 1e9, 1e12):
        yield f"offset {offset}", base + offset, Y
        yield f"offset of targets {offset}", base, Y + offset
    for size in (1e-60, 1e-30, 1e30, 1e60):
        yield f"targets times {size}", base, Y * size
    yield "twice", np.hstack([base, base, base[:, :1] * 0, np.ones((N, 1))]), Y
    for size in (1e8, 1e-8):
        rows = base.copy()
        rows[0] *= size
        yield f"one row times {size}", rows, Y
    for degree in (10, 14):
        yield f"powers to {degree}", np.vander(np.linspace(0, 1, N), degree), Y
    yield "Hilbert", 1 / (np.arange(N)[:, None] + np.arange(9) + 1.0), Y


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("way", ["arrays", "moments", "merged moments"])
def test_hard_features_are_right_or_announced(way: str, intercept: bool) -> None:
    wrong = []
    for name, features, y in cases(intercept):
        H, Y = torch.from_numpy(features), torch.from_numpy(y)
        truth = exact(features, y, intercept)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if way == "arrays":
                found = float(gs.target_linearity(H, Y, intercept=intercept))
            else:
                m = moments(H, Y) if way == "moments" else moments(H[:8], Y[:8]).merge(moments(H[8:], Y[8:]))
                found = float(target_linearity_from_moments(m, intercept=intercept))
        said = [re.search(r"up to ([-+.e\d]+)", str(w.message)) for w in caught if w.category is RescueWarning]
        size = sum(float(match[1]) for match in said if match)
        if not abs(found - truth) <= 1.05 * size + 1e-6 * max(1.0, abs(truth)):
            wrong.append(f"{name}: {found} instead of {truth}, announced {size}")
    assert not wrong, "\n".join(wrong)


def test_ordinary_float64_features_are_not_doubted(generator: torch.Generator) -> None:
    """Also where features depend on each other exactly, or up to rounding: warnings are errors in the tests."""
    X = torch.randn(300, 8, generator=generator, dtype=torch.float64)
    Y = X[:, :2] + torch.randn(300, 2, generator=generator, dtype=torch.float64)
    narrow = X @ torch.randn(8, 20, generator=generator, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(torch.arange(300) % 5, 5).double()
    for H in (X, torch.cat([X, X[:, :3]], 1), torch.relu(narrow), narrow, one_hot, X.softmax(1), X + 1e3, X * 1e-60):
        for intercept in (False, True):
            direct = gs.target_linearity(H, Y, intercept=intercept)
            if H is not narrow:
                by_moments = target_linearity_from_moments(moments(H, Y), intercept=intercept)
                assert torch.allclose(by_moments, direct, atol=1e-6)
