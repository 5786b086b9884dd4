"""Neural collapse at the readout over training."""

from __future__ import annotations

from gramscope_lab.report.layer_panels import measure_table, recorded_layers, recorded_measures
from gramscope_lab.report.loaded_runs import Runs
from gramscope_lab.report.measure_texts import COLLAPSE, measure_text
from gramscope_lab.report.panel import Facet, LinePlot, Panel, View
from gramscope_lab.report.recording import how_to_measure
from gramscope_lab.report.seed_statistics import layer_curve
from gramscope_lab.report.training_panels import all_positive, as_line


def collapse_panel(runs: Runs) -> Panel:
    """NC1 to NC3 of the features that enter the readout, and the normalised surrogate."""
    recorded = recorded_measures(runs)
    names = [name for name in COLLAPSE if name in recorded]
    facets, formulas = [], []
    readouts: dict[str, None] = {}
    for name in names:
        lines = []
        for setting in runs.settings:
            layers = recorded_layers(setting.runs, name)
            if layers:
                readouts[layers[-1]] = None
                lines.append(as_line(setting, layer_curve(setting, name, layers[-1], runs.clock)))
        drawn = tuple(line for line in lines if line is not None)
        text = measure_text(name)
        log = name == "nc1" and all_positive(drawn)
        facets.append(Facet(text.label, (LinePlot(drawn, runs.clock, "", log_y=log),)))
        formulas.append(f"{text.label}: {text.formula}")
    table, note = measure_table(runs, names)
    return Panel(
        "collapse",
        "Inside the net",
        "Neural collapse",
        "Whether the features that enter the readout gather at their class means, and these at the corners of a simplex: "
        "all NC1 to NC3 fall to 0 at full collapse, NC4 and the normalised surrogate rise to 1.",
        (View("", tuple(facets), "; ".join(formulas)),) if facets else (),
        table,
        missing="" if facets else f"None of {', '.join(COLLAPSE)} was recorded; {how_to_measure(runs, COLLAPSE)}.",
        note=f"Features that enter {', '.join(readouts)}. {note}".strip() if readouts else note,
    )
