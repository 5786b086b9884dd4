"""The measures of layers: over training, by block in deep nets, and over depth at the end.

Layers are lines over training; in nets of blocks (transformers) they are a map kind × block with a slider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from gramscope.measures.column import GROUPS
from gramscope.measures.columns import COLUMNS
from gramscope.names import split_name
from gramscope_lab.report.figures import Grid, Panel, Trace, View, colour_scale, heat_map, line, null_line, thin
from gramscope_lab.report.read import Runs, Setting, distinct, shorten, spread_sentence

#: rows of cells of a map, each a layer and a step
Cells: TypeAlias = Sequence[Sequence[tuple[str | None, int]]]

#: most layers without a look for blocks, most layers drawn as lines, most settings drawn as maps, most moments of maps
FEW, LINES, SETTINGS, MOMENTS = 6, 24, 12, 12
#: most cells of a panel's maps, so that a page stays below 8 MB
CELLS = 40_000
#: fewer blocks than this are shown as single layers
LEAST_BLOCKS = 3
#: measures that range over orders of magnitude
LOGARITHMIC = frozenset(
    {"surrogate", "surrogate_linearized", "gradient_norm", "agop_trace", "vcs_residual", "fle_residual", "nc1"}
)
#: groups in the order of their panels; others follow
_FIRST = ("linearity", "alignment", "spectra", "collapse", "virtual", "gradient", "weights")
_SECTION = "Layers"


# -- layers by kind and block ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class BlockLayout:
    """``inside[i][j]`` is the layer of kind ``kinds[i]`` in block ``blocks[j]``, or ``None``.

    Layers outside all blocks come ``before`` or ``after`` them.
    """

    kinds: tuple[str, ...]
    blocks: tuple[str, ...]
    inside: tuple[tuple[str | None, ...], ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """Labels of the columns of a map: layers before, blocks, layers after."""
        return distinct([*("in" for _ in self.before), *self.blocks, *("out" for _ in self.after)])

    @property
    def rows(self) -> list[list[str | None]]:
        """The layer of each cell of a map; a layer outside the blocks fills its column."""
        return [[*self.before, *row, *self.after] for row in self.inside]


def block_layout(layers: Sequence[str]) -> BlockLayout | None:
    """Arrange layers, given from input to output; ``None`` if fewer than three blocks share a kind."""
    names = {layer: split_name(layer) for layer in layers}
    inside = [layer for layer in layers if names[layer].block is not None]
    repeated = Counter((names[layer].stack, names[layer].kind) for layer in inside)
    if not repeated or max(repeated.values()) < LEAST_BLOCKS:
        return None
    stacks = _short_stacks(sorted({names[layer].stack for layer in inside}))
    cells: dict[str, dict[int, str]] = {}
    for layer in inside:
        block, kind, stack = names[layer]
        row = shorten(f"{stacks[stack]} {kind}".strip(), 32)
        while block in cells.get(row, {}):  # two names that shorten to one
            row += "′"
        cells.setdefault(row, {})[block or 0] = layer
    numbers = sorted({number for row in cells.values() for number in row})
    outside = [layer for layer in layers if names[layer].block is None]
    first = layers.index(inside[0])
    return BlockLayout(
        tuple(cells),
        tuple(map(str, numbers)),
        tuple(tuple(row.get(number) for number in numbers) for row in cells.values()),
        tuple(layer for layer in outside if layers.index(layer) < first),
        tuple(layer for layer in outside if layers.index(layer) > first),
    )


def layer_label(layer: str) -> str:
    """A short label that keeps the number of the block.

    >>> layer_label("model.layers.11.self_attn.k_proj"), layer_label("lm_head")
    ('11 self_attn.k_proj', 'lm_head')
    """
    block, kind, stack = split_name(layer)
    if block is None:
        return shorten(layer, 28)
    part = next((part for part in ("encoder", "decoder") if part in stack.split(".")), "")
    return f"{part} {block} {shorten(kind, 24)}".strip()


def _short_stacks(stacks: Sequence[str]) -> dict[str, str]:
    """For each list of blocks the parts of its name that the others lack; empty if there is only one list."""
    shared = set.intersection(*(set(stack.split(".")) for stack in stacks))
    return {stack: ".".join(part for part in stack.split(".") if part not in shared) for stack in stacks}


# -- panels ---------------------------------------------------------------------------------------------------------
def layer_panels(runs: Runs) -> list[Panel]:
    """The layers compared at the end, and one panel for each group of measures."""
    found = Measured(runs)
    if not found.names:
        return []
    groups: dict[str, list[str]] = {group: [] for group in (*_FIRST, *GROUPS, "other")}
    for name in found.names:
        groups[COLUMNS[name].group if name in COLUMNS else "other"].append(name)
    titles = {**GROUPS, "other": "Other measures"}
    panels = [_by_depth(found)] if len(found.layers) > 1 and found.layout is None else []
    panels += [
        _over_training(found, group, titles.get(group, group), names) for group, names in groups.items() if names
    ]
    return panels


def terms(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, summary and formula of measures."""
    return [(name, COLUMNS[name].summary, COLUMNS[name].formula) for name in names if name in COLUMNS]


@dataclass(frozen=True)
class Measured:
    """What was measured of layers."""

    runs: Runs

    @cached_property
    def nulls(self) -> dict[str, str]:
        """For each recorded measure the recorded column to read it against."""
        found = self.runs.measures
        pairs = ((name, COLUMNS[name].null if name in COLUMNS else f"{name}_null") for name in found)
        return {name: null for name, null in pairs if null in found}

    @cached_property
    def names(self) -> list[str]:
        """Recorded measures in the order of the panels, without those that are drawn beside what they belong to."""
        groups = list(dict.fromkeys((*_FIRST, *GROUPS)))
        order = {name: (groups.index(column.group), place) for place, (name, column) in enumerate(COLUMNS.items())}
        apart = set(self.nulls.values())
        return sorted((n for n in self.runs.measures if n not in apart), key=lambda n: order.get(n, (len(groups), 0)))

    @cached_property
    def layers(self) -> list[str]:
        """Layers with any number, in order of appearance."""
        return list(dict.fromkeys(layer for layers in self.runs.measures.values() for layer in layers))

    @cached_property
    def layout(self) -> BlockLayout | None:
        """The layers by kind and block, if the net has blocks."""
        return block_layout(self.layers) if len(self.layers) > FEW else None

    def settings(self, name: str) -> list[Setting]:
        """Settings with the measure."""
        return [setting for setting in self.runs.settings if any(name in run.measures for run in setting.runs)]

    def logarithmic(self, name: str) -> bool:
        """Whether a measure is drawn on a logarithmic scale: it ranges over orders of magnitude and is positive."""
        layers, clock = self.runs.measures[name], self.runs.clock
        curves = (setting.curve(name, layer, clock) for setting in self.runs.settings for layer in layers)
        return name in LOGARITHMIC and all(value.least > 1e-300 for curve in curves for value in curve.values)

    def times(self, names: Sequence[str], settings: Sequence[Setting]) -> dict[int, float]:
        """The time of each step at which one of the measures was taken."""
        curves = [s.curve(name, layer, self.runs.clock) for s in settings for name in names for layer in self.layers]
        found = {step: time for curve in curves for step, time in zip(curve.steps, curve.times, strict=True)}
        return dict(sorted(found.items()))

    def grid(self, setting: Setting, name: str, rows: Cells) -> Grid:
        """The values of cells, each given by a layer and a step."""
        clock = self.runs.clock
        return [[(l and setting.curve(name, l, clock).by_step.get(step)) or None for l, step in row] for row in rows]


def _over_training(found: Measured, group: str, title: str, names: Sequence[str]) -> Panel:
    title, _, rest = title.partition(": ")
    sentence = f"{rest[:1].upper()}{rest[1:]}. " if rest else ""
    if any(name in found.nulls for name in names):
        sentence += "Dotted lines, or the second number on hovering, are nulls: the value to expect without learning. "
    if found.layout is not None:
        return _blocks(found, found.layout, f"layers-{group}", title, sentence.strip(), names)
    return _lines(found, f"layers-{group}", title, sentence.strip(), names)


# -- lines ----------------------------------------------------------------------------------------------------------
def _lines(found: Measured, key: str, title: str, sentence: str, names: Sequence[str]) -> Panel:
    """One plot for each layer, one line for each setting."""
    known = [layer for layer in found.layers if any(layer in found.runs.measures[name] for name in names)]
    layers = thin(known, LINES)
    clock, views = found.runs.clock, []
    for name in names:
        log = found.logarithmic(name)
        facets = [_layer_lines(found, name, layer) for layer in layers]
        y = {"matches": True, "type": "log" if log else "linear", "nticks": 6}
        views.append(View(_plain(name), facets, [*map(layer_label, layers)], {"title.text": clock}, y))
    return Panel(key, _SECTION, title, sentence, views, terms=terms(names), note=_left_out((layers, known, "layers")))


def _layer_lines(found: Measured, name: str, layer: str) -> list[Trace]:
    clock, traces = found.runs.clock, list[Trace]()
    at = f"{clock} %{{x:.4~g}}"
    for setting in found.settings(name):
        if curve := setting.curve(name, layer, clock):
            traces += line(setting.name, setting.index, curve.times, curve.values, at)
        null = name in found.nulls and setting.curve(found.nulls[name], layer, clock)
        if null:
            traces.append(null_line(setting.name, setting.index, null.times, null.values, at))
    return traces


def _by_depth(found: Measured) -> Panel:
    """Each measure against depth at the last measurement: a line for each setting."""
    ticks = distinct(map(layer_label, found.layers))
    x: Trace = {"type": "category", "categoryorder": "array", "categoryarray": ticks}
    x["title.text"] = "layer, from input to output"
    views = []
    for name in found.names:
        lines = [trace for setting in found.runs.settings for trace in _depth_line(found, setting, name, ticks)]
        y = {"matches": True, "type": "log" if found.logarithmic(name) else "linear"}
        views.append(View(_plain(name), [lines], [""], x, y))
    nulls = " Dotted lines are nulls: the value to expect without learning." if found.nulls else ""
    sentence = f"The last measurement of every layer, from input to output.{nulls} {spread_sentence(found.runs)}"
    title = "Layers compared at the end"
    return Panel("by-layer", _SECTION, title, sentence, views, width=420, height=270, terms=terms(found.names))


def _depth_line(found: Measured, setting: Setting, name: str, ticks: Sequence[str]) -> list[Trace]:
    """The last values of all layers, and their nulls."""
    traces = []
    for measure in (name, found.nulls.get(name)):
        curves = [measure and setting.curve(measure, layer, found.runs.clock) for layer in found.layers]
        known = {tick: curve.values[-1] for tick, curve in zip(ticks, curves, strict=True) if curve}
        x, values = list(known), list(known.values())
        if known and measure == name:
            traces += line(setting.name, setting.index, x, values, "%{x}")
        elif known:
            traces.append(null_line(setting.name, setting.index, x, values, "%{x}"))
    return traces


# -- maps -----------------------------------------------------------------------------------------------------------
def _blocks(found: Measured, layout: BlockLayout, key: str, title: str, sentence: str, names: Sequence[str]) -> Panel:
    """A map kind × block for each setting, with a slider over training."""
    settings, rows = found.runs.settings[:SETTINGS], layout.rows
    times = found.times(names, settings)
    steps = thin(list(times), max(2, min(MOMENTS, CELLS // (len(rows) * len(rows[0]) * len(names) * len(settings)))))
    cells = [[[(layer, step) for layer in row] for row in rows] for step in steps]
    axis = {"type": "category", "showgrid": False, "zeroline": False, "categoryorder": "array"}
    axes = (
        {**axis, "categoryarray": layout.columns, "title.text": "block", "tickangle": 0},
        {**axis, "categoryarray": layout.kinds, "autorange": "reversed", "dtick": 1 + len(rows) // 80, "matches": True},
    )
    views = [_map_view(found, name, settings, cells, axes) for name in names]
    for trace in (facet[0] for view in views for facet in view.facets):
        trace["customdata"] = [[layer_label(layer) if layer else "" for layer in row] for row in rows]
    sentence = f"{sentence} Kind of layer × block; layers outside the blocks are whole columns.".strip()
    moments = distinct(f"{found.runs.clock} {times[step]:.4g}" for step in steps)
    note = _left_out((steps, times, "moments"), (settings, found.runs.settings, "settings"))
    height = _height(len(rows))
    return Panel(key, _SECTION, title, sentence, views, moments, 420, height, terms=terms(names), note=note)


def _map_view(
    found: Measured,
    name: str,
    settings: Sequence[Setting],
    moments: Sequence[Cells],
    axes: tuple[Trace, Trace],
) -> View:
    """Maps of one measure, one for each setting, with one colour scale."""
    log, null = found.logarithmic(name), found.nulls.get(name)
    x, y = (axis["categoryarray"] for axis in axes)
    facets, values = [], list[float]()
    for setting in settings:
        grids = [found.grid(setting, name, cells) for cells in moments]
        values += [cell.mean for grid in grids for row in grid for cell in row if cell]
        nulls = [found.grid(setting, null, cells) for cells in moments] if null else []
        facets.append([heat_map(grids, x, y, "%{customdata}", nulls=nulls, log=log)])
    return View(_plain(name), facets, [setting.name for setting in settings], *axes, colour_scale(values, log=log))


def _height(rows: int) -> int:
    """Pixels of a map."""
    return max(90, rows * (24 if rows <= 12 else 18 if rows <= 30 else max(5, min(14, 1100 // rows))))


def _left_out(*sizes: tuple[Sized, Sized, str]) -> str:
    return " ".join(f"{len(few)} of {len(many)} {what} are drawn." for few, many, what in sizes if len(few) < len(many))


def _plain(name: str) -> str:
    return name.replace("_", " ")
