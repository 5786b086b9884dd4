"""Extreme matrices: small integers times a power of two, which float16 to float64 all hold exactly."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

#: exponents of two near 1e±30, 1e±150 and the smallest number above zero
LARGE, HUGE = 100, 498
DENORMAL = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149, torch.float64: -1074}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    """How the entries of a matrix are chosen.

    Args:
        kind: of the integers.
        exponent: of the power of two that they are multiplied with.
        dtype: in which they are handed over.
        refused: the routine must raise an error that names the argument.
    """

    name: str
    kind: str = "random"
    exponent: int = 0
    dtype: torch.dtype = torch.float64
    refused: bool = False

    def matrix(self, shape: tuple[int, ...], seed: str, square: bool = False) -> Tensor:
        """A matrix of this shape; a positive semidefinite one where ``square`` is set."""
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        if self.kind == "one by one":
            shape = tuple(1 for _ in shape)
        n, d = shape

        def integers(n: int, d: int) -> Tensor:
            return torch.randint(-5, 6, (n, d), generator=generator).double()

        if self.kind == "zero":
            X = torch.zeros(shape, dtype=torch.float64)
        elif self.kind == "rank one":
            column = integers(n, 1) + 6
            X = column @ (column.mT if square else integers(1, d) + 6)
        elif self.kind == "repeated":  # all singular values are equal
            X = torch.eye(n, d, dtype=torch.float64)[torch.randperm(n, generator=generator)] * 3
            X = X @ X.mT if square else X
        elif self.kind == "one by one":
            X = torch.full(shape, 3.0, dtype=torch.float64)
        else:
            X = integers(n, d)
            X = X @ X.mT if square else X
        if self.exponent in DENORMAL.values() and square:
            X = X.clamp(-7, 7)
        X = torch.ldexp(X, torch.tensor(self.exponent)).to(self.dtype)
        if self.kind == "NaN":
            X[0, -1] = float("nan")
        elif self.kind == "infinite":
            X[0, -1] = float("inf")
        elif self.kind == "no rows":
            X = X[:0, :0] if square else X[:0]
        elif self.kind == "no columns":
            X = X[:0, :0] if square else X[:, :0]
        elif self.kind == "not contiguous":
            X = torch.stack([X.mT, X.mT], -1)[..., 0].mT
            assert X.numel() == 1 or not X.is_contiguous()
        return X


ORDINARY = Case("ordinary")
SCALES = [
    Case(f"2^{exponent} {str(dtype)[6:]}", exponent=exponent, dtype=dtype)
    for dtype, exponents in {torch.float32: (-LARGE, LARGE), torch.float64: (-HUGE, -LARGE, LARGE, HUGE)}.items()
    for exponent in exponents
]
CASES = [
    *(Case(str(dtype)[6:], dtype=dtype) for dtype in DTYPES),
    *(Case(f"{kind} {str(dtype)[6:]}", kind, dtype=dtype)
      for kind in ("zero", "rank one", "repeated") for dtype in (torch.float32, torch.float64)),
    *SCALES,
    *(Case(f"denormal {str(dtype)[6:]}", exponent=exponent, dtype=dtype) for dtype, exponent in DENORMAL.items()),
    Case("not contiguous", "not contiguous"),
    Case("one by one", "one by one"),
    *(Case(kind, kind, refused=True) for kind in ("NaN", "infinite", "no rows", "no columns")),
]  # fmt: skip
