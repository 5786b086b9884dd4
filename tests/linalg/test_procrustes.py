"""The nearest matrix with a given Gram against SciPy's orthogonal Procrustes; small rotations against polar factors."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from gramscope.linalg import processor
from gramscope.linalg import procrustes as procrustes_module
from gramscope.linalg import small_rotation as small_rotation_module
from gramscope.linalg.kept_basis import KeptBasis, new_basis
from gramscope.linalg.procrustes import Replays, by_one_pass, nearest_with_gram
from gramscope.linalg.replay import Replay, Tensors
from gramscope.linalg.small_rotation import LARGE, small_rotation

METHODS = ("auto", "svd", "newton-schulz")
SHAPES = ((12, 30), (16, 16), (30, 12), (17, 16), (1, 7), (7, 1), (40, 200))


@pytest.fixture(autouse=True, scope="module", params=[1, 10**6], ids=["iterating", "decomposing"])
def way_of_small_rotation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Matrices from this size on are tried by conjugate gradients and in a kept basis: all of them, or none."""
    with (
        mock.patch.object(small_rotation_module, "LARGE", request.param),
        mock.patch.object(procrustes_module, "LARGE", request.param),
    ):
        yield


def pair(k: int, d: int, decades: float, change: float, seed: int) -> tuple[Tensor, Tensor]:
    """Float32 weights with singular values over ``decades`` and a neighbour at relative distance ``change``."""
    generator = torch.Generator().manual_seed(seed)
    r = min(k, d)
    U, V = (torch.linalg.qr(torch.randn(x, r, generator=generator, dtype=torch.float64))[0] for x in (k, d))
    W1 = ((U * torch.logspace(0, -decades, r, dtype=torch.float64)) @ V.mT).float()
    D = torch.randn(k, 2, generator=generator) @ torch.randn(2, d, generator=generator)
    D = D + 0.3 * torch.randn(k, d, generator=generator)
    return W1, W1 + D * (change * W1.norm() / D.norm())


def gram_error(X: Tensor, W: Tensor) -> float:
    G, wanted = (Z.double().mT @ Z.double() for Z in (X, W))
    return float((G - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("method", METHODS)
@given(
    shape=st.sampled_from(SHAPES),
    decades=st.floats(0, 9),
    change=st.sampled_from([0.0, 1e-5, 1e-3, 1e-2, 0.3, 10.0]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.filterwarnings("ignore::gramscope.errors.RescueWarning")
def test_has_the_gram_and_is_nearest(
    method: str, shape: tuple[int, int], decades: float, change: float, seed: int
) -> None:
    W1, W2 = pair(*shape, decades, change, seed)
    X = nearest_with_gram(W1, W2, method)
    assert X.dtype == torch.float32
    assert gram_error(X, W2) < 2e-7
    nearest = reference.nearest_with_gram(W1, W2)
    assert (X.double() - W1).norm() < (nearest - W1).norm() + 1e-7 * W2.norm()
    if decades <= 6:  # beyond, W1 W2ᵀ leaves the solution undetermined even in float64
        torch.testing.assert_close(X.double(), nearest, atol=1e-6 * float(W2.norm()), rtol=0)


@given(
    shape=st.sampled_from([(16, 40), (16, 16), (40, 16), (32, 33)]),
    decades=st.floats(0, 4),
    change=st.sampled_from([1e-5, 1e-3, 1e-2]),
    inside=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_two_clusters_of_singular_values(
    shape: tuple[int, int], decades: float, change: float, inside: bool, seed: int
) -> None:
    """Few distinct singular values look solved to an iteration before the small ones are."""
    k, d = shape
    generator = torch.Generator().manual_seed(seed)
    r = min(k, d)
    U, V = (torch.linalg.qr(torch.randn(x, r, generator=generator, dtype=torch.float64))[0] for x in (k, d))
    sizes = torch.ones(r, dtype=torch.float64)
    sizes[r // 2 :] = 10**-decades
    W1 = (U * sizes) @ V.mT
    if inside:  # a rotation among the small ones alone
        K = torch.randn(r - r // 2, r - r // 2, generator=generator, dtype=torch.float64)
        small = U[:, r // 2 :]
        W2 = W1 + small @ (torch.linalg.matrix_exp(change * (K - K.mT)) - torch.eye(r - r // 2)) @ small.mT @ W1
    else:
        W2 = W1 + change / d * torch.randn(k, d, generator=generator, dtype=torch.float64)
    W1, W2 = W1.float(), W2.float()
    X = nearest_with_gram(W1, W2)
    assert gram_error(X, W2) < 2e-7
    assert (X.double() - W1).norm() < (reference.nearest_with_gram(W1, W2) - W1).norm() + 2e-7 * W2.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-20, 1e-17, 1e17, 1e20, 1e30])
def test_extreme_scales(shape: tuple[int, int], scale: float) -> None:
    """Products that leave the range of float32, or lose digits at its end, are formed in float64."""
    W1, W2 = (scale * W for W in pair(*shape, 1, 1e-3, 0))
    X, nearest = nearest_with_gram(W1, W2), reference.nearest_with_gram(W1, W2)
    torch.testing.assert_close(X.double(), nearest, atol=1e-6 * float(W2.double().norm()), rtol=0)


@given(shape=st.sampled_from(SHAPES), change=st.sampled_from([1e-3, 0.1, 1.0]), seed=st.integers(0, 10**6))
def test_no_rotation_of_the_proposal_is_nearer(shape: tuple[int, int], change: float, seed: int) -> None:
    W1, W2 = pair(*shape, 1, change, seed)
    distance = (nearest_with_gram(W1, W2).double() - W1).norm()
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 0.1, 10.0):
        K = torch.randn(shape[0], shape[0], generator=generator, dtype=torch.float64) * size
        Q = torch.linalg.matrix_exp(K - K.mT)
        assert distance <= (Q @ W2.double() - W1).norm() + 1e-6 * W1.norm()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore::gramscope.errors.RescueWarning")
def test_rank_deficient_products_keep_the_gram_exact(method: str, shape: tuple[int, int]) -> None:
    k, d = shape
    W1, W2 = pair(k, d, 0, 0.1, 0)
    dead_rows, dead_columns, low_rank = W1.clone(), W1.clone(), W1[:, :1] @ W1[:1]
    dead_rows[: k // 2] = 0
    dead_columns[:, : d // 2] = 0
    for old in (dead_rows, dead_columns, low_rank, torch.zeros_like(W1)):
        for new in (W2, old, torch.zeros_like(W1), old + 1e-4 * W2):
            X = nearest_with_gram(old, new, method)
            wanted = new.double().mT @ new.double()
            assert (X.double().mT @ X.double() - wanted).norm() < 2e-7 * wanted.norm() + 1e-30
            excess = (X.double() - old).norm() - (reference.nearest_with_gram(old, new) - old).norm()
            assert excess <= 1e-6 * (old.norm() + new.norm())
    # with nothing to be near to, the proposal is taken as it is
    torch.testing.assert_close(nearest_with_gram(torch.zeros_like(W1), W2, method), W2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_change_comes_back_unchanged(method: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    W = pair(*shape, 3, 0, 0)[0].to(dtype)
    X = nearest_with_gram(W, W, method)
    assert X.dtype == dtype
    assert float((X - W).norm()) <= (0 if dtype != torch.float64 else 1e-12) * float(W.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_stacks_are_the_matrices_one_by_one(shape: tuple[int, int]) -> None:
    pairs = [pair(*shape, 1, 10.0**-seed, seed) for seed in range(4)]
    W1, W2 = (torch.stack(x).reshape(2, 2, *shape) for x in zip(*pairs, strict=True))
    X = nearest_with_gram(W1, W2).flatten(0, 1)
    for x, (old, new) in zip(X, pairs, strict=True):
        torch.testing.assert_close(x, nearest_with_gram(old, new), atol=2e-7 * float(new.norm()), rtol=0)


@given(n=st.integers(1, 20), decades=st.floats(0, 2), size=st.floats(1e-9, 3e-3), seed=st.integers(0, 10**6))
def test_small_rotation_is_the_polar_factor(n: int, decades: float, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    V = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    S = (V * torch.logspace(0, -decades, n, dtype=torch.float64)) @ V.mT
    R = torch.randn(n, n, generator=generator, dtype=torch.float64)
    R = size * 10**-decades * (R - R.mT) / max(1.0, float((R - R.mT).norm()))
    S, R = ((S + S.mT) / 2).float(), R.float()
    E, reliable = small_rotation(S[None], R[None])
    assert reliable.all()
    exact = reference.polar_factor(S.double() + R.double()) - torch.eye(n, dtype=torch.float64)
    # what counts is the error in Q W: relative to the rotation, or half a unit of rounding of W
    values, vectors = torch.linalg.eigh(S.double())
    root = vectors * values.sqrt()
    unit = 0.5 * torch.finfo(torch.float32).eps * root.norm()
    assert ((E[0].double() - exact) @ root).norm() <= 1e-5 * 10**decades * (exact @ root).norm() + unit


def test_small_rotation_is_orthogonal_up_to_its_largest() -> None:
    R = torch.tensor([[0.0, 0.035], [-0.035, 0.0]])
    E, reliable = small_rotation(torch.eye(2)[None], R[None])
    Q = torch.eye(2, dtype=torch.float64) + E[0].double()
    assert reliable.all()
    assert (Q.mT @ Q - torch.eye(2, dtype=torch.float64)).abs().max() < 5e-9


def test_small_rotation_says_where_it_is_not_accurate() -> None:
    S, R = torch.diag(torch.tensor([1.0, 0.5, 0.1])), torch.zeros(3, 3)
    R[0, 1], R[1, 0] = 1e-3, -1e-3
    tiny, at_tiny = torch.diag(torch.tensor([1.0, 1e-9, 1e-9])), torch.zeros(3, 3)
    at_tiny[1, 2], at_tiny[2, 1] = 1e-11, -1e-11
    matrices = torch.stack([S, S, -S, S, tiny]), torch.stack([R, 0 * R, R, 1e3 * R, at_tiny])
    E, reliable = small_rotation(*matrices)
    assert reliable.tolist() == [True, True, False, False, False]
    assert torch.equal(E[1], torch.zeros(3, 3))
    torch.testing.assert_close(E[:1], small_rotation(S[None], R[None])[0])
    assert not small_rotation(S[None], float("nan") * R[None])[1].any()


def test_reduced_precision_products_are_not_relied_on() -> None:
    """Where float32 products are allowed to be bfloat16 ones, the float64 way is taken."""
    W1, W2 = pair(12, 30, 0, 1e-3, 0)
    with mock.patch.object(procrustes_module, "_by_product", wraps=procrustes_module._by_product) as general:
        nearest_with_gram(W1, W2)
        assert general.call_count == 0
        before = torch.backends.mkldnn.matmul.fp32_precision
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            nearest_with_gram(W1, W2)
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = before
        assert general.call_count == 1


def test_one_pass_is_the_general_method_where_its_residual_is_small() -> None:
    W1, W2 = (torch.stack(x) for x in zip(*[pair(12, 40, 0, 1e-2, seed) for seed in range(3)], strict=True))
    found = by_one_pass({"target": W1, "source": W2})
    assert (found["residual"] < 0.02).all()
    torch.testing.assert_close(found["nearest"], nearest_with_gram(W1, W2, "svd"), atol=1e-7, rtol=1e-6)
    square1, square2 = pair(40, 40, 3, 1e-2, 0)
    assert (by_one_pass({"target": square1[None], "source": square2[None]})["residual"] > 0.02).all()


def test_the_source_is_not_changed_where_the_general_method_is_needed(generator: torch.Generator) -> None:
    source = torch.randn(LARGE, LARGE, generator=generator)
    before, target = source.clone(), torch.randn(LARGE, LARGE, generator=generator)
    found = nearest_with_gram(target, source)
    assert torch.equal(source, before)
    wanted = reference.nearest_with_gram(target, source)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.fixture
def on_a_device() -> Iterator[None]:
    """As if tensors of any size were on a CUDA device."""
    with (
        mock.patch.object(procrustes_module, "LARGE", 1),
        mock.patch.object(procrustes_module, "has_bfloat16_products", return_value=True),
        mock.patch.object(processor, "on_host", return_value=False),
    ):
        yield


class Counted:
    """One pass of products, and for how many matrices it was asked each time."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.replays = Replays(one_pass=Replay(self))

    def __call__(self, given: Tensors) -> dict[str, Tensor]:
        self.asked.append(len(given["source"]))
        return by_one_pass(given)


def moved(W: Tensor, step: float, seed: int) -> Tensor:
    D = torch.randn(W.shape, generator=torch.Generator().manual_seed(seed))
    return W + step * D * W.norm(dim=(1, 2), keepdim=True) / D.norm(dim=(1, 2), keepdim=True)


def on_device(target: Tensor, source: Tensor, counted: Counted, kept: list[KeptBasis]) -> tuple[Tensor, list[int]]:
    """What is found is the nearest, and which matrices are left."""
    found = procrustes_module._on_device(target, source, counted.replays, kept)
    assert found is not None
    for i, x in enumerate(found[0]):
        wanted = reference.nearest_with_gram(target[i], source[i])
        assert i in found[1] or (x - wanted).norm() < 2e-6 * source[i].norm()
    return found


@pytest.mark.usefixtures("on_a_device")
def test_on_a_device_bases_serve_where_one_pass_has_failed() -> None:
    """Wide matrices: one that is too ill-conditioned for one pass, and one before it that is not."""
    W = torch.stack([pair(16, 40, decades, 1e-4, 1)[0] for decades in (0, 3)])
    kept, counted = [KeptBasis(), KeptBasis()], Counted()
    for seed in range(3):
        W, left = on_device(W, moved(W, 1e-4, seed), counted, kept)
        assert left == []
    assert counted.asked == [2, 2, 2]
    assert [basis.fresh for basis in kept] == [False, True]
    for seed in range(3, 6):
        on_device(W[1:], moved(W[1:], 1e-4, seed), counted, kept[1:])
    assert counted.asked == [2, 2, 2]
    kept[1].worn = True
    on_device(W[1:], moved(W[1:], 1e-4, 6), counted, kept[1:])
    assert counted.asked == [2, 2, 2, 1]


@pytest.mark.usefixtures("on_a_device")
def test_on_a_device_one_pass_serves_where_a_basis_fails() -> None:
    """Steps that are too large for a basis, of a matrix that is well conditioned."""
    W = pair(16, 40, 0, 1e-4, 1)[0].unsqueeze(0)
    kept, counted = [KeptBasis()], Counted()
    kept[0].vectors = new_basis(W[0])
    for seed in range(3):
        _, left = on_device(W, moved(W, 0.05, seed), counted, kept)
        assert left == []
    assert counted.asked == [1, 1, 1]


@pytest.mark.usefixtures("on_a_device")
def test_on_a_device_what_is_left_is_told() -> None:
    """Found in one pass, in no way, in a basis; in no way: the general method gets the second and the last."""
    W = torch.stack([pair(16, 40, decades, 1e-4, 1)[0] for decades in (0, 3, 3, 3)])
    source = moved(W, 1e-4, 0)
    source[[1, 3]] = moved(W, 0.05, 0)[[1, 3]]
    _, left = on_device(W, source, Counted(), [KeptBasis() for _ in W])
    assert left == [1, 3]


def test_on_a_device_without_bases() -> None:
    W1, W2 = (torch.stack(x) for x in zip(*[pair(12, 40, decades, 1e-2, 1) for decades in (0, 3)], strict=True))
    assert on_device(W1, W2, Counted(), [])[1] == [1]
    square = torch.eye(3).unsqueeze(0)
    assert procrustes_module._on_device(square, square, Replays(), ()) is None
