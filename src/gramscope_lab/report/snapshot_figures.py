"""Spectra of the weights and diagonals at the input, with a slider over training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gramscope.errors import GramscopeError
from gramscope.names import printable
from gramscope_lab.palette import TWO_SIDED, colour, dash
from gramscope_lab.report.figures import Panel, Trace, View, label, rounded, thin
from gramscope_lab.report.layer_figures import block_layout, layer_label
from gramscope_lab.report.read import Run, Runs, Setting, distinct, shorten
from gramscope_lab.runs.layer_snapshots import DIAGONALS, SPECTRA, load_diagonals, load_spectra, snapshot_steps

if TYPE_CHECKING:
    from torch import Tensor

#: most moments of a slider, layers or settings beside each other, values of a spectrum, pixels along a side
MOMENTS, LAYERS, SETTINGS, VALUES, PIXELS = 16, 8, 6, 128, 64
#: most numbers in a panel, and numbers in a stored tensor beyond which it is not drawn
BUDGET, MOST = 60_000, 10_000_000
_SECTION = "Inside the net"

QUANTITIES = {
    "nfm": ("WᵀW", "the weight Gram", "diag(WᵀW)"),
    "agop": ("AGOP", "the average gradient outer product", "diag((1/n) Σ_i ∇f(x_i) ∇f(x_i)ᵀ) = diag(WᵀKW)"),
    "vcs": (
        "Σv",
        "the accumulated virtual covariance shift",
        "diag(Σ_τ v_τ), v = Σ_i (h_i⁺ h_i⁺ᵀ − h_i h_iᵀ), h⁺ = h − γg",
    ),
}


@dataclass(frozen=True)
class _Stored:
    """The artefacts of the first run of a setting that has any, by step: a spectrum or pictures for each layer."""

    setting: Setting
    run: Run
    found: Mapping[int, Mapping[str, Any]]

    def at(self, step: int) -> Mapping[str, Any]:
        """The newest artefact not later than ``step``, or else the first."""
        return self.found[max((s for s in self.found if s <= step), default=min(self.found))]

    @cached_property
    def layers(self) -> list[str]:
        """Layers in the order of measurement, then of storage."""
        stored = dict.fromkeys(layer for found in self.found.values() for layer in found)
        return list(dict.fromkeys([*(layer for layer in self.run.by_layer if layer in stored), *stored]))


def snapshot_panels(runs: Runs) -> list[Panel]:
    """Spectra and diagonals, where they were kept."""
    spectra, diagonals = _stored(runs, SPECTRA, load_spectra), _stored(runs, DIAGONALS, load_diagonals)
    return [*([_spectra(runs, spectra)] if spectra else []), *([_diagonals(runs, diagonals)] if diagonals else [])]


def _stored(runs: Runs, kind: str, load: Callable[..., Any]) -> list[_Stored]:
    result = []
    for setting in runs.settings:
        for run in setting.runs:
            steps = thin(snapshot_steps(run.directory, kind), MOMENTS)
            found = {step: tensors for step in steps if (tensors := _loaded(load, run, step))}
            if found:
                result.append(_Stored(setting, run, found))
                break
    return thin(result, SETTINGS)


def _loaded(load: Callable[..., Any], run: Run, step: int) -> dict[str, Any]:
    """The usable tensors of an artefact; none, with a note among the run's problems, if it cannot be read."""
    try:
        tensors = load(run.directory, step)
    except GramscopeError as error:
        run.problems.append(str(error))
        return {}
    found: dict[str, Any] = {}
    for layer, value in tensors.items():
        if isinstance(value, dict):
            images = {printable(name): _picture(image) for name, image in value.items() if _usable(image, 2, 3)}
            if images:
                found[printable(layer)] = images
        elif _usable(value, 1):
            found[printable(layer)] = value.double()
    return found


def _usable(values: Tensor, *dimensions: int) -> bool:
    """Whether a stored tensor can be drawn: a spectrum or an image of finite numbers, and not too many."""
    right = values.dim() in dimensions and 0 < values.numel() <= MOST and not values.is_complex()
    return right and bool(values.double().isfinite().all())  # small floats know no isfinite


# -- spectra --------------------------------------------------------------------------------------------------------
def _spectra(runs: Runs, stored: Sequence[_Stored]) -> Panel:
    """Singular values: a plot for each layer, or in deep nets for each setting with the layers of a kind."""
    layers = list(dict.fromkeys(layer for item in stored for layer in item.layers))
    steps = sorted({step for item in stored for step in item.found})
    most = max(16, min(VALUES, BUDGET // (len(stored) * len(layers) * min(len(steps), MOMENTS))))
    steps = thin(steps, max(2, min(MOMENTS, BUDGET // (len(stored) * len(layers) * most))))
    layout = block_layout(layers)
    axes = {"title.text": "index"}, {"type": "log", "nticks": 6, "matches": True}
    views, note = [], _seeds(stored)
    sentence = (
        "Singular values of each layer's weight, the largest first, at the moment the slider shows; on the logarithmic axis "
        "zeros are left out."
    )
    if layout is None:
        shown = thin(layers, LAYERS)
        note += f" {len(shown)} of {len(layers)} layers are drawn." if len(shown) < len(layers) else ""
        facets = [[_spectrum(i, layer, steps, most) for i in stored if layer in i.layers] for layer in shown]
        views.append(View("", facets, [*map(layer_label, shown)], *axes))
    else:
        sentence += " One line for each block, from the first in dark to the last in bright colours."
        kinds = dict(zip(layout.kinds, layout.inside, strict=True))
        kinds |= {layer_label(layer): (layer,) for layer in (*layout.before, *layout.after)}
        for kind, row in kinds.items():
            known = thin([layer for layer in row if layer], PIXELS)
            facets = [_by_depth(item, known, steps, most) for item in stored]
            views.append(View(kind, facets, [item.setting.name for item in stored], *axes))
    terms = [("spectrum", "singular values", "W = U diag(s) Vᵀ, s₁ ≥ s₂ ≥ …")]
    moments = _moments(runs, stored, steps)
    return Panel(
        "spectra", _SECTION, "Spectra of the weights", sentence, views, moments, terms=terms, note=note.strip()
    )


def _spectrum(item: _Stored, layer: str, steps: Sequence[int], most: int) -> Trace:
    """One layer's singular values at each moment; values below a millionth of the largest are not drawn."""
    stored = [item.at(step).get(layer) for step in steps]
    kept = thin(range(max((len(values) for values in stored if values is not None), default=1)), most)
    frames = []
    for values in stored:
        numbers = [] if values is None else values.tolist()
        least = max([0.0, *numbers]) * 1e-6
        frames.append({"y": rounded(numbers[i] if i < len(numbers) and numbers[i] > least else None for i in kept)})
    name, index = item.setting.name, item.setting.index
    return {
        "type": "scatter", "mode": "lines", "name": label(name), "legendgroup": name, "showlegend": True,
        "line": {"color": colour(index), "dash": dash(index), "width": 2}, "x": [i + 1 for i in kept], **frames[-1],
        "hovertemplate": f"{label(name)}<br>%{{x}}: %{{y:.4~g}}<extra></extra>", "frames": frames,
    }  # fmt: skip


def _by_depth(item: _Stored, layers: Sequence[str], steps: Sequence[int], most: int) -> list[Trace]:
    """Spectra of the layers of a kind, coloured by depth."""
    dark, bright = (0, 60, 120), (235, 175, 60)
    traces = []
    for i, layer in enumerate(layers):
        depth = i / max(1, len(layers) - 1)
        shade = "rgb({},{},{})".format(*(round(a + depth * (b - a)) for a, b in zip(dark, bright, strict=True)))
        look = {"line": {"color": shade, "width": 1.5}, "showlegend": False}
        hover = f"{label(layer_label(layer))}<br>%{{x}}: %{{y:.4~g}}<extra></extra>"
        if layer in item.layers:
            traces.append({**_spectrum(item, layer, steps, most), **look, "hovertemplate": hover})
    return traces


# -- diagonals ------------------------------------------------------------------------------------------------------
def _diagonals(runs: Runs, stored: Sequence[_Stored]) -> Panel:
    """Diagonals of WᵀW, AGOP and accumulated shift as images, each setting and layer in a row."""
    steps = sorted({step for item in stored for step in item.found})
    pixels = sum(i.numel() for item in stored for q in item.at(steps[-1]).values() for i in q.values())
    steps = thin(steps, max(2, min(MOMENTS, BUDGET // max(1, pixels))))
    facets, titles = [], []
    for item in stored:
        for layer in item.layers:
            moments = [item.at(step).get(layer, {}) for step in steps]
            names = dict.fromkeys([*QUANTITIES, *(name for found in moments for name in found)])
            for name in names:
                if any(name in found for found in moments):
                    facets.append([_images(name, moments)])
                    where = item.setting.name if len(item.layers) == 1 else f"{item.setting.name}, {layer}"
                    titles.append(f"{shorten(where, 20)}\n{_image_title(name, moments[-1])}")
    hidden = {"visible": False, "constrain": "domain"}
    view = View("", facets, titles, hidden, {**hidden, "autorange": "reversed", "scaleanchor": "x"})
    return Panel(
        "diagonals", _SECTION, "What the first layer looks at",
        "Diagonals of matrices at the input as images: the brighter a pixel, the more it counts; red and blue are positive "
        "and negative. ρ is the Pearson correlation with the diagonal of WᵀW at the end.",
        [view], _moments(runs, stored, steps), width=105, height=190, columns=len(QUANTITIES),
        terms=list(QUANTITIES.values()),
        note=f"{_seeds(stored)} Colour channels are summed.".strip(),
    )  # fmt: skip


def _images(name: str, moments: Sequence[Mapping[str, Tensor]]) -> Trace:
    """One quantity over training, in its own range of colours."""
    known = [found[name] for found in moments if name in found]
    low, high = min(float(image.min()) for image in known), max(float(image.max()) for image in known)
    two_sided = low < 0 < high
    if two_sided:
        low, high = -max(-low, high), max(-low, high)
    if not high > low:
        low, high = low - 0.5, high + 0.5
    frames, image = [], known[0]
    for found in moments:
        image = found.get(name, image)
        frames.append({"z": [rounded(row) for row in image.tolist()]})
    scale = [[i / 10, shade] for i, shade in enumerate(TWO_SIDED)] if two_sided else "Cividis"
    return {
        "type": "heatmap", "zmin": low, "zmax": high, "colorscale": scale, "showscale": False, **frames[-1],
        "hovertemplate": "row %{y}, column %{x}<br>%{z:.4~g}<extra></extra>", "frames": frames,
    }  # fmt: skip


def _image_title(name: str, last: Mapping[str, Tensor]) -> str:
    title = QUANTITIES[name][0] if name in QUANTITIES else name
    rho = _pearson(last.get(name), last.get("nfm")) if name != "nfm" else math.nan
    return title if math.isnan(rho) else f"{title}, ρ = {rho:.2f}"


def _picture(image: Tensor) -> Tensor:
    """Channels summed, and pixels averaged where there are too many to draw."""
    from torch.nn.functional import adaptive_avg_pool2d

    image = image.double().sum(0) if image.dim() == 3 else image.double()
    height, width = (min(side, PIXELS) for side in image.shape)
    return image if image.shape == (height, width) else adaptive_avg_pool2d(image[None], (height, width))[0]


def _pearson(a: Tensor | None, b: Tensor | None) -> float:
    """The correlation of two images; NaN where one is missing or constant."""
    import torch

    if a is None or b is None or a.shape != b.shape:
        return math.nan
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


# -- both -----------------------------------------------------------------------------------------------------------
def _seeds(stored: Sequence[_Stored]) -> str:
    several = any(len(item.setting.runs) > 1 for item in stored)
    seeds = dict.fromkeys(str(item.run.seed) for item in stored)
    return f"Of each setting one seed ({', '.join(seeds)})." if several else ""


def _moments(runs: Runs, stored: Sequence[_Stored], steps: Sequence[int]) -> list[str]:
    run = stored[0].run
    return distinct(f"epoch {run.time(step):.4g}" if runs.clock == "epoch" else f"step {step}" for step in steps)
