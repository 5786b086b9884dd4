"""What can be chosen: methods and their options, schedules, losses. Plain values only, so that help needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gramscope.errors import InputError


@dataclass(frozen=True)
class Option:
    """One option of a method: its default, what it means, and what values it takes."""

    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] | None = None
    #: types accepted besides the default's own
    types: tuple[type, ...] = ()

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
        if self.least is not None and isinstance(value, int | float) and not value >= self.least:
            raise InputError(f"{key} = {value!r}: must be at least {self.least:g}")
        if self.most is not None and isinstance(value, int | float) and not value <= self.most:
            raise InputError(f"{key} = {value!r}: must be at most {self.most:g}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{key} = {value!r}: must be a finite number")
        return value


def _lr(default: float) -> Option:
    return Option(default, "learning rate", least=0.0)


_DECAY = Option(0.0, "weight decay", least=0.0)

_SGD: dict[str, Option] = {
    "lr": _lr(0.05),
    "momentum": Option(0.0, "momentum", least=0.0),
    "nesterov": Option(False, "Nesterov momentum"),
    "weight_decay": _DECAY,
}
_ADAM: dict[str, Option] = {
    "lr": _lr(1e-3),
    "beta1": Option(0.9, "decay of the mean gradient", least=0.0),
    "beta2": Option(0.999, "decay of the mean squared gradient", least=0.0),
    "eps": Option(1e-8, "added to the denominator", least=0.0),
    "weight_decay": _DECAY,
}
_ADAMW = {**_ADAM, "weight_decay": Option(0.01, "decoupled weight decay", least=0.0)}
_MUON: dict[str, Option] = {
    "lr": _lr(0.01),
    "momentum": Option(0.95, "momentum", least=0.0),
    "nesterov": Option(True, "Nesterov momentum"),
    "weight_decay": Option(0.0, "decoupled weight decay", least=0.0),
    "ns_steps": Option(5, "Newton–Schulz iterations", least=1),
    "adjust": Option("original", "scaling with the shape", choices=("original", "match_rms_adamw")),
    "readout": Option("adamw", "who trains the last layer", choices=("adamw", "muon")),
    "adamw_lr": Option(1e-3, "learning rate of AdamW on what Muon does not train", least=0.0),
}
_VCL: dict[str, Option] = {
    "gamma": Option(1.0, "step γ of the virtual update", least=0.0),
    "alpha": Option(0.1, "power α of the eigenvalues", least=0.0),
    "solver": Option("recursive", "how the eigenproblem is solved", choices=("recursive", "exact", "auto")),
    "rank": Option(None, "directions the recursive solver keeps", least=1, types=(int,)),
    "anchor": Option("current", "W_tᵀW_t + V_t to the letter, or W₀ᵀW₀ + V_t", choices=("current", "initial")),
    "second_order": Option(True, "the γ² term of the shift"),
    "floor": Option(0.0, "τ of a smooth floor under the eigenvalues", least=0.0),
    "refresh": Option(16, "steps between decompositions of the recursive solver, at most", least=1),
    "momentum": Option(0.0, "β of a running mean of the gradient that the shift is formed from", least=0.0),
    "orthogonalise": Option(False, "form the shift from the orthogonalised gradient"),
    "aim": Option(0.0, "Procrustes towards W − aim·γ·D instead of W", least=0.0),
    "bias": Option(False, "train a layer's bias with its weight, as the weight of a constant input"),
    "warm_up_epochs": Option(0.0, "epochs at the start in which only the last layer is trained", least=0.0),
    "readout": Option("sgd", "optimizer of the readout, biases and other parameters", choices=("sgd", "adam", "adamw")),
    "readout_lr": Option(0.1, "learning rate of that optimizer", least=0.0),
    "readout_momentum": Option(0.0, "momentum of that optimizer (sgd)", least=0.0),
    "readout_weight_decay": Option(0.0, "weight decay of that optimizer", least=0.0),
}
_LAYERS = Option("", "glob of the layers concerned; empty for all")
_WHITEN: dict[str, Option] = {
    "layers": _LAYERS,
    "whiten_readout": Option(True, "treat the last layer too"),
    "polar": Option("auto", "how the polar factor is computed", choices=("auto", "svd", "newton-schulz")),
}

#: method → its options; ``whiten-X`` wraps X in the Gram-whitened update, ``gram-fixed-X`` in its complement
METHODS: dict[str, dict[str, Option]] = {
    "sgd": _SGD,
    "adam": _ADAM,
    "adamw": _ADAMW,
    "muon": _MUON,
    "vcl": {**_VCL, "layers": _LAYERS},
}
for _base in ("sgd", "adam", "adamw", "muon"):
    METHODS[f"whiten-{_base}"] = {**METHODS[_base], **_WHITEN}
    METHODS[f"gram-fixed-{_base}"] = {**METHODS[_base], **_WHITEN}

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
