"""The fit of a net by virtual covariance learning as a scikit-learn estimator, for any kind of target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.integrations.extras import load_extra
from gramscope.integrations.tabular_net import ROWS, NetOptions, TabularNet

load_extra("sklearn", "scikit-learn", "sklearn", "1.6")

from sklearn.base import BaseEstimator, is_classifier  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils import check_random_state  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

#: samples from which ``early_stopping="auto"`` holds some of them out
MANY = 1000
#: steps that a net takes by default
STEPS = 500


class VCLEstimator(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor share: parameters, standardised rows, and the fit of a net by VCL."""

    def __init__(
        self,
        hidden_layer_sizes: int | tuple[int, ...] = (128,),
        *,
        activation: str = "gelu",
        gamma: float = 0.1,
        alpha: float = 0.1,
        readout_lr: float = 1e-2,
        batch_size: int = 64,
        max_epochs: int | None = None,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.gamma = gamma
        self.alpha = alpha
        self.readout_lr = readout_lr
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.random_state = random_state
        self.device = device

    # --- what the two differ in ---------------------------------------------------------------------------------------

    def _targets(self, y: np.ndarray, first: bool) -> np.ndarray:
        """Targets as the loss takes them; ``first`` starts a new fit."""
        raise NotImplementedError

    def _width(self, y: np.ndarray) -> int:
        """Outputs of the net."""
        raise NotImplementedError

    def _loss(self) -> Callable[..., Any]:
        raise NotImplementedError

    def _score(self, X: Any, targets: np.ndarray) -> float:
        """How good predictions are, in terms of prepared targets; larger is better."""
        raise NotImplementedError

    # --- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows ``X [n, features]`` (array, sparse matrix or DataFrame) and targets ``y``."""
        self._check_parameters()
        X, y = self._validated(X, y, reset=True)
        self._rng = check_random_state(self.random_state)
        targets = self._start(X, y)
        held_out = self._held_out(len(targets))
        if not held_out:
            self._train(X, targets, None)
            return self
        classes = targets if is_classifier(self) and np.bincount(targets).min() > 1 else None
        rows = np.arange(len(targets))
        fitted, kept = train_test_split(
            rows, test_size=self.validation_fraction, random_state=self._rng, stratify=classes
        )
        self._train(X[fitted], targets[fitted], (X[kept], targets[kept]))
        return self

    def _start(self, X: Any, y: np.ndarray) -> np.ndarray:
        """Forget everything fitted; the prepared targets."""
        self._scaler = StandardScaler()
        self._add_to_scaler(X)
        targets = self._targets(y, first=True)
        hidden = self.hidden_layer_sizes
        options = NetOptions(
            inputs=X.shape[1],
            outputs=self._width(y),
            hidden=tuple(int(width) for width in np.atleast_1d(hidden)),
            activation=self.activation,
            gamma=float(self.gamma),
            alpha=float(self.alpha),
            readout_lr=float(self.readout_lr),
            seed=int(self._rng.randint(2**31 - 1)),
            dtype=torch.float32 if X.dtype == np.float32 else torch.float64,
            device=self.device,
        )
        self.network_ = TabularNet(options, self._loss())
        self.loss_curve_: list[float] = []
        self.n_iter_ = 0
        return targets

    def _train(self, X: Any, targets: np.ndarray, validation: tuple[Any, np.ndarray] | None) -> None:
        best, weights, waited = -np.inf, None, 0
        epochs = self.max_epochs or min(500, max(20, round(STEPS * self.batch_size / len(targets))))
        for epoch in range(epochs):
            self._epoch(X, targets, epoch / epochs, 1 / epochs)
            if validation is None:
                continue
            score = self._score(*validation)
            waited = 0 if score > best + self.tol else waited + 1
            if score > best:
                best, weights = score, self.network_.weights()
            if waited >= self.n_iter_no_change:
                break
        if weights is not None:
            self.network_.load_weights(weights)
            self.best_validation_score_ = float(best)

    def _epoch(self, X: Any, targets: np.ndarray, done: float, share: float) -> None:
        """One pass over the rows in random order, with step sizes that fall from 1 − done by ``share``."""
        order = self._rng.permutation(len(targets))
        parts = np.array_split(order, max(1, round(len(order) / self.batch_size)))
        total = 0.0
        for i, rows in enumerate(parts):
            self.network_.set_rate(1 - done - share * i / len(parts))
            total += len(rows) * self.network_.step(self._standardised(X[rows]), targets[rows])
        self.n_iter_ += 1
        self.loss_curve_.append(total / len(order))

    def _partial_fit(self, X: Any, y: Any) -> Self:
        """One pass over more rows, with constant step sizes."""
        first = not hasattr(self, "network_")
        if first:
            self._check_parameters()
            self._rng = check_random_state(self.random_state)
        X, y = self._validated(X, y, reset=first)
        if first:
            targets = self._start(X, y)
        else:
            self._add_to_scaler(X)
            targets = self._targets(y, first=False)
        self._epoch(X, targets, 0.0, 0.0)
        return self

    # --- data ---------------------------------------------------------------------------------------------------------

    def _validated(self, X: Any, y: Any, reset: bool) -> tuple[Any, np.ndarray]:
        return validate_data(  # type: ignore[no-any-return]
            self,
            X,
            y,
            reset=reset,
            accept_sparse="csr",
            dtype=(np.float64, np.float32),
            multi_output=not is_classifier(self),
            y_numeric=not is_classifier(self),
        )

    def _add_to_scaler(self, X: Any) -> None:
        self._scaler.set_params(with_mean=isinstance(X, np.ndarray)).partial_fit(X)

    def _standardised(self, X: Any) -> np.ndarray:
        """Dense rows with mean 0 and variance 1 over the training data; sparse ones are expanded here, batch by batch."""
        dense = X if isinstance(X, np.ndarray) else X.toarray()
        return (dense - self._scaler.mean_) / self._scaler.scale_  # type: ignore[no-any-return]

    def _blocks(self, X: Any) -> Iterator[np.ndarray]:
        for start in range(0, X.shape[0], ROWS):
            yield self._standardised(X[start : start + ROWS])

    def _outputs(self, X: Any) -> np.ndarray:
        """Outputs of the net for validated rows."""
        return np.concatenate([self.network_.outputs(block) for block in self._blocks(X)])

    def _new_rows(self, X: Any) -> Any:
        check_is_fitted(self)
        return validate_data(self, X, reset=False, accept_sparse="csr", dtype=(np.float64, np.float32))

    def features(self, X: Any) -> np.ndarray:
        """The inputs of the readout, ``[n, width of the last hidden layer]``."""
        X = self._new_rows(X)
        return np.concatenate([self.network_.features(block) for block in self._blocks(X)])

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        counts: dict[str, Any] = {"batch_size": self.batch_size, "n_iter_no_change": self.n_iter_no_change}
        if self.max_epochs is not None:
            counts["max_epochs"] = self.max_epochs
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < 1:
                raise InputError(f"{name}={count!r}: give a positive whole number")
        try:
            widths = np.atleast_1d(self.hidden_layer_sizes)
        except ValueError:  # lists of different lengths
            widths = np.array([[]])
        if widths.ndim != 1 or (len(widths) and not (widths.dtype.kind in "iu" and widths.min() > 0)):
            raise InputError(
                f"hidden_layer_sizes={self.hidden_layer_sizes!r}: give positive whole numbers, such as (128, 64)"
            )
        shares: dict[str, tuple[Any, float]] = {
            "gamma": (self.gamma, np.inf),
            "readout_lr": (self.readout_lr, np.inf),
            "validation_fraction": (self.validation_fraction, 1.0),
        }
        for name, (value, end) in shares.items():
            if not isinstance(value, Real) or not 0 < float(value) < end:
                raise InputError(f"{name}={value!r}: give a number between 0 and {end}")
        if self.early_stopping not in (True, False, "auto"):
            raise InputError(f"early_stopping={self.early_stopping!r}: give True, False or 'auto'")

    def _held_out(self, n: int) -> bool:
        return n >= MANY if self.early_stopping == "auto" else bool(self.early_stopping)

    @override
    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
