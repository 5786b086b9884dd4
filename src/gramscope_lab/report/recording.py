"""How to record what a report could not show: with gs.Monitor in a training loop of one's own, else with gramscope train."""

from __future__ import annotations

from collections.abc import Sequence

from gramscope_lab.report.loaded_runs import Runs


def how_to_measure(runs: Runs, measures: Sequence[str] = ()) -> str:
    """What to do for these measures of layers; without names, for any."""
    names = ", ".join(f'"{name}"' for name in measures)
    if own_loop(runs):
        asked = f", measures=[{names}]" if names else ""
        return f"measure in your loop: gs.Monitor(model, data, loss{asked}, log=…), and monitor.step() after every step"
    named = f"set measure.names = [{names}] and " if names else ""
    return f"{named}measure while training: gramscope train … --measure-every 1"


def how_to_store(runs: Runs, function: str) -> str:
    """What to do for spectra or diagonals; ``function`` of :mod:`gramscope_lab.runs.layer_snapshots` stores them."""
    if own_loop(runs):
        return f"store them from your loop with gramscope_lab.runs.layer_snapshots.{function}"
    return "keep them while training: gramscope train … --measure-every 1, with measure.matrices = true"


def own_loop(runs: Runs) -> bool:
    """Whether all runs come from training loops of the user's own."""
    return bool(runs.all) and all(run.monitored for run in runs.all)
