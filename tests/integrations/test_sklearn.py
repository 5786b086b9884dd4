"""The scorer for scikit-learn against plain calls."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

import gramscope as gs
from gramscope.integrations.sklearn import TargetLinearityScorer
from refusals import assert_refused

X, Y = load_iris(return_X_y=True)


def test_scorer_measures_the_features() -> None:
    reduced = PCA(2).fit(X)
    H = reduced.transform(X)
    expected = LinearRegression().fit(H, X[:, 0]).score(H, X[:, 0])
    assert TargetLinearityScorer()(reduced, X, X[:, 0]) == pytest.approx(expected)
    expected = float(gs.target_linearity(H, Y, intercept=True))
    assert TargetLinearityScorer()(reduced, X, Y) == pytest.approx(expected)
    names = np.array(["x", "y", "z"])[Y]
    assert TargetLinearityScorer()(reduced, X, names) == pytest.approx(expected)
    held_out = TargetLinearityScorer(folds=5)(reduced, X, Y)
    assert expected - 0.2 < held_out < expected


def test_scorer_takes_a_function_and_refuses_estimators_without_features() -> None:
    linear = LinearRegression().fit(X, X[:, 0])
    assert TargetLinearityScorer(features=lambda _, rows: rows)(linear, X, X[:, 0]) == pytest.approx(1.0)
    assert_refused("LinearRegression has no transform", TargetLinearityScorer(), linear, X, X[:, 0])


def test_scorer_in_cross_validation() -> None:
    pipeline = make_pipeline(PCA(2), LogisticRegression())
    scorer = TargetLinearityScorer(features=lambda estimator, rows: estimator[:-1].transform(rows))
    scores = cross_val_score(pipeline, X, Y, cv=3, scoring=scorer)
    assert 0.3 < scores.mean() <= 1
