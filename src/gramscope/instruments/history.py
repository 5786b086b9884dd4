"""The records of a monitor, which a notebook shows as curves and a table."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from gramscope.measures.table import Table, format_value

#: width and height of a plot, and its margin on all sides
WIDTH, HEIGHT, MARGIN = 260, 150, 22
#: layers that are drawn; the table has all of them
MOST_LAYERS = 12
#: measures in a summary
MOST_MEASURES = 6

Point = tuple[int, float]


class Records(list[dict[str, Any]]):
    """A list of records ``{step, layers, network, notes}``.

    >>> records = Records([{"step": s, "layers": {"fc": {"nc1": 1.0 / (s + 1)}}, "network": {}} for s in range(3)])
    >>> records._repr_html_().count("<polyline")
    1
    """

    def curves(self) -> dict[str, dict[str, list[Point]]]:
        """``{measure: {layer: [(step, value), …]}}`` without values that are missing; measures of the network come first."""
        found: dict[str, dict[str, list[Point]]] = {}
        for record in self:
            for layer, row in {"network": record.get("network", {}), **record["layers"]}.items():
                for name, value in row.items():
                    if value is not None and math.isfinite(value):
                        found.setdefault(name, {}).setdefault(layer, []).append((record["step"], value))
        return found

    def summary(self) -> str:
        """How many records there are, and the last values of the first measures in the first and the last layer.

        >>> print(Records([{"step": 8, "layers": {"fc": {"nc1": 0.5}, "out": {"nc1": 0.25}}, "network": {}}]).summary())
        2 layers, 1 record, the last at step 8
          nc1: 0.5000 (fc) … 0.2500 (out)
        """
        last = next((record for record in reversed(self) if record["layers"]), None)
        if last is None:
            return "no records of layers yet"
        layers = list(last["layers"])
        shown = list(dict.fromkeys((layers[0], layers[-1])))
        counts = [(len(layers), "layer"), (len(self), "record")]
        lines = [
            ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counts) + f", the last at step {self[-1]['step']}"
        ]
        for name in list(last["layers"][layers[0]])[:MOST_MEASURES]:
            values = [f"{format_value(last['layers'][layer].get(name))} ({layer})" for layer in shown]
            lines.append(f"  {name}: {' … '.join(values)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """One plot of each measure that changes, and the table of the last record."""
        if not self:
            return "<p>no records yet</p>"
        curves = self.curves()
        layers = list(dict.fromkeys(layer for lines in curves.values() for layer in lines))[:MOST_LAYERS]
        colours = {layer: f"hsl({360 * i // len(layers)} 65% 45%)" for i, layer in enumerate(layers)}
        plots = [_plot(name, lines, colours) for name, lines in curves.items() if _changes(lines)]
        legend = " ".join(f'<span style="color:{colour}">■ {escape(layer)}</span>' for layer, colour in colours.items())
        last = self[-1]
        return (
            f'<div><div style="display:flex;flex-wrap:wrap">{"".join(plots)}</div><div>{legend if plots else ""}</div>'
            f"<p>step {last['step']}</p>{Table.from_dict(last)._repr_html_()}</div>"
        )


def _changes(lines: dict[str, list[Point]]) -> bool:
    """Whether there is a curve to draw."""
    return any(len({value for _, value in line}) > 1 for line in lines.values())


def _plot(name: str, lines: dict[str, list[Point]], colours: dict[str, str]) -> str:
    """One measure over steps, on a logarithmic axis ``log(1 + step)``, as SVG."""
    shown = {layer: line for layer, line in lines.items() if layer in colours}
    points = [point for line in shown.values() for point in line]
    steps, values = [math.log1p(step) for step, _ in points], [value for _, value in points]
    left, right, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> str:
        x = (math.log1p(step) - left) / ((right - left) or 1)
        y = (value - low) / ((high - low) or 1)
        return f"{MARGIN + x * (WIDTH - 2 * MARGIN):.1f},{HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN):.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{colours[layer]}" stroke-width="1.5" points="{" ".join(place(*p) for p in line)}"/>'
        for layer, line in shown.items()
    )
    texts = (
        (MARGIN, 14, "start", name),
        (WIDTH - MARGIN, 14, "end", f"{low:.3g} to {high:.3g}"),
        (MARGIN, HEIGHT - 6, "start", f"step {min(step for step, _ in points)}"),
        (WIDTH - MARGIN, HEIGHT - 6, "end", f"{max(step for step, _ in points)}"),
    )
    words = "".join(f'<text x="{x}" y="{y}" text-anchor="{at}">{escape(text)}</text>' for x, y, at, text in texts)
    style = "font:10px sans-serif;fill:currentColor"
    return f'<svg width="{WIDTH}" height="{HEIGHT}" style="{style}">{drawn}{words}</svg>'
