"""Target linearity, surrogate and linear fits against scikit-learn and the written-out definitions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from torch import Tensor, nn

import gramscope as gs
import reference
from cases import randoms, refused, target_linearity_from_moments
from gramscope.errors import InputError, NumericalError, RescueWarning, ResultWarning
from gramscope.linalg import arrays as rows_module
from gramscope.linalg.moments import moments
from gramscope.measures.linearity import (
    fit_linear,
    gram_induced_error,
    held_out_target_linearity,
    label_rows,
    surrogate_from_moments,
    target_rows,
)


def data(n: int, d: int, c: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    H, E = randoms((n, d), (n, c), seed=seed)
    H = H + 0.5
    return H, H[:, :1] + E * torch.arange(1, c + 1)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.1, 100.0])
@pytest.mark.parametrize("duplicates", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_agrees_with_scikit_learn(intercept: bool, ridge: float, duplicates: int, dtype: torch.dtype) -> None:
    H, Y = data(200, 12, 4)
    H = torch.cat([H, H[:, :duplicates]], 1).to(dtype)
    h, y = H.double().numpy(), Y.numpy()
    model = Ridge(ridge, fit_intercept=intercept) if ridge else LinearRegression(fit_intercept=intercept)
    expected = r2_score(y, model.fit(h, y).predict(h), multioutput="variance_weighted")
    assert float(gs.target_linearity(H, Y, ridge=ridge, intercept=intercept)) == pytest.approx(expected, abs=1e-11)
    assert float(gs.target_linearity(h, y, ridge, intercept)) == pytest.approx(expected, abs=1e-11)
    by_moments = target_linearity_from_moments(moments(H, Y), ridge, intercept)
    assert float(by_moments) == pytest.approx(expected, abs=1e-11)


def test_labels_equal_their_centred_one_hot(generator: torch.Generator) -> None:
    H = torch.randn(60, 5, dtype=torch.float64, generator=generator) + 1
    labels = torch.randint(4, (60,), generator=generator)
    expected = gs.target_linearity(H, target_rows(labels).block(0, len(labels)))
    assert torch.allclose(gs.target_linearity(H, labels), expected)
    assert torch.allclose(gs.target_linearity(H.numpy(), labels.numpy()), expected)
    by_classes = moments(H, label_rows(labels)).with_centred_targets()
    assert torch.allclose(target_linearity_from_moments(by_classes), expected)
    assert torch.allclose(surrogate_from_moments(by_classes), gs.surrogate(H, labels))


def test_rank_deficient_float32_features() -> None:
    # The published failure: an explicit inverse gave −2.7 here.
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(500, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    y = torch.randn(500, generator=generator)
    linearity = gs.target_linearity(H, y)
    assert fit_linear(H, y).rank == 8
    exact = reference.target_linearity(torch.linalg.svd(H.double())[0][:, :8], y.double()[:, None], 0.0, False)
    assert torch.allclose(linearity, exact, atol=1e-6)
    assert -0.1 < float(gs.target_linearity(H, y)) < 1


@pytest.mark.parametrize(("n", "d", "intercept"), [(5, 8, False), (5, 5, False), (5, 4, True), (5, 8, True)])
def test_warns_when_any_target_fits(n: int, d: int, intercept: bool) -> None:
    H, Y = data(n, d, 1)
    with pytest.warns(ResultWarning, match="5 samples, features of rank 5"):
        assert float(gs.target_linearity(H, Y, intercept=intercept)) == pytest.approx(1.0)
    assert float(gs.target_linearity(H, Y, ridge=100.0, intercept=intercept)) < 1  # no warning: not for any target
    H, Y = data(n, n - 1 - intercept, 1)  # no warning: one direction is left
    assert float(gs.target_linearity(H, Y, intercept=intercept)) < 1


def test_held_out_equals_scikit_learn() -> None:
    H, Y = data(80, 6, 3)
    test_H, test_Y = data(40, 6, 3, seed=1)
    fit = fit_linear(H, Y, ridge=0.5, intercept=True)
    model = Ridge(0.5).fit(H, Y)
    expected = r2_score(test_Y, model.predict(test_H), multioutput="variance_weighted")
    assert float(held_out_target_linearity(fit, test_H, test_Y)) == pytest.approx(expected, abs=1e-11)
    assert np.allclose(fit.predict(test_H).numpy(), model.predict(test_H))
    # on the training data it is the target linearity itself
    assert torch.allclose(held_out_target_linearity(fit, H, Y), gs.target_linearity(H, Y, 0.5, True))


def test_held_out_labels_are_coded_as_in_training(generator: torch.Generator) -> None:
    H = torch.randn(90, 4, dtype=torch.float64, generator=generator)
    labels = (H[:, 0] > 0.3).long() + 5
    labels[:30] = 8
    test_H, test_labels = H[:50] + 0.1, labels[:50]
    fit = fit_linear(H, labels)
    frequency = torch.tensor([(labels == c).double().mean() for c in (5, 6, 8)], dtype=torch.float64)
    Y = torch.stack([(test_labels == c).double() for c in (5, 6, 8)], 1) - frequency
    residual = (Y - test_H @ fit.beta).square().sum()
    expected = 1 - residual / (Y - Y.mean(0)).square().sum()
    assert torch.allclose(held_out_target_linearity(fit, test_H, test_labels), expected)
    with pytest.raises(InputError, match=r"labels \[7\] that are not among"):
        held_out_target_linearity(fit, test_H, test_labels + (test_labels == 6))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("outputs", [None, 2, 9])
@pytest.mark.parametrize("n", [30, 4])
def test_surrogate_equals_the_gram_form(n: int, outputs: int | None, center: bool) -> None:
    H, Y = data(n, 6, 3)
    W = None if outputs is None else data(outputs, 6, 1, seed=3)[0]
    h = H - H.mean(0) if center else H
    x = h if W is None else h @ W.T
    G = x @ x.T
    expected = torch.trace(Y.T @ G @ Y)
    assert torch.allclose(gs.surrogate(H, Y, W, center=center), expected, rtol=1e-12)
    normalized = expected / (G.norm() * (Y @ Y.T).norm())
    assert torch.allclose(gs.surrogate(H, Y, W, normalized=True, center=center), normalized, rtol=1e-12)
    if W is None:
        m = moments(H, Y)
        assert torch.allclose(surrogate_from_moments(m, center=center), expected, rtol=1e-11)
        assert torch.allclose(surrogate_from_moments(m, True, center), normalized, rtol=1e-11)


def test_gram_induced_error_is_the_ridge_residual() -> None:
    H, Y = data(25, 6, 2)
    W = data(3, 6, 1, seed=3)[0]
    for x, weight in ((H, None), (H @ W.T, W)):
        G = x @ x.T
        inverse = torch.linalg.inv(G + 0.7 * torch.eye(25, dtype=torch.float64))
        expected = 0.49 * torch.trace(Y.T @ inverse @ inverse @ Y)
        assert torch.allclose(gram_induced_error(H, Y, 0.7, weight), expected, rtol=1e-10)
    total = (Y - Y.mean(0)).square().sum()
    assert torch.allclose(gram_induced_error(H, Y, 0.7), (1 - gs.target_linearity(H, Y, 0.7)) * total)
    refused(gram_induced_error, H, Y, 0.0, match="ridge > 0")


GOOD_Y = torch.tensor([0, 1, 1, 2])
BAD_H: list[tuple[object, str]] = [
    (torch.full((4, 2), float("nan")), "8 NaN or infinite"),
    (torch.tensor([[1.0], [float("inf")], [0.0], [1.0]]), "1 NaN or infinite"),
    (torch.ones(4, 2, dtype=torch.int64), "integer dtype"),
    (torch.ones(4, 2, dtype=torch.complex64), "complex"),
    (torch.ones(4), r"H\[:, None\]"),
    (torch.ones(4, 2, 3), r"H.flatten\(1\)"),
    (torch.ones(5, 2), "there are 5 samples|same samples"),
    (torch.ones(0, 2), "empty"),
    (torch.ones(4, 0), "empty"),
    (torch.ones(4, 2, device="meta"), "different devices: H on meta, Y on cpu"),
]


@pytest.mark.parametrize(("H", "message"), BAD_H)
@pytest.mark.parametrize("measure", [gs.target_linearity, gs.surrogate, fit_linear, gs.neural_collapse])
def test_bad_features_are_named(measure: object, H: Tensor, message: str) -> None:
    refused(measure, H, GOOD_Y, match=message.replace("Y on", "(Y|labels) on"))


def test_bad_arguments_are_named() -> None:
    H, Y = data(10, 3, 2)
    for ridge in (-1.0, "a", None):
        refused(gs.target_linearity, H, Y, ridge=ridge, match="ridge must be")
    refused(gs.target_linearity, [[1.0], [1.0, 2.0]], Y, match="rows have different lengths")
    refused(gs.target_linearity, np.ma.masked_greater(H.numpy(), 0.5), Y, match="masked")
    with pytest.raises(NumericalError, match="H has entries up to"):
        fit_linear(torch.sign(H) * 1.7e308, Y)
    refused(gs.surrogate, H, Y, W=torch.ones(2, 4), match=r"W of shape \(2, 4\) does not act on H with 3")
    fit = fit_linear(H, Y)
    refused(fit.predict, torch.ones(2, 4), match="the fit was made on 3")
    refused(held_out_target_linearity, fit, H, torch.arange(10), match="2 float targets")
    refused(target_linearity_from_moments, moments(H, torch.full((10, 1), 0.1)), match="constant")


def test_results_carry_no_graph_and_leave_inputs_alone() -> None:
    H, Y = data(20, 3, 1)
    H.requires_grad_()
    before = H.detach().clone()
    assert not gs.target_linearity(H, Y).requires_grad
    assert not gs.surrogate(H, Y).requires_grad
    assert torch.equal(H, before)


def test_rounding_of_layer_normalised_features_is_no_feature() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(90, 24, generator=generator, dtype=torch.float64)
    H = torch.nn.functional.layer_norm(exact, (24,)).float()  # the features sum to zero, up to rounding
    y = torch.randint(3, (90,), generator=generator)
    direct = float(gs.target_linearity(H, y))
    table = gs.measure(torch.nn.Linear(24, 3), (H, y), measures=["target_linearity"])
    assert direct == pytest.approx(table["(model)"]["target_linearity"], abs=1e-6)
    without = float(gs.target_linearity(H[:, :-1], y))  # the last feature follows from the others
    assert direct == pytest.approx(without, abs=1e-5)


@pytest.mark.parametrize("difference", [1e-5, 1e-6, 1e-7, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("moments_", [False, True])
def test_collinear_features_are_right_or_announced(difference: float, dtype: torch.dtype, moments_: bool) -> None:
    a, b, noise = (torch.randn(300, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3))
    H, y = torch.stack([a, a + difference * b], 1).to(dtype), b + 0.3 * noise
    truth = float(gs.target_linearity(torch.stack([a, b], 1), y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if moments_:
            eps = torch.finfo(dtype).eps
            found = float(target_linearity_from_moments(moments(H, y[:, None]), eps=eps))
        else:
            found = float(gs.target_linearity(H, y))
    announced = any(issubclass(w.category, RescueWarning) for w in caught)
    lost = dtype == torch.float32 and difference < 1e-8  # float32 holds nothing of the difference
    assert announced or abs(found - truth) < 1e-3 or lost
    if dtype == torch.float64 and not moments_:
        assert found == pytest.approx(truth, abs=1e-6)
        assert not announced


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("offset", "difference"), [(1e4, 1e-6), (1e6, 1e-8), (1e7, 1e-7)])
def test_collinear_features_far_from_zero_are_right_or_announced(offset: float, difference: float, seed: int) -> None:
    """Centring costs digits: the products of features of length 1e6 leave rounding where the short direction was."""
    a, b, noise = randoms((40, 3), (40,), (40,), seed=seed)
    H, y = torch.cat([a, (a[:, 0] + difference * b)[:, None]], 1) + offset, b + 0.3 * noise
    truth = float(gs.target_linearity(torch.cat([a, b[:, None]], 1), y, intercept=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = float(gs.target_linearity(H, y, intercept=True))
    announced = any(issubclass(w.category, RescueWarning) for w in caught)
    assert announced or found == pytest.approx(truth, abs=2e-3)


@pytest.mark.parametrize("intercept", [False, True])
def test_scales_of_columns_do_not_matter(intercept: bool) -> None:
    H = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = H @ torch.ones(3, dtype=torch.float64) + 0.2 * torch.sin(7 * H[:, 0])
    scaled = H * torch.tensor([1.0, 1e-8, 1e8], dtype=torch.float64)
    truth = float(gs.target_linearity(H, y, intercept=intercept))
    for scale in (1.0, 1e-60):
        assert float(gs.target_linearity(scaled * scale, y, intercept=intercept)) == pytest.approx(truth, abs=1e-9)
    fit = gs.fit_linear(scaled, y, intercept=intercept)
    assert float(gs.held_out_target_linearity(fit, scaled, y)) == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 2.0])
@pytest.mark.parametrize("intercept", [False, True])
def test_null_is_the_trace_of_the_hat_matrix(ridge: float, intercept: bool) -> None:
    (X,) = randoms((30, 4))
    table = gs.measure(
        nn.Sequential(nn.Linear(4, 2)).double(), (X, torch.arange(30) % 2), measures=["target_linearity_null"],
        ridge=ridge, intercept=intercept, progress=False,
    )  # fmt: skip
    H = X - X.mean(0) if intercept else X
    hat = H @ torch.linalg.inv(H.mT @ H + ridge * torch.eye(4, dtype=torch.float64)) @ H.mT
    assert table["0"]["target_linearity_null"] == pytest.approx((float(hat.trace()) + intercept) / 30, rel=1e-12)


def as_targets(Y: object, n: int | None = None, classes: Tensor | int | None = None) -> Tensor:
    rows = target_rows(Y, n, classes)  # type: ignore[arg-type]
    return rows.block(0, rows.n)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int16])
def test_labels_become_centred_one_hot(dtype: torch.dtype) -> None:
    labels = torch.tensor([4, 2, 9, 2, 2], dtype=dtype)
    expected = torch.nn.functional.one_hot(torch.tensor([1, 0, 2, 0, 0])).double()
    assert torch.allclose(as_targets(labels), expected - expected.mean(0))
    assert torch.allclose(as_targets(labels.numpy()), expected - expected.mean(0))


def test_booleans_are_labels_and_integer_matrices_values() -> None:
    assert as_targets(torch.tensor([True, False])).tolist() == [[-0.5, 0.5], [0.5, -0.5]]
    one_hot = torch.nn.functional.one_hot(torch.tensor([0, 1, 1]))
    assert torch.equal(as_targets(one_hot), one_hot.double())


def test_given_classes_are_sorted_and_give_empty_columns() -> None:
    expected = [[-0.5, 0.0, 0.0, 0.5, 0.0], [0.5, 0.0, 0.0, -0.5, 0.0]]
    for classes in (5, torch.tensor([4, 3, 0, 1, 2])):
        assert as_targets(torch.tensor([3, 0]), classes=classes).tolist() == expected


def test_blocks_count_the_same_classes(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    labels = torch.randint(-3, 4, (50,), generator=generator)
    whole = as_targets(labels)
    monkeypatch.setattr(rows_module, "BLOCK_ENTRIES", 7)
    assert torch.allclose(torch.cat(list(target_rows(labels).blocks())), whole, atol=1e-15)


BAD: list[tuple[object, str]] = [
    (torch.zeros(4, dtype=torch.int64), "one class only"),
    (torch.ones(4), "constant over the 4 samples"),
    (torch.ones(4, 2), "constant over the 4 samples"),
    (torch.tensor([1.0, float("nan"), 2.0, 0.0]), "1 NaN or infinite entries"),
    (torch.tensor([1.0, float("inf"), 2.0, 0.0]), "1 NaN or infinite entries"),
    (torch.empty(0), "empty"),
    (torch.empty(0, dtype=torch.int64), "empty"),
    (torch.tensor([1j, 2, 3, 4]), "complex"),
    (torch.tensor([[1], [2], [3], [4]]), r"squeeze\(1\) for labels"),
    (torch.zeros(4, 2, 2), "vector or a matrix"),
    (torch.tensor(1.0), "vector or a matrix"),
    (["cat", "dog"], "pass numbers"),
    (torch.tensor([0.0, 1.0]).to_sparse(), "sparse"),
]


@pytest.mark.parametrize(("Y", "message"), BAD)
def test_bad_targets_are_named(Y: Tensor, message: str) -> None:
    refused(as_targets, Y, match=message)


def test_lengths_and_classes_must_fit() -> None:
    refused(as_targets, torch.tensor([0, 1, 2]), n=5, match="there are 5 samples")
    with pytest.raises(InputError, match=r"labels \[7\] that are not among the classes \[0, 1, 2\]"):
        as_targets(torch.tensor([0, 1, 7]), classes=3)
    refused(as_targets, torch.tensor([0.0, 1.0]), classes=2, match="goes with integer labels")
    refused(label_rows, torch.tensor([0.5, 1.0]), match="vector of integer labels")


def test_floats_of_any_layout_stay() -> None:
    y = np.arange(5.0)
    y.flags.writeable = False
    expected = torch.arange(5.0).double()[:, None]
    layouts = [y, y[::-1].copy()[::-1], y.astype(">f4"), y.astype(np.longdouble), y.astype(np.float32)[:, None]]
    for same in (*layouts, y.tolist(), torch.arange(5.0)):
        assert torch.equal(as_targets(same), expected)
