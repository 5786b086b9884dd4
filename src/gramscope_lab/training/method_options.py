"""Every option of a training method: its name, default, meaning and allowed values.

Checks, command-line flags, help texts and the construction of optimizers read these classes. Defaults of the library's own
optimizers are read from their signatures, when one is first needed; ``--help`` needs no torch.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, create_model, model_validator

from gramscope_lab.training.config import Section


def _number(default: float, text: str) -> Any:
    return Field(default, ge=0, description=text)


def library_default(optimizer: str, parameter: str) -> Any:
    """The default in the signature of an optimizer of the library."""
    import gramscope

    return inspect.signature(getattr(gramscope, optimizer)).parameters[parameter].default


def _of(optimizer: str, parameter: str, text: str, **limits: Any) -> Any:
    """An option with the library's default."""
    return Field(default_factory=partial(library_default, optimizer, parameter), description=text, **limits)


class Options(Section):
    """The options of one method."""

    where: ClassVar[str] = "method."


class Sgd(Options):
    """``torch.optim.SGD``."""

    lr: float = _number(0.05, "learning rate")
    momentum: float = _number(0.0, "momentum")
    nesterov: bool = Field(default=False, description="Nesterov momentum")
    weight_decay: float = _number(0.0, "weight decay")


class Adam(Options):
    """``torch.optim.Adam``."""

    lr: float = _number(1e-3, "learning rate")
    beta1: float = _number(0.9, "decay of the mean gradient")
    beta2: float = _number(0.999, "decay of the mean squared gradient")
    eps: float = _number(1e-8, "added to the denominator")
    weight_decay: float = _number(0.0, "weight decay")


class AdamW(Adam):
    """``torch.optim.AdamW``."""

    weight_decay: float = _number(0.01, "decoupled weight decay")


class Muon(Options):
    """``torch.optim.Muon`` on matrices, AdamW on all other parameters."""

    lr: float = _number(0.01, "learning rate")
    momentum: float = _number(0.95, "momentum")
    nesterov: bool = Field(default=True, description="Nesterov momentum")
    weight_decay: float = _number(0.0, "decoupled weight decay")
    ns_steps: int = Field(default=5, ge=1, description="Newton–Schulz iterations")
    adjust: Literal["original", "match_rms_adamw"] = Field(default="original", description="scaling with the shape")
    readout: Literal["adamw", "muon"] = Field(default="adamw", description="optimizer of the last layer")
    adamw_lr: float = _number(1e-3, "learning rate of AdamW on the parameters that Muon does not train")


class Vcl(Options):
    """``gramscope.VCL``, after a warm-up in which the last layer is trained alone."""

    gamma: float = _of("VCL", "gamma", "step γ of the virtual update", ge=0)
    alpha: float = _of("VCL", "alpha", "power α of the eigenvalues", ge=0)
    solver: Literal["recursive", "exact"] = _of("VCL", "solver", "how the eigenproblem is solved")
    rank: int | None = _of("VCL", "rank", "directions the recursive solver keeps", ge=1)
    warm_up_epochs: float = _number(0.0, "first epochs, in which only the last layer is trained")
    readout: Literal["sgd", "adam", "adamw"] = Field(
        default="sgd", description="optimizer of the readout and other parameters"
    )
    readout_lr: float = _number(0.1, "learning rate of that optimizer")
    readout_momentum: float = _number(0.0, "momentum of that optimizer (sgd)")
    readout_weight_decay: float = _number(0.0, "weight decay of that optimizer")
    layers: str = Field(default="", description="glob of the layers concerned; empty for all")

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.solver == "exact":
            self.refuse_unused(["rank"], "the exact solver")
        if self.readout != "sgd":
            self.refuse_unused(["readout_momentum"], f"the readout's {self.readout}")
        return self


class FreeMuon(Options):
    """``gramscope.FreeMuon``, which has no rate to choose."""

    layers: str = Field(default="", description="glob of the layers concerned; empty for all")


class Whitened(Options):
    """``gramscope.GramWhitened`` or ``GramFixed`` around another optimizer."""

    layers: str = Field(default="", description="glob of the layers concerned; empty for all")
    whiten_readout: bool = Field(default=True, description="treat the last layer too")
    polar: Literal["auto", "svd"] = Field(default="auto", description="how the nearest matrix is found")


#: prefixes of methods that wrap another: the Gram-whitened update and its complement
WRAPPERS = ("whiten", "gram-fixed")
#: method → its options
METHODS: dict[str, type[Options]] = {
    "sgd": Sgd, "adam": Adam, "adamw": AdamW, "muon": Muon, "vcl": Vcl, "free-muon": FreeMuon,
}  # fmt: skip
METHODS |= {
    f"{prefix}-{name}": create_model(f"{prefix}-{name}", __base__=(Whitened, METHODS[name]))
    for name in ("sgd", "adam", "adamw", "muon")
    for prefix in WRAPPERS
}


def split_wrapper(name: str) -> tuple[str, str]:
    """``whiten-sgd`` as ``("whiten", "sgd")``; ``("", name)`` for a method that wraps nothing."""
    for prefix in WRAPPERS:
        if name.startswith(f"{prefix}-"):
            return prefix, name.removeprefix(f"{prefix}-")
    return "", name
