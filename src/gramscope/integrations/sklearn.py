"""A scorer for scikit-learn: target linearity of the features that an estimator gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gramscope.errors import InputError, load_extra
from gramscope.measures.linearity import fit_linear, held_out_target_linearity, target_linearity

load_extra("sklearn", "sklearn")

from sklearn.base import is_classifier  # noqa: E402
from sklearn.model_selection import KFold, StratifiedKFold  # noqa: E402


@dataclass(frozen=True)
class TargetLinearityScorer:
    """Target linearity of an estimator's features, as ``scoring=`` of ``GridSearchCV`` and ``cross_validate``.

    Features are ``estimator.transform(X)``, or what ``features`` gives, such as the hidden features of a net.

    Args:
        ridge: λ of the linear fit, on the scale of ``HᵀH``.
        intercept: fit a constant as well.
        folds: fit on all but one of this many parts of the scored rows and measure on that part, averaged. By default the fit
            is measured on its own rows ([Gram] Definition 2), which needs more rows than features.
        features: a function ``(estimator, X) -> [n, d]`` for estimators without ``transform``.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.decomposition import PCA
    >>> X, y = load_iris(return_X_y=True)
    >>> round(TargetLinearityScorer()(PCA(2).fit(X), X, y), 3)
    0.534
    """

    ridge: float = 0.0
    intercept: bool = True
    folds: int | None = None
    features: Callable[[Any, Any], Any] | None = None

    def __call__(self, estimator: Any, X: Any, y: Any) -> float:
        """The score of a fitted estimator on rows and targets."""
        if self.features is None and not hasattr(estimator, "transform"):
            raise InputError(
                f"{type(estimator).__name__} has no transform(); give TargetLinearityScorer a function "
                "features=(estimator, X) -> [n, d]"
            )
        H = estimator.transform(X) if self.features is None else self.features(estimator, X)
        H = np.asarray(H.toarray() if hasattr(H, "toarray") else H)
        Y = np.asarray(y)
        labels = is_classifier(estimator) or not np.issubdtype(Y.dtype, np.floating)
        if labels:
            Y = np.unique(Y, return_inverse=True)[1]
        if self.folds is None:
            return float(target_linearity(H, Y, self.ridge, self.intercept))
        splitter = (StratifiedKFold if labels else KFold)(self.folds, shuffle=True, random_state=0)
        scores = [
            held_out_target_linearity(fit_linear(H[a], Y[a], self.ridge, self.intercept), H[b], Y[b])
            for a, b in splitter.split(H, Y)
        ]
        return float(np.mean([float(score) for score in scores]))
