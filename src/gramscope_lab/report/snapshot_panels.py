"""Spectra of the weights and diagonals at the input, with a slider over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gramscope.errors import GramscopeError
from gramscope_lab.report.block_layout import block_layout, layer_label
from gramscope_lab.report.loaded_runs import Run, Runs, Setting
from gramscope_lab.report.panel import DataTable, Facet, HeatMap, Line, LinePlot, Panel, View, rounded, thin
from gramscope_lab.report.recording import how_to_store
from gramscope_lab.report.run_files import text
from gramscope_lab.runs.layer_snapshots import DIAGONALS, SPECTRA, load_diagonals, load_spectra, snapshot_steps

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: most moments of a slider, layers in a view, values of a spectrum, pixels along a side, numbers in a panel
MOMENTS, LAYERS, VALUES, PIXELS, BUDGET = 16, 8, 128, 64, 40_000
#: numbers in a stored tensor beyond which it is not drawn
MOST = 10_000_000
#: most values of a spectrum if there are many layers
FEW_VALUES = 32

QUANTITIES = {
    "nfm": ("Weight Gram WᵀW", "diag(WᵀW)"),
    "agop": ("AGOP", "diag((1/n) Σ_i ∇f(x_i) ∇f(x_i)ᵀ) = diag(WᵀKW)"),
    "vcs": ("Virtual covariance Σv", "diag(Σ_τ v_τ), v = Σ_i (h_i⁺ h_i⁺ᵀ − h_i h_iᵀ), h⁺ = h − γg"),
}


@dataclass(frozen=True)
class _Stored(Generic[T]):
    """The artefacts of the first run of a setting that has any, by step."""

    setting: Setting
    run: Run
    found: Mapping[int, Mapping[str, T]]

    def at(self, step: int) -> Mapping[str, T]:
        """The newest artefact not later than ``step``, or else the first."""
        return self.found[max((s for s in self.found if s <= step), default=min(self.found))]

    @cached_property
    def layers(self) -> list[str]:
        """Layers in the order of measurement, then of storage."""
        stored = dict.fromkeys(layer for found in self.found.values() for layer in found)
        return list(dict.fromkeys([*(layer for layer in self.run.by_layer if layer in stored), *stored]))


def _stored(runs: Runs, kind: str, load: Any, moments: int) -> list[_Stored[Any]]:
    result = []
    for setting in runs.settings:
        run = next(
            (run for run in setting.runs if run.files.has_artefacts and snapshot_steps(run.directory, kind)), None
        )
        if run is not None:
            steps = thin(snapshot_steps(run.directory, kind), moments)
            found = {step: tensors for step in steps if (tensors := _loaded(load, run, step))}
            if found:
                result.append(_Stored(setting, run, found))
    return result


def _loaded(load: Any, run: Run, step: int) -> dict[str, Any]:
    """The usable tensors of an artefact; none, with a note among the run's problems, if it cannot be read."""
    try:
        tensors = load(run.directory, step)
    except GramscopeError as error:
        run.files.problems.append(str(error))
        return {}
    found: dict[str, Any] = {}
    for layer, value in tensors.items():
        if isinstance(value, dict):
            images = {name: image.double() for name, image in value.items() if _usable(image, 2, 3)}
            if images:
                found[text(layer)] = images
        elif _usable(value, 1):
            found[text(layer)] = value.double()
    return found


def _usable(values: Tensor, *dimensions: int) -> bool:
    """Whether a stored tensor can be drawn: a spectrum or an image of finite numbers, and not too many."""
    right = values.dim() in dimensions and 0 < values.numel() <= MOST and not values.is_complex()
    return right and bool(values.double().isfinite().all())  # small floats know no isfinite


# -- spectra --------------------------------------------------------------------------------------------------------
def spectra_panel(runs: Runs) -> Panel:
    """Singular values of every layer's weight, one line for each setting."""
    words = (
        "spectra",
        "Inside the net",
        "Spectra of the weights",
        "Singular values of each layer's weight, the largest first, at the moment the slider shows. Feature learning "
        "pulls a few of them out of the bulk.",
    )
    stored: list[_Stored[Tensor]] = _stored(runs, SPECTRA, load_spectra, MOMENTS)
    if not stored:
        return Panel(*words, missing=f"No spectra were stored with these runs; {how_to_store(runs, 'save_spectra')}.")
    layers = list(dict.fromkeys(layer for item in stored for layer in item.layers))
    most = VALUES if len(layers) <= LAYERS else FEW_VALUES
    steps = sorted({step for item in stored for step in item.found})
    steps = thin(steps, max(2, min(MOMENTS, BUDGET // (len(stored) * len(layers) * most))))
    views, left_out = [], []
    for label, found in _drawn_together(layers).items():
        shown = thin(found, LAYERS)
        facets = tuple(_spectrum_facet(layer, stored, steps, most) for layer in shown)
        moments = tuple(_time(stored[0].run, runs, step) for step in steps)
        views.append(View(label, facets, "W = U diag(s) Vᵀ, s₁ ≥ s₂ ≥ …", moments))
        if len(shown) < len(found):
            left_out.append(f"{len(shown)} of {len(found)} layers{label and f' {label}'} are drawn; the table has all.")
    rows = [
        [item.setting.name, step, layer, *rounded(thin(item.at(step)[layer].tolist(), most))]
        for item in stored
        for step in steps
        for layer in item.layers
        if layer in item.at(step)
    ]
    width = max(map(len, rows)) - 3
    notes = [_first_seeds(stored), *left_out]
    if width == most:
        notes.append(f"Of a longer spectrum {most} values are kept, evenly spread.")
    columns = ("setting", "step", "layer", *(f"s{i + 1}" for i in range(width)))
    return Panel(*words, tuple(views), DataTable(columns, rows), note=" ".join(notes).strip())


def _drawn_together(layers: Sequence[str]) -> dict[str, list[str]]:
    """Layers that share a view: those of a kind in deep nets, else all of them."""
    layout = block_layout(layers)
    if layout is None:
        return {"": list(layers)}
    rows = zip(layout.kinds, layout.layers, strict=True)
    return {kind: [layer for layer in row if layer is not None] for kind, row in rows}


def _spectrum_facet(layer: str, stored: Sequence[_Stored[Tensor]], steps: Sequence[int], most: int) -> Facet:
    known = [item.at(step)[layer] for item in stored for step in steps if layer in item.at(step)]
    positive = [values[values > 0] for values in known]
    ends = _log_range([float(end) for values in positive if len(values) for end in values.aminmax()])
    frames = []
    for step in steps:
        lines = tuple(_spectrum(item.setting, item.at(step)[layer], most) for item in stored if layer in item.at(step))
        frames.append(LinePlot(lines, "index", "singular value", log_y=True, y_range=ends))
    return Facet(layer_label(layer), tuple(frames))


def _spectrum(setting: Setting, values: Tensor, most: int) -> Line:
    chosen = thin(range(len(values)), most)
    numbers = values.tolist()
    y = [numbers[i] if numbers[i] > 0 else None for i in chosen]
    return Line(setting.name, setting.index, [float(i + 1) for i in chosen], y)


# -- diagonals ------------------------------------------------------------------------------------------------------
def diagonals_panel(runs: Runs) -> Panel:
    """Diagonals of WᵀW, AGOP and accumulated shift as images, one view for each setting and layer."""
    words = (
        "diagonals",
        "Inside the net",
        "What the first layer looks at",
        "Diagonals of matrices at the input as images, side by side: bright pixels are those the net has learned to use. "
        "ρ is the Pearson correlation with the diagonal of WᵀW at the end.",
    )
    stored: list[_Stored[dict[str, Tensor]]] = _stored(runs, DIAGONALS, load_diagonals, MOMENTS)
    if not stored:
        return Panel(
            *words,
            missing="No diagonals were stored with these runs; where inputs are images, "
            f"{how_to_store(runs, 'save_diagonals')}.",
        )
    pixels = sum(
        _picture(image).numel()
        for item in stored
        for q in list(item.found.values())[-1].values()
        for image in q.values()
    )
    views, rows = [], []
    for item in stored:
        steps = thin(sorted(item.found), max(2, BUDGET // pixels))
        for layer in item.layers:
            moments = [item.found[step].get(layer, {}) for step in steps]
            names = dict.fromkeys([*QUANTITIES, *(name for found in moments for name in found)])
            facets = [_picture_facet(name, moments) for name in names if any(name in found for found in moments)]
            label = item.setting.name if len(item.layers) == 1 else f"{item.setting.name}, {layer}"
            formula = "; ".join(QUANTITIES[name][1] for name in QUANTITIES if any(name in m for m in moments))
            views.append(View(label, tuple(facets), formula, tuple(_time(item.run, runs, step) for step in steps)))
            for name, image in moments[-1].items():
                lines = _picture(image).tolist()
                rows += [[item.setting.name, steps[-1], layer, name, i, *rounded(row)] for i, row in enumerate(lines)]
    width = max(map(len, rows)) - 5
    columns = ("setting", "step", "layer", "quantity", "row", *(f"column {i}" for i in range(width)))
    note = f"{_first_seeds(stored)} Colour channels are summed. The table has the last moment."
    return Panel(*words, tuple(views), DataTable(columns, rows), note=note)


def _picture_facet(name: str, moments: Sequence[Mapping[str, Tensor]]) -> Facet:
    """One quantity over training, its correlation with WᵀW at the end in the title."""
    known = [_picture(found[name]) for found in moments if name in found]
    low = min(float(image.min()) for image in known)
    high = max(float(image.max()) for image in known)
    diverging = low < 0 < high
    if diverging:
        high = max(-low, high)
        low = -high
    if not high > low:
        low, high = low - 0.5, high + 0.5
    frames, image = [], known[0]
    for found in moments:
        image = _picture(found[name]) if name in found else image
        rows = [rounded(row) for row in image.tolist()]
        frames.append(HeatMap(rows, low, high, diverging=diverging, picture=True))
    title = QUANTITIES[name][0] if name in QUANTITIES else name
    rho = _pearson(moments[-1].get(name), moments[-1].get("nfm")) if name != "nfm" else None
    return Facet(title if rho is None else f"{title}, ρ = {rho:.2f}", tuple(frames))


def _picture(image: Tensor) -> Tensor:
    """Channels summed, and pixels averaged where there are too many to draw."""
    from torch.nn.functional import adaptive_avg_pool2d

    image = image.double().sum(0) if image.dim() == 3 else image.double()
    height, width = (min(side, PIXELS) for side in image.shape)
    return image if image.shape == (height, width) else adaptive_avg_pool2d(image[None], (height, width))[0]


def _pearson(a: Tensor | None, b: Tensor | None) -> float | None:
    if a is None or b is None or a.shape != b.shape:
        return None
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 0 else None


# -- both -----------------------------------------------------------------------------------------------------------
def _first_seeds(stored: Sequence[_Stored[Any]]) -> str:
    several = any(len(item.setting.runs) > 1 for item in stored)
    seeds = dict.fromkeys(str(item.run.seed) for item in stored)
    return f"Of each setting one seed ({', '.join(seeds)})." if several else ""


def _time(run: Run, runs: Runs, step: int) -> str:
    return f"epoch {run.time(step):.4g}" if runs.clock == "epoch" else f"step {step}"


def _log_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Ends of a logarithmic axis with a small margin; values below a millionth of the largest are ignored."""
    if not values:
        return None
    high = max(values)
    low = max(min(values), high * 1e-6)
    return 10 ** (math.log10(low) - 0.1), 10 ** (math.log10(high) + 0.1)
