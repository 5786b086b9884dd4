"""Small rotations in a kept basis against the float64 polar factor."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from gramscope.linalg import near as near_module
from gramscope.linalg import processor
from gramscope.linalg.kept_basis import KeptBasis, new_basis, renewed_basis, told_apart
from gramscope.linalg.near import Steps, nearest_nearby
from gramscope.linalg.procrustes import Replays, nearest_with_gram
from gramscope.linalg.replay import Replay, Tensors
from gramscope.linalg.small_rotation import LARGE
from gramscope.linalg.turning import turned_in_basis

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=["host", "accelerator"], autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything holds for both ways of going about it; the one of accelerators runs on the CPU as well."""
    if request.param == "host":
        yield "host"
    else:
        with mock.patch.object(processor, "on_host", return_value=False):
            yield "accelerator"


def weight(k: int, d: int, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(k, d, generator=generator) - 1) / d**0.5


def basis(W: Tensor) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(W @ W.mT)[1]
    return vectors


def assert_nearest(found: Tensor, target: Tensor, source: Tensor) -> None:
    """The Gram, the matrix itself (to three units of rounding and a five-hundredth of the step) and its distance."""
    wanted = reference.nearest_with_gram(target, source)
    gram = source.double().mT @ source.double()
    assert (found.double().mT @ found.double() - gram).norm() < 3e-7 * gram.norm()
    tolerance = 3 * EPS * source.double().norm() + 2e-3 * (target - source).double().norm()
    assert (found.double() - wanted).norm() < tolerance
    distance, least = ((X - target.double()).norm() for X in (found.double(), wanted))
    assert distance < (least.square() + tolerance.square()).sqrt() + EPS * source.double().norm()


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("k", "d"), [(40, 40), (30, 41), (64, 200)])
def test_a_slowly_moving_matrix_is_rarely_decomposed(
    k: int, d: int, coarse: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "has_bfloat16", lambda: coarse)
    W, velocity, kept = weight(k, d, generator), torch.zeros(k, d), KeptBasis()
    with mock.patch.object(near_module, "new_basis", wraps=new_basis) as made:
        for _ in range(40):
            D = torch.randn(k, 4, generator=generator) @ torch.randn(4, d, generator=generator)
            velocity = 0.9 * velocity + D * (1e-4 * W.norm() / D.norm())
            proposed = W + velocity
            found = nearest_nearby(W, proposed, kept)
            assert found is not None
            assert_nearest(found, W, proposed)
            W = found
    assert 1 <= made.call_count <= 3


@given(
    shape=st.sampled_from([(16, 16), (17, 30), (40, 40), (1, 5)]),
    decades=st.floats(0, 6),
    change=st.sampled_from([1e-6, 1e-4, 1e-3, 1e-2, 0.029]),
    start=st.sampled_from(["none", "right", "other", "identity"]),
    seed=st.integers(0, 10**6),
)
def test_right_or_nothing(shape: tuple[int, int], decades: float, change: float, start: str, seed: int) -> None:
    """Whatever the spectrum, the step and the basis of departure."""
    g = torch.Generator().manual_seed(seed)
    k, d = shape
    U, V = (torch.linalg.qr(torch.randn(n, k, generator=g, dtype=torch.float64))[0] for n in (k, d))
    target = ((U * torch.logspace(0, -decades, k, dtype=torch.float64)) @ V.mT).float()
    D = torch.randn(k, d, generator=g)
    source = target + D * (change * target.norm() / D.norm())
    bases = {"none": None, "right": basis(source), "other": basis(weight(k, d, g)), "identity": torch.eye(k)}
    found = nearest_nearby(target, source, KeptBasis(bases[start]))
    if found is not None:
        assert_nearest(found, target, source)


def test_dead_rows(generator: torch.Generator) -> None:
    W = weight(40, 60, generator)
    W[3] = 0
    proposed = W + 1e-4 * W.norm() / 40 * torch.randn(40, 60, generator=generator)
    proposed[3] = 0
    found = nearest_nearby(W, proposed, KeptBasis())
    assert found is not None
    assert_nearest(found, W, proposed)


def odd_pair(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Target, source, basis: clusters, decades and gaps of singular values; rotations within; signs; bases that are off."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    k = int(torch.randint(8, 90, (), generator=g))
    d = k + int(torch.randint(0, 40, (), generator=g))
    U, V = (torch.linalg.qr(draw(n, k))[0] for n in (k, d))
    least, part = 10 ** (-4 * torch.rand((), generator=g).double()), k // 2 if seed % 5 == 0 else int(0.9 * k)
    sizes = {
        1: torch.logspace(0, float(least.log10()), k, dtype=torch.float64),
        2: torch.linspace(1 / k, 1, k, dtype=torch.float64),
        4: torch.rand(k, generator=g, dtype=torch.float64),
    }.get(seed % 5, torch.cat([torch.ones(part), least * (1 - 0.9 * torch.rand(k - part, generator=g))]))
    target, change = (U * sizes) @ V.mT, 10 ** (-5 + 4 * float(torch.rand((), generator=g)))
    if seed % 2:
        K, some = draw(k - k // 2, k - k // 2), U[:, k // 2 :]
        turn = torch.linalg.matrix_exp(change * (K - K.mT)) - torch.eye(len(K))
        source = target + some @ turn @ some.mT @ target
    else:
        source = target + change * target.norm() / (k * d) ** 0.5 * draw(k, d)
    if seed % 3 == 0:
        i = int(torch.randint(0, k, (), generator=g))
        source = source - 2 * sizes[i].clamp(max=1e-3) * U[:, i : i + 1] @ V[:, i : i + 1].mT
    vectors = new_basis(source.float())
    if seed % 7 == 0:
        A = draw(k, k)
        vectors = (vectors.double() @ torch.linalg.matrix_exp(0.01 * (A - A.mT))).float()
    return target.float(), source.float(), vectors


def test_as_near_as_float64_for_odd_pairs() -> None:
    """Where the nearest matrix is not unique, to rounding, one that is as near will do."""
    found = 0
    for seed in [*range(0, 1500, 7), *range(5, 1500, 20)]:
        target, source, vectors = odd_pair(seed)
        X = nearest_nearby(target, source, KeptBasis(vectors))
        if X is not None:
            found += 1
            gram = source.double().mT @ source.double()
            assert (X.double().mT @ X.double() - gram).norm() < 3e-7 * gram.norm(), seed
            wanted = reference.nearest_with_gram(target, source)
            distance, least = ((x - target.double()).norm() for x in (X.double(), wanted))
            assert distance < least + 1e-6 * source.norm() + 2e-4 * (target - source).norm(), seed
    assert found > 120


@given(flipped=st.integers(0, 39), seed=st.integers(0, 100))
def test_a_direction_that_changes_its_sign(flipped: int, seed: int) -> None:
    """Symmetric products that are not positive definite belong to matrices that are not the nearest."""
    g = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(40, 40, generator=g, dtype=torch.float64))[0] for _ in range(2))
    sigma = torch.logspace(-3, 0, 40, dtype=torch.float64)
    target = ((U * sigma) @ V.mT).float()
    sigma[flipped] *= -1
    source = ((U * sigma) @ V.mT).float()
    found = nearest_nearby(target, source, KeptBasis(basis(source)))
    if found is not None:
        assert_nearest(found, target, source)


def test_nearest_all_along_the_way(generator: torch.Generator) -> None:
    """Steps larger than the smallest singular values, which change sign now and then."""
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        W, kept = weight(32, 32, g), KeptBasis()
        for _ in range(25):
            D = torch.randn(32, 32, generator=g)
            target = W + D * (3e-3 * W.norm() / D.norm())
            found = nearest_nearby(target, W, kept)
            if found is not None:
                assert_nearest(found, target, W)
            W = reference.nearest_with_gram(target, W).float()


def test_the_gram_does_not_creep(generator: torch.Generator) -> None:
    W, kept = weight(40, 40, generator), KeptBasis()
    before = W.double().square().sum()
    for _ in range(300):
        D = torch.randn(40, 40, generator=generator)
        found = nearest_nearby(W + D * (3e-4 * W.norm() / D.norm()), W, kept)
        assert found is not None
        W = found
    assert abs(float(W.double().square().sum() / before) - 1) < 1e-6


def test_nothing_proposed_nothing_done(generator: torch.Generator) -> None:
    W, kept = weight(40, 40, generator), KeptBasis()
    before = W.clone()
    for _ in range(1000):
        found = nearest_nearby(W, W.clone(), kept)
        assert found is not None
        W = found
    assert (W - before).abs().max() <= 1e-12
    assert kept.vectors is not None


def test_what_is_left_to_the_general_method(generator: torch.Generator) -> None:
    W = weight(20, 30, generator)
    kept = KeptBasis(basis(W))
    assert nearest_nearby(2 * W, W, kept) is None
    assert nearest_nearby(W * float("nan"), W, kept) is None
    assert nearest_nearby(W, W * float("inf"), kept) is None
    assert nearest_nearby(0 * W, 0 * W, kept) is None
    assert nearest_nearby(1e-12 * W, 1.001e-12 * W, kept) is None
    assert nearest_nearby(1e12 * W, 1.001e12 * W, kept) is None


def test_a_basis_that_has_become_useless_is_replaced(generator: torch.Generator) -> None:
    W = weight(40, 40, generator)
    proposed = W + 1e-3 * W.norm() * torch.randn(40, 40, generator=generator) / 40
    old = basis(weight(40, 40, generator))
    kept = KeptBasis(old)
    found = nearest_nearby(W, proposed, kept)
    assert found is not None
    assert_nearest(found, W, proposed)
    assert kept.vectors is not None
    assert kept.vectors is not old


def drifting(k: int, steps: int, size: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Target and source of one whitened step after another under a steady drift, which takes singular values to zero."""
    g = torch.Generator().manual_seed(3)
    W = weight(k, k, g)
    D = torch.randn(k, k, generator=g) @ torch.randn(k, k, generator=g)
    D *= size * W.norm() / D.norm()
    for _ in range(steps):
        yield W, W + D
        W = reference.nearest_with_gram(W, W + D).float()


def test_singular_values_that_are_held_at_zero() -> None:
    """Whitening keeps signs: a singular value that the drift takes through zero comes back at every step from then on."""
    kept, left_out, reflections = KeptBasis(), 0, 0
    for target, source in drifting(48, 200, 4e-4):
        found = nearest_nearby(target, source, kept)
        reflections += int(torch.linalg.det(target.double() @ source.double().mT) < 0)
        if found is None:
            left_out += 1
        else:
            assert_nearest(found, target, source)
    assert reflections >= 40
    assert left_out < 20


def test_the_first_direction_is_reflected(generator: torch.Generator) -> None:
    U, V = (torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    sigma = torch.linspace(0, 1, 40, dtype=torch.float64)
    sigma[0] = 3e-4
    target = ((U * sigma) @ V.mT).float()
    sigma[0] = -1e-4
    source = ((U * sigma) @ V.mT).float()
    found = nearest_nearby(target, source, KeptBasis(new_basis(source)))
    assert found is not None
    assert_nearest(found, target, source)


def test_a_renewed_basis_is_orthonormal_and_nearer_to_eigenvectors(generator: torch.Generator) -> None:
    W = weight(64, 80, generator)
    vectors = new_basis(W)
    W = W + 3e-3 * W.norm() * torch.randn(64, 80, generator=generator) / 64

    def apart(V: Tensor) -> float:
        """How far ``W Wᵀ`` is from diagonal in the basis, relative to its diagonal; near eigenvalues aside."""
        X = V.double().mT @ W.double()
        G = X @ X.mT
        q = G.diagonal()
        far = (q - q.unsqueeze(-1)).abs() > 0.3 * (q + q.unsqueeze(-1))
        return float((G * far / (q * q.unsqueeze(-1)).sqrt()).norm())

    before = apart(vectors)
    for _ in range(2):
        renewed = renewed_basis({"source": W, "vectors": vectors})
        vectors = renewed["vectors"]
        assert float(renewed["residual"]) < 1e-2
    assert (vectors.double().mT @ vectors.double() - torch.eye(64)).norm() < 1e-5
    assert apart(vectors) < 0.2 * before
    corner = renewed["corner"]
    assert (corner - corner.diag().diag()).norm() > 1e-4 * corner.norm()
    first = told_apart(vectors.clone(), corner).double().mT[: len(corner)] @ W.double()
    turned = first @ first.mT
    assert (turned - turned.diag().diag()).norm() < 1e-6 * turned.norm()
    assert turned.diag().diff().min() > 0
    assert (vectors.mT @ W).square().sum(-1).diff().min() > -0.1


def test_bases_that_never_do_are_tried_less_and_less(generator: torch.Generator) -> None:
    W, kept = weight(40, 40, generator), KeptBasis()
    with mock.patch.object(near_module, "new_basis", wraps=new_basis) as made:
        for _ in range(100):
            D = torch.randn(40, 40, generator=generator)
            assert nearest_nearby(W + D * (0.029 * W.norm() / D.norm()), W, kept) is None
    assert 8 <= made.call_count <= 12  # at most every sixteenth step, and not less


def test_a_basis_is_fresh_when_it_is_about_to_be_used() -> None:
    vectors = torch.eye(2)
    assert KeptBasis(vectors).fresh
    for other in (KeptBasis(), KeptBasis(vectors, worn=True), KeptBasis(vectors, pause=1)):
        assert not other.fresh


def test_a_basis_is_renewed_before_it_fails(generator: torch.Generator) -> None:
    """Bases that serve three steps: the fourth is tried now and then, in case they have come to serve more."""
    W, kept, served, failed = weight(8, 8, generator), KeptBasis(), 0, 0

    def turned(given: Tensors) -> dict[str, Tensor]:
        nonlocal served, failed
        served += 1
        failed += served > 3
        return turned_in_basis(given if served <= 3 else {**given, "target": 2 * given["target"]})

    def renewed(given: Tensors) -> dict[str, Tensor]:
        nonlocal served
        served = 0
        return renewed_basis(given)

    for _ in range(100):
        assert nearest_nearby(W, W, kept, Steps(turned, renewed)) is not None
    assert failed <= 18


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_as_on_the_cpu() -> None:
    steps = Steps(Replay(turned_in_basis), Replay(renewed_basis))
    kept, left_out = KeptBasis(), 0
    for target, source in drifting(160, 60, 4e-4):
        found = nearest_nearby(target.cuda(), source.cuda(), kept, steps)
        if found is None:
            left_out += 1
        else:
            assert_nearest(found.cpu(), target, source)
    assert left_out < 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_several_matrices_on_cuda() -> None:
    """Results are lent from one recording: that of the second must not overwrite that of the first."""
    k, replays, kept = LARGE, Replays(), [KeptBasis(), KeptBasis()]
    g = torch.Generator().manual_seed(0)
    source = torch.stack([weight(k, k, g) for _ in range(2)])
    for step in range(4):
        target = source + 1e-5 * torch.randn(source.shape, generator=g)
        given = [x.cuda() if step % 2 else x.mT.contiguous().cuda().mT for x in (target, source)]  # also transposed
        found = nearest_with_gram(given[0], given[1], replays=replays, kept=kept).cpu()
        for X, T, W in zip(found, target, source, strict=True):
            assert_nearest(X, T, W)
        source = found
    assert all(basis.vectors is not None for basis in kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_whatever_products_are_allowed_to_round(generator: torch.Generator) -> None:
    """Many training programs allow float32 products in TF32."""
    target = weight(160, 160, generator).cuda()
    source = target + 1e-5 * torch.randn(160, 160, generator=generator).cuda()
    before, found = torch.get_float32_matmul_precision(), []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            found.append(turned_in_basis({"target": target, "source": source, "vectors": new_basis(source)})["nearest"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(*found)
