"""gramscope: see, train with and predict feature learning in neural networks.

The public names below are loaded on first use, so that ``import gramscope`` and the command line's help need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gramscope.instruments.agop import agop as agop
    from gramscope.instruments.agop import dual_tangent_kernel as dual_tangent_kernel
    from gramscope.instruments.agop import tangent_kernel as tangent_kernel
    from gramscope.instruments.cka import cka as cka
    from gramscope.instruments.compare import compare as compare
    from gramscope.instruments.compare import rank_pattern as rank_pattern
    from gramscope.instruments.coordinate_check import coordinate_check as coordinate_check
    from gramscope.instruments.egop import egop as egop
    from gramscope.instruments.estimate import estimate as estimate
    from gramscope.instruments.interpolation import interpolation_error as interpolation_error
    from gramscope.instruments.linear_blocks import linear_blocks as linear_blocks
    from gramscope.instruments.linear_blocks import replaced as replaced
    from gramscope.instruments.measure import measure as measure
    from gramscope.instruments.measure_features import measure_features as measure_features
    from gramscope.instruments.monitor import Monitor as Monitor
    from gramscope.instruments.readout import neural_collapse as neural_collapse
    from gramscope.instruments.regions import region_crossings as region_crossings
    from gramscope.instruments.series import series as series
    from gramscope.layers.capture import capture as capture
    from gramscope.layers.tape import Tape as Tape
    from gramscope.measures.alignment import corrupted as corrupted
    from gramscope.measures.alignment import cosine as cosine
    from gramscope.measures.alignment import double_centered_ratio as double_centered_ratio
    from gramscope.measures.alignment import nfa as nfa
    from gramscope.measures.column import Column as Column
    from gramscope.measures.columns import measures as measures
    from gramscope.measures.linearity import fit_linear as fit_linear
    from gramscope.measures.linearity import gram_induced_error as gram_induced_error
    from gramscope.measures.linearity import held_out_target_linearity as held_out_target_linearity
    from gramscope.measures.linearity import surrogate as surrogate
    from gramscope.measures.linearity import target_linearity as target_linearity
    from gramscope.measures.series import Series as Series
    from gramscope.measures.similarity import linear_cka as linear_cka
    from gramscope.measures.spectrum import feature_spectrum as feature_spectrum
    from gramscope.measures.spectrum import large_weight_spectrum as large_weight_spectrum
    from gramscope.measures.spectrum import weight_spectrum as weight_spectrum
    from gramscope.measures.surrogate_theory import linearity_bound as linearity_bound
    from gramscope.measures.surrogate_theory import moving_target as moving_target
    from gramscope.measures.table import Table as Table
    from gramscope.measures.virtual import fle_residual as fle_residual
    from gramscope.measures.virtual import gram_shift as gram_shift
    from gramscope.measures.virtual import lipschitz_constant as lipschitz_constant
    from gramscope.measures.virtual import virtual_against_actual as virtual_against_actual
    from gramscope.measures.virtual import virtual_covariance_shift as virtual_covariance_shift
    from gramscope.measures.virtual import virtual_trajectory as virtual_trajectory
    from gramscope.measures.virtual import virtual_update as virtual_update
    from gramscope.measures.virtual import weight_gram as weight_gram
    from gramscope.optim.free_muon import FreeMuon as FreeMuon
    from gramscope.optim.param_groups import param_groups as param_groups
    from gramscope.optim.polar import polar as polar
    from gramscope.optim.vcl import VCL as VCL
    from gramscope.optim.whitening import GramFixed as GramFixed
    from gramscope.optim.whitening import GramWhitened as GramWhitened
    from gramscope.statistics.collect import collect as collect
    from gramscope.statistics.sums import Seen as Seen
    from gramscope.statistics.sums import Sum as Sum

#: module -> public names that it defines
_MODULES = {
    "instruments.agop": "agop dual_tangent_kernel tangent_kernel",
    "instruments.cka": "cka",
    "instruments.compare": "compare rank_pattern",
    "instruments.coordinate_check": "coordinate_check",
    "instruments.estimate": "estimate",
    "instruments.egop": "egop",
    "instruments.interpolation": "interpolation_error",
    "instruments.linear_blocks": "linear_blocks replaced",
    "instruments.measure": "measure",
    "instruments.measure_features": "measure_features",
    "instruments.monitor": "Monitor",
    "instruments.readout": "neural_collapse",
    "instruments.regions": "region_crossings",
    "instruments.series": "series",
    "layers.capture": "capture",
    "layers.tape": "Tape",
    "measures": "measures",
    "measures.alignment": "corrupted cosine double_centered_ratio nfa",
    "measures.column": "Column",
    "measures.linearity": "fit_linear gram_induced_error held_out_target_linearity surrogate target_linearity",
    "measures.similarity": "linear_cka",
    "measures.spectrum": "feature_spectrum large_weight_spectrum weight_spectrum",
    "measures.surrogate_theory": "linearity_bound moving_target",
    "measures.series": "Series",
    "measures.table": "Table",
    "measures.virtual": (
        "fle_residual gram_shift lipschitz_constant virtual_against_actual "
        "virtual_covariance_shift virtual_trajectory virtual_update weight_gram"
    ),
    "optim.free_muon": "FreeMuon",
    "optim.param_groups": "param_groups",
    "optim.polar": "polar",
    "optim.vcl": "VCL",
    "optim.whitening": "GramFixed GramWhitened",
    "statistics.collect": "collect",
    "statistics.sums": "Seen Sum",
}
_PUBLIC = {name: f"gramscope.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'gramscope' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}"
        )
    module = import_module(_PUBLIC[name])
    value = module if name == "measures" else getattr(module, name)  # this package can be called
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
