"""scikit-learn estimators trained by virtual covariance learning, and a scorer of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.nn import functional as F
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.integrations.extras import load_extra
from gramscope.measures.fit import fit_linear, held_out_target_linearity
from gramscope.measures.linearity import target_linearity

load_extra("sklearn", "scikit-learn", "sklearn", "1.6")

from sklearn.base import ClassifierMixin, RegressorMixin, is_classifier  # noqa: E402
from sklearn.metrics import accuracy_score, r2_score  # noqa: E402
from sklearn.model_selection import KFold, StratifiedKFold  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402

from gramscope.integrations.vcl_estimator import VCLEstimator  # noqa: E402


class VCLClassifier(ClassifierMixin, VCLEstimator):  # type: ignore[misc]
    """A fully connected classifier whose hidden layers are trained by virtual covariance learning ([VCL] Algorithm 1).

    Inputs are standardised inside. ``gs.VCL`` trains the hidden layers and AdamW the readout and the biases; both step sizes
    fall linearly to 0. Computation is in float32 for float32 rows and in float64 otherwise.

    Args:
        hidden_layer_sizes: widths of the hidden layers.
        activation: gelu, relu, silu, tanh, …; see :class:`gramscope.models.mlp.MLP`.
        gamma: step γ of VCL at the start.
        alpha: power α of VCL.
        readout_lr: AdamW's rate at the start.
        batch_size: rows of one step, about.
        max_epochs: passes over the data; by default as many as 500 steps take, between 20 and 500.
        early_stopping: hold out ``validation_fraction`` of the rows, stop once their score (accuracy, R²) has not risen by
            ``tol`` for ``n_iter_no_change`` epochs, and keep the best weights. ``"auto"``: from 1000 rows on.
        validation_fraction, n_iter_no_change, tol: see ``early_stopping``.
        random_state: seed of initial weights, order and held-out rows.
        device: where to train, such as ``"cuda"``.

    Attributes:
        classes_: the labels.
        network_: the trained net; ``network_.model`` is the module.
        loss_curve_: training loss of every epoch.
        n_iter_: epochs done.
        best_validation_score_: with early stopping.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> VCLClassifier(max_epochs=60, random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """One pass over more rows. The first call needs ``classes``, all labels that will ever occur."""
        if not hasattr(self, "network_"):
            if classes is None:
                raise InputError("the first call of partial_fit needs classes=, the list of all labels")
            self.classes_ = np.unique(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise InputError(f"classes={classes!r} are not those of the first call, {self.classes_.tolist()}")
        return self._partial_fit(X, y)

    @override
    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows ``X [n, features]`` (array, sparse matrix or DataFrame) and labels ``y [n]``."""
        self.__dict__.pop("classes_", None)
        return super().fit(X, y)

    @override
    def _targets(self, y: np.ndarray, first: bool) -> np.ndarray:
        check_classification_targets(y)
        if not hasattr(self, "classes_"):
            self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise InputError(f"the labels have one class only, {self.classes_.tolist()}; a classifier needs two")
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise InputError(f"labels {unknown.tolist()[:5]} are not among classes {self.classes_.tolist()}")
        return np.searchsorted(self.classes_, y)

    @override
    def _width(self, y: np.ndarray) -> int:
        return len(self.classes_)

    @override
    def _loss(self) -> Callable[..., Any]:
        return F.cross_entropy

    @override
    def _score(self, X: Any, targets: np.ndarray) -> float:
        return float(accuracy_score(targets, self._outputs(X).argmax(1)))

    def predict(self, X: Any) -> np.ndarray:
        """The most likely label of every row."""
        rows = self._new_rows(X)
        return self.classes_[self._outputs(rows).argmax(1)]  # type: ignore[no-any-return]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of all classes, ``[n, classes]``."""
        outputs = torch.from_numpy(self._outputs(self._new_rows(X)))
        return np.asarray(outputs.double().softmax(1))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of :meth:`predict_proba`."""
        outputs = torch.from_numpy(self._outputs(self._new_rows(X)))
        return np.asarray(outputs.double().log_softmax(1))


class VCLRegressor(RegressorMixin, VCLEstimator):  # type: ignore[misc]
    """A fully connected regressor whose hidden layers are trained by virtual covariance learning, with the mean squared error.

    Inputs and targets are standardised inside. Arguments and attributes are those of :class:`VCLClassifier`; targets may have
    several columns.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> VCLRegressor(max_epochs=20, random_state=0).fit(X, y).score(X, y) > 0.4
    True
    """

    def partial_fit(self, X: Any, y: Any) -> Self:
        """One pass over more rows; the standardisation takes them into account."""
        return self._partial_fit(X, y)

    @override
    def _targets(self, y: np.ndarray, first: bool) -> np.ndarray:
        columns = y.reshape(len(y), -1).astype(np.float64)
        if first:
            self._target_scaler = StandardScaler()
            self._vector = y.ndim == 1
        self._target_scaler.partial_fit(columns)
        return self._target_scaler.transform(columns)  # type: ignore[no-any-return]

    @override
    def _width(self, y: np.ndarray) -> int:
        return 1 if y.ndim == 1 else int(y.shape[1])

    @override
    def _loss(self) -> Callable[..., Any]:
        return F.mse_loss

    @override
    def _score(self, X: Any, targets: np.ndarray) -> float:
        return float(r2_score(targets, self._outputs(X)))

    def predict(self, X: Any) -> np.ndarray:
        """Predicted targets, ``[n]`` or ``[n, columns]`` as in training."""
        rows = self._new_rows(X)
        values = self._target_scaler.inverse_transform(self._outputs(rows))
        return np.asarray(values[:, 0] if self._vector else values)

    @override
    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


@dataclass(frozen=True)
class TargetLinearityScorer:
    """Target linearity of an estimator's features, as ``scoring=`` of ``GridSearchCV`` and ``cross_validate``.

    Features are ``estimator.features(X)`` (the estimators of this module), else ``estimator.transform(X)``, of the last step of
    a pipeline after the steps before it.

    Args:
        ridge: λ of the linear fit, on the scale of ``HᵀH``.
        intercept: fit a constant as well.
        folds: fit on all but one of this many parts of the scored rows and measure on that part, averaged. By default the fit
            is measured on its own rows ([Gram] Definition 2), which needs more rows than features.
        features: a function ``(estimator, X) -> [n, d]`` for other estimators.

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
        H = _features(estimator, X) if self.features is None else self.features(estimator, X)
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


def _features(estimator: Any, X: Any) -> Any:
    if hasattr(estimator, "best_estimator_"):
        return _features(estimator.best_estimator_, X)
    if hasattr(estimator, "steps") and hasattr(estimator[-1], "features"):
        return estimator[-1].features(estimator[:-1].transform(X) if len(estimator.steps) > 1 else X)
    for name in ("features", "transform"):
        if hasattr(estimator, name):
            return getattr(estimator, name)(X)
    raise InputError(
        f"{type(estimator).__name__} has neither features() nor transform(); give TargetLinearityScorer a function "
        "features=(estimator, X) -> [n, d]"
    )
