"""The estimators keep scikit-learn's rules, and the scorer gives the measure of the estimator's features."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_classification
from sklearn.decomposition import PCA
from sklearn.exceptions import SkipTestWarning
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator

import gramscope as gs
from gramscope.integrations.sklearn import TargetLinearityScorer, VCLClassifier, VCLRegressor
from refusals import assert_refused

X, Y = load_iris(return_X_y=True)
SMALL: dict[str, Any] = {"hidden_layer_sizes": (16,), "max_epochs": 20, "random_state": 0}


def classifier(**options: Any) -> VCLClassifier:
    return VCLClassifier(**{**SMALL, **options})


@pytest.mark.parametrize("estimator", [classifier(), VCLRegressor(**SMALL)])
def test_scikit_learn_accepts_the_estimators(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)  # checks of other array libraries
        check_estimator(estimator)


def test_defaults_classify_and_regress() -> None:
    assert VCLClassifier(random_state=0).fit(X[::2], Y[::2]).score(X[1::2], Y[1::2]) > 0.9
    x, y = load_diabetes(return_X_y=True)
    twice = np.stack([y, -2 * y], 1)
    found = VCLRegressor(random_state=0, max_epochs=20).fit(x[::2], twice[::2])
    assert found.predict(x).shape == twice.shape
    assert found.score(x[1::2], twice[1::2]) > 0.3


def test_sparse_rows_and_frames_give_what_arrays_give() -> None:
    expected = classifier().fit(X, Y).predict_proba(X)
    found = classifier().fit(sparse.csr_matrix(X), Y).predict_proba(sparse.csc_matrix(X))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    frame, names = pd.DataFrame(X, columns=list("abcd")), np.array(["x", "y", "z"])[Y]
    fitted = classifier().fit(frame, names)
    assert list(fitted.feature_names_in_) == list("abcd")
    assert list(fitted.classes_) == ["x", "y", "z"]
    np.testing.assert_allclose(fitted.predict_proba(frame), expected, rtol=1e-6)


def test_pipelines_grids_and_processes() -> None:
    grid = GridSearchCV(
        make_pipeline(MinMaxScaler(), classifier()),
        {"vclclassifier__gamma": [0.01, 0.1]},
        cv=2,
        n_jobs=2,
        error_score="raise",
    ).fit(X, Y)
    assert grid.best_score_ > 0.7
    score = TargetLinearityScorer()(grid, X, Y)
    assert score == pytest.approx(TargetLinearityScorer()(grid.best_estimator_, X, Y))


def test_partial_fit_goes_on_after_pickling() -> None:
    halves = [(X[::2], Y[::2]), (X[1::2], Y[1::2])]
    one = classifier().partial_fit(*halves[0], classes=[0, 1, 2])
    other = pickle.loads(pickle.dumps(one))
    for _ in range(3):
        for half in halves:
            one.partial_fit(*half)
            other.partial_fit(*half)
    np.testing.assert_array_equal(one.predict_proba(X), other.predict_proba(X))
    assert one.n_iter_ == 7
    fresh = clone(one).fit(X, Y)
    before = fresh.score(X, Y)
    assert fresh.partial_fit(X, Y).score(X, Y) >= before - 0.1
    assert_refused("not those of the first call", one.partial_fit, X, Y, classes=[0, 1])
    assert_refused(r"labels \[7\]", one.partial_fit, X[:1], [7])
    assert_refused("needs classes=", classifier().partial_fit, X, Y)


def test_early_stopping_keeps_the_best_weights() -> None:
    x, y = make_classification(1200, 6, flip_y=0.3, random_state=0)
    stopped = classifier(max_epochs=200, n_iter_no_change=2, hidden_layer_sizes=(4,)).fit(x, y)
    assert stopped.n_iter_ < 200
    assert 0.6 < stopped.best_validation_score_ < 0.95
    never = classifier(early_stopping=False, max_epochs=3).fit(x, y)
    assert never.n_iter_ == 3
    assert not hasattr(never, "best_validation_score_")


def test_rows_of_float32_train_in_float32() -> None:
    fitted = classifier().fit(X.astype(np.float32), Y)
    assert next(fitted.network_.model.parameters()).dtype == torch.float32
    assert fitted.score(X, Y) > 0.7


def test_scorer_measures_the_features() -> None:
    fitted = classifier().fit(X, Y)
    H = fitted.features(X)
    assert H.shape == (150, 16)
    expected = float(gs.target_linearity(H, Y, intercept=True))
    assert TargetLinearityScorer()(fitted, X, Y) == pytest.approx(expected)
    names = np.array(["x", "y", "z"])[Y]
    assert TargetLinearityScorer()(fitted, X, names) == pytest.approx(expected)
    held_out = TargetLinearityScorer(folds=5)(fitted, X, Y)
    assert expected - 0.2 < held_out < expected
    assert -1 < cross_val_score(classifier(), X, Y, cv=2, scoring=TargetLinearityScorer()).mean() <= 1
    reduced = PCA(2).fit(X)
    expected = LinearRegression().fit(reduced.transform(X), X[:, 0]).score(reduced.transform(X), X[:, 0])
    assert TargetLinearityScorer()(reduced, X, X[:, 0]) == pytest.approx(expected)
    with_function = TargetLinearityScorer(features=lambda _, rows: rows)
    linear = LinearRegression().fit(X, X[:, 0])
    assert with_function(linear, X, X[:, 0]) == pytest.approx(1.0)
    assert_refused("neither features", TargetLinearityScorer(), linear, X, X[:, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"gamma": -1.0}, "gamma=-1.0"),
        ({"validation_fraction": 1.5}, "between 0 and 1.0"),
        ({"early_stopping": "yes"}, "early_stopping='yes'"),
        ({"hidden_layer_sizes": (0,)}, r"hidden_layer_sizes=\(0,\): give positive"),
        ({"hidden_layer_sizes": 1.5}, r"hidden_layer_sizes=1\.5: give positive"),
        ({"hidden_layer_sizes": [[3]]}, r"hidden_layer_sizes=\[\[3\]\]: give positive"),
        ({"hidden_layer_sizes": [[3], [4, 5]]}, r"hidden_layer_sizes=\[\[3\], \[4, 5\]\]: give positive"),
        ({"hidden_layer_sizes": None}, r"hidden_layer_sizes=None: give positive"),
        ({"activation": "cubic"}, "cubic"),
    ],
)
def test_wrong_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    assert_refused(message, classifier(**options).fit, X, Y)
