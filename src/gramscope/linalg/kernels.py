"""Triton kernels behind :mod:`~gramscope.linalg.fused`, which says what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gramscope.linalg import fused
from gramscope.linalg.newton_schulz import scalings

_TILE = 32
_LINE = 1024
_SLICE = 64
_NARROW, _DEEP = 16, 64
_FLAT, _LONG = 16, 128
#: what bfloat16 numbers are multiplied as; the interpreter takes their bits for numbers
_MULTIPLIED = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
#: sums over the rows of tall matrices are made in so many parts
_PARTS = 8
#: matrices up to this size fit into the registers of one block
LARGEST = 32
_PLAIN_STEPS = 2


def split(A: Tensor, inner: int) -> Tensor:
    """See :func:`~gramscope.linalg.fused.split`."""
    rows, columns = A.shape
    A = A.contiguous()
    blocks = A.new_empty((4 * rows, columns) if inner == 0 else (rows, 4 * columns), dtype=torch.bfloat16)
    width, apart = (columns, rows * columns) if inner == 0 else (4 * columns, columns)
    _split[(triton.cdiv(A.numel(), _LINE),)](A, blocks, A.numel(), columns, width, apart, _LINE)
    return blocks


def split_step(source: Tensor, target: Tensor) -> Tensor:
    """See :func:`~gramscope.linalg.fused.split_step`."""
    (rows, columns), source, target = source.shape, source.contiguous(), target.contiguous()
    blocks, count = source.new_empty(2, 4 * rows, columns, dtype=torch.bfloat16), source.numel()
    _split_step[(triton.cdiv(count, _LINE),)](source, target, blocks, count, _LINE)
    return blocks


def first_rows(V: Tensor, A: Tensor, few: int) -> Tensor:
    """See :func:`~gramscope.linalg.fused.first_rows`; up to :data:`LARGEST`."""
    (k, d), V, A = A.shape, V.contiguous(), A.contiguous()
    rows = A.new_empty(few, d)
    _first_rows[(triton.cdiv(d, _NARROW),)](V, A, rows, d, few, k, _width(few), _NARROW, _DEEP, num_warps=2)
    return rows


def symmetrised(N: Tensor, odd: Tensor, few: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`~gramscope.linalg.fused.symmetrised`."""
    n, N, odd = len(N), N.contiguous(), odd.contiguous()
    M, s, K = torch.empty_like(N), N.new_empty(n), torch.empty_like(N)
    rest, low = (torch.empty_like(N, dtype=torch.bfloat16) for _ in range(2))
    _symmetrised[_tiles(n)](N, odd, M, s, rest, K, low, n, few, _TILE)
    return M, s, rest, K, low


def less_columns(N: Tensor, K: Tensor, s: Tensor) -> Tensor:
    """See :func:`~gramscope.linalg.fused.less_columns`."""
    n, N, K = len(N), N.contiguous(), K.contiguous()
    result = torch.empty_like(N)
    _less_columns[(triton.cdiv(N.numel(), _LINE),)](N, K, s, result, N.numel(), n, _LINE)
    return result


def balanced(N: Tensor, s: Tensor, few: int, base: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`~gramscope.linalg.fused.balanced`."""
    n, N = len(N), N.contiguous()
    K, low = torch.empty_like(N, dtype=torch.float32), torch.empty_like(N, dtype=torch.bfloat16)
    _balanced[_tiles(n)](N, s, K if base is None else base.contiguous(), K, low, n, few, base is not None, _TILE)
    return K, low


def nearly_diagonal(M: Tensor, gained: Tensor, K: Tensor, s: Tensor, few: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`~gramscope.linalg.fused.nearly_diagonal`."""
    n, (M, gained, K) = len(M), (x.contiguous() for x in (M, gained, K))
    blocks, rest = (M.new_empty(n, width, dtype=torch.bfloat16) for width in (4 * n, n))
    scale = M.new_empty(n)
    _nearly_diagonal[_tiles(n)](M, gained, K, s, blocks, rest, scale, n, few, _TILE)
    return blocks, rest, scale


def row_norms(A: Tensor, B: Tensor | None) -> Tensor:
    """See :func:`~gramscope.linalg.fused.row_norms`."""
    A = A.contiguous()
    norms = A.new_empty(len(A), dtype=torch.float32)
    _row_norms[(len(A),)](A, A if B is None else B.contiguous(), norms, B is not None, A.shape[1], _LINE)
    return norms


def small_turn(
    z: Tensor, image: Tensor, columns: Tensor, corner: Tensor, scale: Tensor, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`~gramscope.linalg.fused.small_turn`; for up to :data:`LARGEST` columns."""
    (k, f), (z, image, columns, corner) = z.shape, (x.contiguous() for x in (z, image, columns, corner))
    T, b, residual = z.new_empty(f, f), z.new_empty(f, f), z.new_empty(2)
    alphas, size = _scalings(least, z.device), _width(f)
    sums = z.new_empty(_PARTS, 2, size, size, dtype=torch.float64)
    _sums[(_PARTS,)](z, image, columns, scale, sums, f, k, triton.cdiv(k, _PARTS), size, _SLICE)
    steps = len(alphas), _PLAIN_STEPS, fused.ROOT_STEPS
    _small_turn[(1,)](corner, sums, alphas, T, b, residual, f, *steps, _PARTS, fused.SHIFT, size, num_warps=2)
    return T, b, residual


def defects(z: Tensor, image: Tensor, T: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """See :func:`~gramscope.linalg.fused.defects`; for up to :data:`LARGEST` columns."""
    (k, f), (z, image, T, b) = z.shape, (x.contiguous() for x in (z, image, T, b))
    norms = z.new_empty(2, k)
    _defects[(triton.cdiv(k, _SLICE),)](z, image, T, b, scale, norms, k, f, _width(f), _SLICE)
    return norms


def moved_by(source: Tensor, moved: Tensor, left: Tensor, T: Tensor, right: Tensor) -> Tensor:
    """See :func:`~gramscope.linalg.fused.moved_by`; for up to :data:`LARGEST` columns of ``left``."""
    (m, n), f = source.shape, len(T)
    given, result = [x.contiguous() for x in (source, moved, left, T, right)], source.new_empty(m, n)
    tiles = triton.cdiv(m, _SLICE), triton.cdiv(n, _SLICE)
    _moved_by[tiles](*given, result, m, n, f, _width(f), _SLICE)
    return result


def narrow(A: Tensor, B: Tensor, factor: float, plus: Sequence[tuple[float, Tensor]]) -> Tensor:
    """See :func:`~gramscope.linalg.fused.narrow`; for up to :data:`LARGEST` columns of B, and up to two terms."""
    (m, width), (n, f), A = A.shape, B.shape, A.contiguous()
    result = B.new_empty(m, f)
    factors = [float(c) for c in (factor, *(c for c, _ in plus), 0, 0)][:3]
    terms = [x if x.stride(1) == 1 else x.contiguous() for x in (B, *(C for _, C in plus), B, B)][:3]
    steps = [x.stride(0) for x in terms]
    shape = n, width, len(plus), _width(f), _FLAT, _LONG, _MULTIPLIED
    _narrow[(triton.cdiv(m, _FLAT),)](A, *terms, result, *steps, *factors, m, f, *shape, num_warps=2, num_stages=4)
    return result


def _width(f: int) -> int:
    return max(16, int(triton.next_power_of_2(f)))


def _tiles(n: int) -> tuple[int, int]:
    return triton.cdiv(n, _TILE), triton.cdiv(n, _TILE)


@cache
def _scalings(least: float, device: torch.device) -> Tensor:
    return torch.tensor(scalings(least), dtype=torch.float64, device=device)


@triton.jit
def _store_blocks(to, x, apart, inside):
    high = x.to(tl.bfloat16)
    tl.store(to, high, mask=inside)
    tl.store(to + apart, high, mask=inside)
    tl.store(to + 2 * apart, (x - high.to(tl.float32)).to(tl.bfloat16), mask=inside)
    tl.store(to + 3 * apart, high, mask=inside)


@triton.jit
def _split(A, blocks, count, columns, width, apart, LINE: tl.constexpr):
    at = tl.program_id(0) * LINE + tl.arange(0, LINE)
    inside = at < count
    x = tl.load(A + at, mask=inside)
    _store_blocks(blocks + (at // columns) * width + at % columns, x, apart, inside)


@triton.jit
def _split_step(source, target, blocks, count, LINE: tl.constexpr):
    at = tl.program_id(0) * LINE + tl.arange(0, LINE)
    inside = at < count
    x = tl.load(source + at, mask=inside)
    _store_blocks(blocks + at, x, count, inside)
    _store_blocks(blocks + 4 * count + at, tl.load(target + at, mask=inside) - x, count, inside)


@triton.jit
def _first_rows(V, A, rows, d, few, K: tl.constexpr, SIZE: tl.constexpr, NARROW: tl.constexpr, DEEP: tl.constexpr):
    r = tl.arange(0, SIZE)
    j = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    total = tl.zeros((SIZE, NARROW), dtype=tl.float64)
    for start in range(0, K, DEEP):
        i = start + tl.arange(0, DEEP)
        v = tl.load(V + i[:, None] * K + r[None, :], mask=(i[:, None] < K) & (r[None, :] < few), other=0.0)
        a = tl.load(A + i[:, None] * d + j[None, :], mask=(i[:, None] < K) & (j[None, :] < d), other=0.0)
        total += tl.dot(tl.trans(v.to(tl.float64)), a.to(tl.float64), out_dtype=tl.float64)
    tl.store(rows + r[:, None] * d + j[None, :], total.to(tl.float32), mask=(r[:, None] < few) & (j[None, :] < d))


@triton.jit
def _less_columns(N, K, s, result, count, n, LINE: tl.constexpr):
    at = tl.program_id(0) * LINE + tl.arange(0, LINE)
    x = tl.load(N + at, mask=at < count).to(tl.float32)
    x -= tl.load(K + at, mask=at < count).to(tl.float32) * tl.load(s + at % n, mask=at < count)
    tl.store(result + at, x.to(tl.bfloat16), mask=at < count)


@triton.jit
def _mirrored(N, i, j, n):
    """Tile (i, j) of Nᵀ in float32, read along the rows of N."""
    inside = (j[:, None] < n) & (i[None, :] < n)
    return tl.trans(tl.load(N + j[:, None] * n + i[None, :], mask=inside, other=0.0)).to(tl.float32)


@triton.jit
def _size(N, odd, i, n):
    """``|N + odd|_ii``."""
    return tl.abs(tl.load(N + i * n + i, mask=i < n, other=1.0) + tl.load(odd + i * n + i, mask=i < n, other=0.0))


@triton.jit
def _symmetrised(N, odd, M, s, rest, K, low, n, few, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at, inside = i[:, None] * n + j[None, :], (i[:, None] < n) & (j[None, :] < n)
    x = 0.5 * (tl.load(N + at, mask=inside, other=0.0) + _mirrored(N, i, j, n))
    change = tl.load(odd + at, mask=inside, other=0.0)
    x += change
    tl.store(M + at, x, mask=inside)
    tl.store(rest + at, tl.where(i[:, None] == j[None, :], tl.abs(x) - x, -x).to(tl.bfloat16), mask=inside)
    down, right = _size(N, odd, i, n), _size(N, odd, j, n)
    if tl.program_id(1) == 0:
        tl.store(s + i, down, mask=i < n)
    turn = (change - _mirrored(odd, i, j, n)) / (down[:, None] + right[None, :])
    turn = tl.where((i[:, None] < few) & (j[None, :] < few), 0.0, turn)
    tl.store(K + at, turn, mask=inside)
    tl.store(low + at, turn.to(tl.bfloat16), mask=inside)


@triton.jit
def _balanced(N, s, base, K, low, n, few, BASE: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at, inside = i[:, None] * n + j[None, :], (i[:, None] < n) & (j[None, :] < n)
    x = tl.load(N + at, mask=inside, other=0.0).to(tl.float32) - _mirrored(N, i, j, n)
    total = tl.load(s + i, mask=i < n, other=1.0)[:, None] + tl.load(s + j, mask=j < n, other=1.0)[None, :]
    x = tl.where((i[:, None] < few) & (j[None, :] < few), 0.0, x / total)
    if BASE:
        x += tl.load(base + at, mask=inside, other=0.0)
    tl.store(K + at, x, mask=inside)
    tl.store(low + at, x.to(tl.bfloat16), mask=inside)


@triton.jit
def _scale(M, gained, i, n, few):
    """``1/√(M + gained)_ii``, zero for the first few."""
    at, here = i * n + i, (i >= few) & (i < n)
    diagonal = tl.load(M + at, mask=here, other=1.0) + tl.load(gained + at, mask=here, other=0.0).to(tl.float32)
    return tl.where(here, 1 / tl.sqrt(diagonal), 0.0)


@triton.jit
def _nearly_diagonal(M, gained, K, s, blocks, rest, scale, n, few, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at, inside = i[:, None] * n + j[None, :], (i[:, None] < n) & (j[None, :] < n)
    down, right = _scale(M, gained, i, n, few), _scale(M, gained, j, n, few)
    if tl.program_id(1) == 0:
        tl.store(scale + i, down, mask=i < n)
    x = tl.load(M + at, mask=inside, other=0.0) + tl.load(gained + at, mask=inside, other=0.0).to(tl.float32)
    x -= tl.load(K + at, mask=inside, other=0.0) * tl.load(s + j, mask=j < n, other=0.0)[None, :]
    x *= down[:, None] * right[None, :]
    _store_blocks(blocks + i[:, None] * 4 * n + j[None, :], x, n, inside)
    tl.store(rest + at, tl.where(i[:, None] == j[None, :], 0.0, -x).to(tl.bfloat16), mask=inside)


@triton.jit
def _row_norms(A, B, norms, DIFFERENCE: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((LINE,), dtype=tl.float32)
    for start in range(0, WIDTH, LINE):
        at = start + tl.arange(0, LINE)
        x = tl.load(A + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        if DIFFERENCE:
            x -= tl.load(B + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        total += x * x
    tl.store(norms + row, tl.sqrt(tl.sum(total)))


@triton.jit
def _sums(
    z, image, columns, scale, sums, n, ROWS: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, SLICE: tl.constexpr
):
    """``yᵀy`` and ``zᵀ image + columnsᵀ z`` for a part of the rows."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    first = tl.program_id(0) * PART
    square, b = tl.zeros((SIZE, SIZE), dtype=tl.float64), tl.zeros((SIZE, SIZE), dtype=tl.float64)
    for start in range(0, PART, SLICE):
        row = start + tl.arange(0, SLICE)[:, None]
        here = (row < PART) & (first + row < ROWS) & (j < n)
        there = (first + row) * n + j
        part = tl.load(z + there, mask=here, other=0.0).to(tl.float64)
        weight = tl.load(scale + first + row, mask=(row < PART) & (first + row < ROWS), other=0.0)
        y = part * weight.to(tl.float64)
        seen = tl.load(image + there, mask=here, other=0.0).to(tl.float64)
        column = tl.load(columns + there, mask=here, other=0.0).to(tl.float64)
        square += tl.dot(tl.trans(y), y, out_dtype=tl.float64)
        b += tl.dot(tl.trans(part), seen, out_dtype=tl.float64) + tl.dot(tl.trans(column), part, out_dtype=tl.float64)
    to = sums + tl.program_id(0) * 2 * SIZE * SIZE + i * SIZE + j
    tl.store(to, square)
    tl.store(to + SIZE * SIZE, b)


@triton.jit
def _small_turn(
    corner,
    sums,
    alphas,
    turn,
    block,
    residual,
    n,
    STEPS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROOT: tl.constexpr,
    PARTS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIZE: tl.constexpr,
):
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inside, at = (i < n) & (j < n), i * n + j
    one = (i == j).to(tl.float64)
    square, total = one, tl.zeros((SIZE, SIZE), dtype=tl.float64)
    for part in tl.static_range(PARTS):
        there = sums + part * 2 * SIZE * SIZE + i * SIZE + j
        square += tl.load(there)
        total += tl.load(there + SIZE * SIZE)
    b = tl.load(corner + at, mask=inside, other=0.0).to(tl.float64) + 0.5 * (total + tl.trans(total))
    tl.store(block + at, b.to(tl.float32), mask=inside)
    R = one
    rest = square
    for _ in range(ROOT):
        rest = tl.dot(tl.dot(R, square, out_dtype=tl.float64), R, out_dtype=tl.float64)
        R = 1.5 * R - 0.5 * tl.dot(rest, R, out_dtype=tl.float64)
    apart = tl.sqrt(tl.sum((rest - one) * (rest - one)))
    X = tl.dot(tl.dot(R, b, out_dtype=tl.float64), R, out_dtype=tl.float64)
    G = tl.dot(tl.trans(X), X, out_dtype=tl.float64)
    X = X / tl.sqrt(tl.sqrt(tl.sum(G * G))) + tl.where(i < n, SHIFT, 1.0) * one
    for step in range(STEPS):
        alpha = tl.load(alphas + step)
        G = tl.dot(tl.trans(X), X, out_dtype=tl.float64)
        X = 1.5 * alpha * X - 0.5 * alpha * alpha * alpha * tl.dot(X, G, out_dtype=tl.float64)
    G = tl.dot(tl.trans(X), X, out_dtype=tl.float64)
    excess = tl.where(inside, G - one, 0.0)
    tl.store(residual, (tl.sqrt(tl.sum(excess * excess)) + apart).to(tl.float32))
    for _ in range(PLAIN):
        G = tl.dot(tl.trans(X), X, out_dtype=tl.float64)
        X = 1.5 * X - 0.5 * tl.dot(X, G, out_dtype=tl.float64)
    X = tl.dot(tl.dot(R, X - one, out_dtype=tl.float64), R, out_dtype=tl.float64)
    tl.store(turn + at, X.to(tl.float32), mask=inside)
    tl.store(residual + 1, tl.sqrt(tl.sum(tl.where(inside, X * X, 0.0))).to(tl.float32))


@triton.jit
def _narrow(
    A,
    B,
    C,
    D,
    result,
    step_B,
    step_C,
    step_D,
    factor,
    factor_C,
    factor_D,
    m,
    f,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    TERMS: tl.constexpr,
    SIZE: tl.constexpr,
    FLAT: tl.constexpr,
    LONG: tl.constexpr,
    AS: tl.constexpr,
):
    i, j = tl.program_id(0) * FLAT + tl.arange(0, FLAT), tl.arange(0, SIZE)
    inside = (i[:, None] < m) & (j[None, :] < f)
    total = tl.zeros((FLAT, SIZE), dtype=tl.float32)
    for start in range(0, N, LONG):
        n = start + tl.arange(0, LONG)
        at, here = A + i[:, None] * WIDTH + n[None, :], (i[:, None] < m) & (n[None, :] < N)
        high = tl.load(at, mask=here, other=0.0)
        x = tl.load(B + n[:, None] * step_B + j[None, :], mask=(n[:, None] < N) & (j[None, :] < f), other=0.0)
        near = x.to(tl.bfloat16)
        total += tl.dot(high.to(AS), near.to(AS))
        if WIDTH > N:
            total += tl.dot(high.to(AS), (x - near.to(tl.float32)).to(tl.bfloat16).to(AS))
            total += tl.dot(tl.load(at + 2 * N, mask=here, other=0.0).to(AS), near.to(AS))
    total = factor * total
    if TERMS > 0:
        total += factor_C * tl.load(C + i[:, None] * step_C + j[None, :], mask=inside, other=0.0)
    if TERMS > 1:
        total += factor_D * tl.load(D + i[:, None] * step_D + j[None, :], mask=inside, other=0.0)
    tl.store(result + i[:, None] * f + j[None, :], total, mask=inside)


@triton.jit
def _moved_by(source, base, left, T, right, result, m, n, f, SIZE: tl.constexpr, TILE: tl.constexpr):
    few = tl.arange(0, SIZE)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at, inside = i[:, None] * n + j[None, :], (i[:, None] < m) & (j[None, :] < n)
    across, within = (few[:, None] < f) & (j[None, :] < n), (few[:, None] < f) & (few[None, :] < f)
    middle = tl.load(T + few[:, None] * f + few[None, :], mask=within, other=0.0)
    moved = tl.dot(
        middle, tl.load(right + few[:, None] * n + j[None, :], mask=across, other=0.0), input_precision="ieee"
    )
    down = tl.load(left + i[:, None] * f + few[None, :], mask=(i[:, None] < m) & (few[None, :] < f), other=0.0)
    x = tl.load(base + at, mask=inside, other=0.0) + tl.dot(down, moved, input_precision="ieee")
    tl.store(result + at, tl.load(source + at, mask=inside, other=0.0) + x, mask=inside)


@triton.jit
def _defects(z, image, T, b, scale, norms, k, n, SIZE: tl.constexpr, SLICE: tl.constexpr):
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inside, at = (i < n) & (j < n), i * n + j
    row = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    there, here = row[:, None] * n + j, (row[:, None] < k) & (j < n)
    turn = tl.load(T + at, mask=inside, other=0.0)
    turned = tl.dot(turn, tl.trans(tl.load(b + at, mask=inside, other=0.0)), input_precision="ieee")
    seen = tl.load(image + there, mask=here, other=0.0)
    uneven = tl.dot(seen, tl.trans(turn), input_precision="ieee")
    weight = tl.load(scale + row, mask=row < k, other=0.0)
    y = tl.load(z + there, mask=here, other=0.0) * (weight * weight)[:, None]
    uneven -= tl.dot(y, turned, input_precision="ieee")
    tl.store(norms + row, tl.sqrt(tl.sum(uneven * uneven, 1)), mask=row < k)
    tl.store(norms + k + row, tl.sqrt(tl.sum(seen * seen, 1)), mask=row < k)
