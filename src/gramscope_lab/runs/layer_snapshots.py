"""Spectra and diagonals of layers at a step of training, kept as artefacts of a run for the report.

    spectra-000000123    {layer: singular values of W, descending [r]}
    diagonals-000000123  {layer/quantity: diagonal of a matrix at the layer's input, in the shape of the input image}

A diagonal is ``[height, width]`` or ``[channels, height, width]``. Quantities the report knows: ``nfm`` (WᵀW), ``agop``
(WᵀKW) and ``vcs`` (the accumulated virtual covariance shift Σ v); others are shown under their own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from gramscope_lab.runs.directory import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

SPECTRA = "spectra"
DIAGONALS = "diagonals"

Spectra: TypeAlias = "dict[str, Tensor]"
Diagonals: TypeAlias = "dict[str, dict[str, Tensor]]"


def save_spectra(run: RunDirectory, step: int, spectra: Mapping[str, Tensor]) -> None:
    """Store the singular values of layers at ``step``; what was stored for that step is replaced."""
    run.save_artefact(_name(SPECTRA, step), spectra)


def save_diagonals(run: RunDirectory, step: int, diagonals: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Store diagonals ``{layer: {quantity: image}}`` at ``step``; what was stored for that step is replaced."""
    items = ((f"{layer}/{name}", image) for layer, images in diagonals.items() for name, image in images.items())
    run.save_artefact(_name(DIAGONALS, step), dict(items))


def snapshot_steps(run: RunDirectory, kind: str) -> list[int]:
    """Steps with stored ``spectra`` or ``diagonals``, ascending."""
    names = (name.removeprefix(f"{kind}-") for name in run.artefacts() if name.startswith(f"{kind}-"))
    return sorted(int(step) for step in names if step.isdecimal())


def load_spectra(run: RunDirectory, step: int) -> Spectra:
    """What :func:`save_spectra` stored."""
    return run.load_artefact(_name(SPECTRA, step))


def load_diagonals(run: RunDirectory, step: int) -> Diagonals:
    """What :func:`save_diagonals` stored."""
    found: Diagonals = {}
    for key, image in run.load_artefact(_name(DIAGONALS, step)).items():
        layer, _, quantity = key.rpartition("/")
        found.setdefault(layer, {})[quantity] = image
    return found


def _name(kind: str, step: int) -> str:
    return f"{kind}-{step:09d}"
