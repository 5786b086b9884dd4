"""Neural collapse at the readout over training."""

from __future__ import annotations

from gramscope.report.curves import as_line
from gramscope.report.layers import measure_table, recorded_layers, recorded_measures
from gramscope.report.over_seeds import layer_curve
from gramscope.report.panel import Facet, LinePlot, Panel, View
from gramscope.report.reading import Runs
from gramscope.report.words import COLLAPSE, word

_HOW = 'measure while training with measure.names = ["nc1", "nc2_equinorm", "nc2_equiangular", "nc3", …]'


def collapse_panel(runs: Runs) -> Panel:
    """NC1 to NC3 of the features that enter the readout, and the normalised surrogate."""
    names = [name for name in COLLAPSE if name in recorded_measures(runs)]
    facets, formulas = [], []
    places: dict[str, None] = {}
    for name in names:
        lines = []
        layers: dict[str, None] = {}
        for setting in runs.settings:
            found = recorded_layers(setting.runs, name)
            if found:
                layers[found[-1]] = None
                values = layer_curve(setting, name, found[-1], runs.clock)
                lines.append(as_line(setting, values))
        drawn = tuple(line for line in lines if line is not None)
        log = name == "nc1" and all(y is not None and y > 0 for line in drawn for y in line.y)
        facets.append(Facet(word(name).label, (LinePlot(drawn, runs.clock, "", log_y=log),)))
        formulas.append(f"{word(name).label}: {word(name).formula}")
        places |= layers
    table, note = measure_table(runs, names)
    return Panel(
        "collapse",
        "Inside the net",
        "Neural collapse",
        "Whether the features that enter the readout gather at their class means, and these at the corners of a simplex: "
        "all NC1 to NC3 fall to 0 at full collapse, NC4 and the normalised surrogate rise to 1.",
        (View("", tuple(facets), "; ".join(formulas)),) if facets else (),
        table,
        missing="" if facets else f"Not recorded; {_HOW}",
        note=" ".join(part for part in (f"Features that enter {', '.join(places)}." if places else "", note) if part),
    )
