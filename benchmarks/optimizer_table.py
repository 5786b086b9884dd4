"""The comparison of optimizers as two tables in Markdown: scores, and what rates do to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.optimizers import Line

#: method → its column in the table of rates
_COLUMNS = {
    "VCL": "VCL (γ)",
    "VCL, all steps": "VCL (steps)",
    "Muon": "Muon",
    "Muon, decay 0.1": "Muon, decay",
    "AdamW": "AdamW",
    "SGD, momentum": "SGD",
    "SOAP": "SOAP",
}


def score_table(lines: Iterable[Line]) -> str:
    """Mean ± standard error of VCL and of the best peer, with its rate; bold where VCL is at or above every peer."""
    rows = []
    for task, here in _by_task(lines):
        ours = next((line for line in here if line.method == "VCL"), None)
        peers = [line for line in here if not line.method.startswith("VCL")]
        if ours is not None and peers:
            best = max(peers, key=lambda line: line.score)
            own = _score(ours)
            peer = f"{_score(best)} ({_COLUMNS.get(best.method, best.method)}, rate {best.rate:g})"
            rows.append((*task, f"**{own}**" if ours.score >= best.score else own, peer, str(ours.seeds)))
    return _markdown(("net, data", "steps", "VCL", "best peer", "seeds"), rows)


def rate_table(lines: Iterable[Line]) -> str:
    """Median over the rates of each method and, after a stroke, the spread."""
    lines = list(lines)
    methods = [name for name in _COLUMNS if any(line.method == name for line in lines)]
    rows = []
    for task, here in _by_task(lines):
        known = (line for line in here if not math.isnan(line.spread))
        by = {line.method: f"{_number(line, line.median)} / {_number(line, line.spread)}" for line in known}
        rows.append((*task, *(by.get(name, "") for name in methods)))
    return _markdown(("net, data", "steps", *(_COLUMNS[name] for name in methods)), rows)


def _by_task(lines: Iterable[Line]) -> list[tuple[tuple[str, str], list[Line]]]:
    found: dict[tuple[str, str, int], list[Line]] = {}
    for line in lines:
        found.setdefault((line.net, line.data, line.steps), []).append(line)
    return [((f"{net}, {data}", f"{steps:,}"), here) for (net, data, steps), here in found.items()]


def _score(line: Line) -> str:
    found = _number(line, line.score)
    return found if math.isnan(line.error) else f"{found} ± {_number(line, line.error)}"


def _number(line: Line, value: float) -> str:
    """Per cent with one digit, a loss per character with three, without the sign that lets more be better."""
    return f"{abs(value):.3f}" if line.data == "text" else f"{value:.1f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruled = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)
