"""The table of who trains which parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import nn
from torch.optim import Optimizer

from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import public_name, unwrap
from gramscope.optim.vcl.averaged import AveragedTrainer
from gramscope.optim.vcl.matrix_trainer import MatrixTrainer
from gramscope.optim.vcl.readout_layer import head_parameters
from gramscope.optim.weight_matrix import WeightMatrix


def summary_table(
    model: nn.Module,
    units: Sequence[MatrixTrainer | AveragedTrainer],
    head: WeightMatrix | Layer | None,
    settled: bool,
    readout: Optimizer | None,
    refused: Sequence[tuple[Layer, str]],
    owners: Mapping[WeightMatrix, int] = MappingProxyType({}),
) -> str:
    """A table of all parameters of a model: shape, and which optimizer trains each, in which of several processes."""
    weights = {id(p) for p in ([] if head is None else head_parameters(head)) if p.dim() > 1}
    by = {id(p): unit for unit in units for p in unit.weight.parameters}
    other = "nothing" if readout is None else type(readout).__name__
    rows = [("parameter", "shape", "trained by")]
    for name, p in unwrap(model).named_parameters():
        shape = " × ".join(map(str, p.shape)) or "scalar"
        if id(p) in by:
            unit = by[id(p)]
            who = f"VCL {unit.solver}" + (
                f", rank {unit.rank}" if isinstance(unit, MatrixTrainer) and unit.solver == "recursive" else ""
            )
            who += f", in process {owners[unit.weight]}" if unit.weight in owners else ""
        elif not p.requires_grad:
            who = "nothing (frozen)"
        else:
            who = other
            if id(p) in weights:
                who += " (readout)" if settled else " (readout, unless the first forward shows another last layer)"
        rows.append((public_name(name), shape, who))
    rows += [(layer.name, "", f"not by VCL: {reason}") for layer, reason in refused]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in rows)
