"""gramscope: see, train with and predict feature learning in neural networks.

The public names below are loaded on first use, so that ``import gramscope`` and the command line's help need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gramscope.layers.tape import Tape as Tape
    from gramscope.layers.tape import capture as capture
    from gramscope.linalg.polar import polar as polar
    from gramscope.measures.agop import agop as agop
    from gramscope.measures.agop import tangent_kernel as tangent_kernel
    from gramscope.measures.alignment import cosine as cosine
    from gramscope.measures.alignment import nfa as nfa
    from gramscope.measures.collapse import neural_collapse as neural_collapse
    from gramscope.measures.gram import weight_gram as weight_gram
    from gramscope.measures.linearity import surrogate as surrogate
    from gramscope.measures.linearity import target_linearity as target_linearity
    from gramscope.measures.model import measure as measure
    from gramscope.measures.monitor import Monitor as Monitor
    from gramscope.measures.virtual import virtual_covariance_shift as virtual_covariance_shift
    from gramscope.optim.vcl import VCL as VCL
    from gramscope.optim.whitening import GramFixed as GramFixed
    from gramscope.optim.whitening import GramWhitened as GramWhitened
    from gramscope.statistics.collect import collect as collect

#: public name -> module that defines it
_PUBLIC = {
    "GramFixed": "gramscope.optim.whitening",
    "GramWhitened": "gramscope.optim.whitening",
    "Monitor": "gramscope.measures.monitor",
    "Tape": "gramscope.layers.tape",
    "VCL": "gramscope.optim.vcl",
    "agop": "gramscope.measures.agop",
    "capture": "gramscope.layers.tape",
    "collect": "gramscope.statistics.collect",
    "cosine": "gramscope.measures.alignment",
    "measure": "gramscope.measures.model",
    "neural_collapse": "gramscope.measures.collapse",
    "nfa": "gramscope.measures.alignment",
    "polar": "gramscope.linalg.polar",
    "surrogate": "gramscope.measures.linearity",
    "tangent_kernel": "gramscope.measures.agop",
    "target_linearity": "gramscope.measures.linearity",
    "virtual_covariance_shift": "gramscope.measures.virtual",
    "weight_gram": "gramscope.measures.gram",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'gramscope' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}"
        )
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
