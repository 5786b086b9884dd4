"""Every option of training methods: its name, default, meaning and allowed values. The only place that lists them.

Checks, command-line flags, help texts and the construction of optimizers read these tables. Nothing here imports torch,
so that ``--help`` starts fast.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gramscope.errors import InputError

_LIMITS = (
    ("least", operator.ge, "at least"),
    ("most", operator.le, "at most"),
    ("above", operator.gt, "above"),
    ("below", operator.lt, "below"),
)


@dataclass(frozen=True)
class Option:
    """One option: its default, what it means, and which values it takes."""

    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
    #: types accepted besides the default's own
    types: tuple[type, ...] = ()
    #: whether runs that differ in it can still be stacked into one step
    per_run: bool = False
    #: the default of earlier versions, with which their stored runs go on
    earlier: Any = None

    def check(self, key: str, value: Any) -> Any:
        """The value in the option's type, or an error naming key, value and what is allowed."""
        if self.choices is not None:
            if value not in self.choices:
                raise InputError(f"{key} = {value!r}: choose one of {', '.join(map(repr, self.choices))}")
            return value
        allowed = (*self.types, type(self.default)) if self.default is not None else self.types
        if isinstance(value, int) and not isinstance(value, bool) and float in allowed and int not in allowed:
            value = float(value)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join(dict.fromkeys(kind.__name__ for kind in allowed))
            raise InputError(f"{key} = {value!r}: must be {names}")
        if isinstance(value, int | float):
            for name, holds, words in _LIMITS:
                limit = getattr(self, name)
                if limit is not None and not holds(value, limit):
                    raise InputError(f"{key} = {value!r}: must be {words} {limit:g}")
            if not math.isfinite(value):
                raise InputError(f"{key} = {value!r}: must be a finite number")
        return value


def _number(default: float, text: str) -> Option:
    """A number from 0 in which stacked runs may differ."""
    return Option(default, text, least=0.0, per_run=True)


_ADAM: dict[str, Option] = {
    "lr": _number(1e-3, "learning rate"),
    "beta1": _number(0.9, "decay of the mean gradient"),
    "beta2": _number(0.999, "decay of the mean squared gradient"),
    "eps": _number(1e-8, "added to the denominator"),
    "weight_decay": _number(0.0, "weight decay"),
}

#: optimizer → the options it takes itself
OPTIMIZERS: dict[str, dict[str, Option]] = {
    "sgd": {
        "lr": _number(0.05, "learning rate"),
        "momentum": _number(0.0, "momentum"),
        "nesterov": Option(False, "Nesterov momentum"),
        "weight_decay": _number(0.0, "weight decay"),
    },
    "adam": _ADAM,
    "adamw": {**_ADAM, "weight_decay": _number(0.01, "decoupled weight decay")},
    "muon": {
        "lr": _number(0.01, "learning rate"),
        "momentum": _number(0.95, "momentum"),
        "nesterov": Option(True, "Nesterov momentum"),
        "weight_decay": _number(0.0, "decoupled weight decay"),
        "ns_steps": Option(5, "Newton–Schulz iterations", least=1),
        "adjust": Option("original", "scaling with the shape", choices=("original", "match_rms_adamw")),
    },
    "vcl": {
        "gamma": Option(1.0, "step γ of the virtual update", least=0.0),
        "alpha": Option(0.1, "power α of the eigenvalues", least=0.0),
        "solver": Option("recursive", "how the eigenproblem is solved", choices=("recursive", "exact")),
        "rank": Option(None, "directions the recursive solver keeps", least=1, types=(int,)),
    },
}

_LAYERS = Option("", "glob of the layers concerned; empty for all")
#: method → options beside those of its optimizer
_BESIDE: dict[str, dict[str, Option]] = {
    "muon": {
        "readout": Option("adamw", "optimizer of the last layer", choices=("adamw", "muon")),
        "adamw_lr": _number(1e-3, "learning rate of AdamW on the parameters that Muon does not train"),
    },
    "vcl": {
        "warm_up_epochs": Option(0.0, "first epochs, in which only the last layer is trained", least=0.0),
        "readout": Option(
            "sgd", "optimizer of the readout, biases and other parameters", choices=("sgd", "adam", "adamw")
        ),
        "readout_lr": Option(0.1, "learning rate of that optimizer", least=0.0),
        "readout_momentum": Option(0.0, "momentum of that optimizer (sgd)", least=0.0),
        "readout_weight_decay": Option(0.0, "weight decay of that optimizer", least=0.0),
        "layers": _LAYERS,
    },
}
_WRAPPER: dict[str, Option] = {
    "layers": _LAYERS,
    "whiten_readout": Option(True, "treat the last layer too"),
    "polar": Option("auto", "how the polar factor is computed", choices=("auto", "svd", "newton-schulz")),
}
#: prefixes of methods that wrap another: the Gram-whitened update and its complement
WRAPPERS = ("whiten", "gram-fixed")

#: method → all its options
METHODS: dict[str, dict[str, Option]] = {name: {**known, **_BESIDE.get(name, {})} for name, known in OPTIMIZERS.items()}
for _base in ("sgd", "adam", "adamw", "muon"):
    for _prefix in WRAPPERS:
        METHODS[f"{_prefix}-{_base}"] = {**METHODS[_base], **_WRAPPER}

SCHEDULES = ("constant", "linear", "cosine", "step")
LOSSES = ("auto", "cross-entropy", "mse", "half-squared")
REDUCTIONS = ("mean", "sum")
DTYPES = ("float32", "float64")
EXECUTIONS = ("auto", "vectorised", "processes", "one-by-one")


def method_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a method: the given ones checked, the others at their defaults."""
    known = METHODS.get(name)
    if known is None:
        raise InputError(f"method.name = {name!r}: choose one of {', '.join(METHODS)}")
    for key in given:
        if key not in known:
            raise InputError(f"method.{key} = {given[key]!r}: {name} has no such option; it has {', '.join(known)}")
    return {
        key: option.check(f"method.{key}", given[key]) if key in given else option.default
        for key, option in known.items()
    }


def optimizer_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that an optimizer takes itself: from ``given``, or its defaults; other keys are left out."""
    return {key: given.get(key, option.default) for key, option in OPTIMIZERS[name].items()}


def earlier_defaults(name: str) -> dict[str, Any]:
    """The options of a method whose default has changed, with the default of earlier versions."""
    return {key: option.earlier for key, option in METHODS.get(name, {}).items() if option.earlier is not None}


def split_wrapper(name: str) -> tuple[str, str]:
    """``whiten-sgd`` as ``("whiten", "sgd")``; ``("", name)`` for a method that wraps nothing."""
    for prefix in WRAPPERS:
        if name.startswith(f"{prefix}-"):
            return prefix, name.removeprefix(f"{prefix}-")
    return "", name
