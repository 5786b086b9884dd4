"""Formulas in numbers of 60 digits without limits on their exponent: arrays of mpmath's numbers, with NumPy's products."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
from mpmath import mpf
from numpy.typing import NDArray
from torch import Tensor

mpmath.mp.dps = 60
#: singular values up to this times the largest are zero: the matrices hold small integers
ZERO = mpf(10) ** -30

Numbers = NDArray[Any]


def exact(x: Tensor | Any) -> Numbers:
    """Every entry of a tensor as it is."""
    values = x.double().tolist() if isinstance(x, Tensor) else x
    array = np.array(values, dtype=object)
    return np.vectorize(mpf, otypes=[object])(array) if array.size else array


def norm(x: Numbers) -> Any:
    return mpmath.sqrt((x * x).sum())


def eye(n: int) -> Numbers:
    return exact(np.eye(n).tolist())


def eigen(A: Numbers) -> tuple[Numbers, Numbers]:
    """Eigenvalues, descending, and eigenvectors as columns."""
    size = max(abs(A).max(), mpf(10) ** -400)
    values, vectors = mpmath.eigsy(mpmath.matrix((A / size).tolist()))
    order = list(range(len(values)))[::-1]
    V = np.array(vectors.tolist(), dtype=object).reshape(A.shape)
    return np.array([values[i] * size for i in order], dtype=object), V[:, order]


def power(A: Numbers, exponent: Any) -> Numbers:
    """A power of a symmetric matrix; negative eigenvalues and those that are zero stay zero."""
    values, V = eigen(A)
    kept = values > ZERO * max(values[0], 0)
    return (V * np.array([v**exponent if k else mpf(0) for v, k in zip(values, kept, strict=True)], dtype=object)) @ V.T


def singular_values(A: Numbers) -> Numbers:
    """Descending."""
    small = A.T @ A if A.shape[0] >= A.shape[1] else A @ A.T
    return np.array([mpmath.sqrt(max(v, 0)) for v in eigen(small)[0]], dtype=object)


def projection(H: Numbers) -> Numbers:
    """The projection onto the columns of H."""
    small = H.T @ H
    return H @ power(small, -1) @ H.T if abs(H).max() else mpf(0) * (H @ H.T)


def inverse(A: Numbers) -> Numbers:
    return power(A, -1)
