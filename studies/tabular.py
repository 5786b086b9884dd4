"""VCL beside scikit-learn's own net, gradient boosting and xRFM on the small sets that scikit-learn ships or generates.

python studies/tabular.py [--sets iris,wine] [--folds 5] [--out table.jsonl]

Every estimator has its defaults; xRFM (pip install xrfm) chooses its iteration on a fifth of its training rows. The score is
accuracy, or R² for regression, over the folds of one shuffled cross-validation; ± is the standard error over folds (whose
training sets overlap, so that it is somewhat too small).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, StratifiedKFold, cross_validate, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gramscope.integrations.sklearn import VCLClassifier, VCLRegressor

SETS: dict[str, Callable[[], Any]] = {
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "breast_cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "moons": lambda: datasets.make_moons(600, noise=0.25, random_state=0),
    "classification": lambda: datasets.make_classification(800, 20, n_informative=8, n_classes=3, random_state=0),
    "hastie": lambda: datasets.make_hastie_10_2(800, random_state=0),
    "gaussian_quantiles": lambda: datasets.make_gaussian_quantiles(n_samples=800, n_features=6, random_state=0),
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda: datasets.make_friedman1(800, noise=1.0, random_state=0),
    "friedman2": lambda: datasets.make_friedman2(800, noise=50.0, random_state=0),
    "sparse_uncorrelated": lambda: datasets.make_sparse_uncorrelated(800, random_state=0),
}


class XRFM(BaseEstimator):
    """xRFM with its defaults, as an estimator of scikit-learn; it needs rows of its own to choose an iteration by."""

    def fit(self, X: Any, y: Any) -> XRFM:
        """Fit on four fifths of the rows."""
        from xrfm import xRFM

        self.classes_, labels = np.unique(y, return_inverse=True)
        y = labels if is_classifier(self) else y
        stratify = y if is_classifier(self) else None
        X, X_val, y, y_val = train_test_split(X, y, test_size=0.2, random_state=0, stratify=stratify)
        self.model_ = xRFM(device="cpu", random_state=0, verbose=False).fit(X, y, X_val, y_val)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Labels or values."""
        found = np.asarray(self.model_.predict(X)).reshape(len(X))
        return self.classes_[found.astype(int)] if is_classifier(self) else found


class XRFMClassifier(ClassifierMixin, XRFM):
    """The classifier."""


class XRFMRegressor(RegressorMixin, XRFM):
    """The regressor."""


def estimators(classes: bool) -> dict[str, Any]:
    """The estimators with their defaults; MLPs get the standardisation that VCL does inside."""
    if classes:
        return {
            "VCL": VCLClassifier(random_state=0),
            "MLP": make_pipeline(StandardScaler(), MLPClassifier(random_state=0)),
            "HistGradientBoosting": HistGradientBoostingClassifier(random_state=0),
            "xRFM": make_pipeline(StandardScaler(), XRFMClassifier()),
        }
    mlp = TransformedTargetRegressor(MLPRegressor(random_state=0), transformer=StandardScaler())
    return {
        "VCL": VCLRegressor(random_state=0),
        "MLP": make_pipeline(StandardScaler(), mlp),
        "HistGradientBoosting": HistGradientBoostingRegressor(random_state=0),
        "xRFM": make_pipeline(
            StandardScaler(), TransformedTargetRegressor(XRFMRegressor(), transformer=StandardScaler())
        ),
    }


def main() -> None:
    """Print one row of the table for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="names, separated by commas")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append results as JSON lines")
    options = parser.parse_args()
    unknown = [name for name in options.sets.split(",") if name not in SETS]
    if unknown:
        parser.error(f"unknown sets {', '.join(unknown)}; there are: {', '.join(SETS)}")
    heads = ["set", "rows × features", *estimators(True), "seconds a fit"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in options.sets.split(","):
        X, y = SETS[name]()
        found = estimators(y.dtype.kind in "iu" or name == "hastie")
        splitter = StratifiedKFold if is_classifier(found["VCL"]) else KFold
        row: dict[str, Any] = {"set": name, "rows": X.shape[0], "features": X.shape[1]}
        for label, estimator in found.items():
            folds = splitter(options.folds, shuffle=True, random_state=0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the MLP's default of 200 epochs
                start = time.process_time()
                result = cross_validate(estimator, X, y, cv=folds, error_score="raise")
            scores = np.asarray(result["test_score"])
            error = scores.std(ddof=1) / len(scores) ** 0.5
            seconds = (time.process_time() - start) / len(scores)
            row[label] = {"score": scores.mean(), "error": error, "seconds": seconds}
        cells = [f"{row[k]['score']:.3f} ± {row[k]['error']:.3f}" for k in found]
        times = " / ".join(f"{row[k]['seconds']:.1f}" for k in found)
        print(f"| {name:19} | {X.shape[0]} × {X.shape[1]} | {' | '.join(cells)} | {times} |", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
