"""What a panel is: text, views, plots as plain numbers, and a table. Plotly and matplotlib both draw from this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

#: most cells of a panel's table: a page has about a dozen and stays below 8 MB
CELLS = 12_000

#: numbers to draw; ``None`` where there is nothing
Numbers: TypeAlias = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """One line, with a band from ``low`` to ``high`` where there are several seeds.

    Args:
        name: of the setting it belongs to; hiding a setting hides its lines.
        index: number of the setting, which decides colour and dashes.
        x, y: the points.
        low, high: the band, or the error bar of single points.
    """

    name: str
    index: int
    x: Sequence[float]
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None


@dataclass(frozen=True)
class LinePlot:
    """Lines over a common axis.

    Args:
        lines: what to draw.
        x_label, y_label: of the axes.
        ticks: names of the positions 0, 1, 2 … on the horizontal axis, where it has names.
        joined: whether the points of a line are joined; otherwise they stand alone with error bars.
        legend: whether the plot has a legend of its own, for lines that are not settings.
        log_y: logarithmic vertical axis.
        y_range: fixed range of the vertical axis, so that facets and moments compare.
    """

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    ticks: tuple[str, ...] = ()
    joined: bool = True
    legend: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class HeatMap:
    """A matrix in colours.

    Args:
        values: rows from top to bottom.
        x_ticks, y_ticks: names of columns and rows; none for pictures.
        low, high: ends of the colour scale.
        spread: lower and upper end of each value over seeds, shown on hovering.
        log: logarithmic colours.
        diverging: two-sided colours around zero.
        picture: square pixels and no axes.
    """

    values: Sequence[Numbers]
    low: float
    high: float
    x_ticks: tuple[str, ...] = ()
    y_ticks: tuple[str, ...] = ()
    x_label: str = ""
    spread: tuple[Sequence[Numbers], Sequence[Numbers]] | None = None
    log: bool = False
    diverging: bool = False
    picture: bool = False


Plot: TypeAlias = LinePlot | HeatMap


@dataclass(frozen=True)
class Facet:
    """One plot of a view, or one for every position of the view's slider. ``name`` is its setting, if it is of one."""

    title: str
    frames: tuple[Plot, ...]
    name: str = ""


@dataclass(frozen=True)
class View:
    """What a panel shows at a time: plots side by side.

    Args:
        label: its name among the panel's views.
        facets: the plots.
        formula: of the measure.
        moments: names of the positions of the slider, if it has one.
        sentence: what this view shows, where the panel's own sentence does not fit.
    """

    label: str
    facets: tuple[Facet, ...]
    formula: str = ""
    moments: tuple[str, ...] = ()
    sentence: str = ""


@dataclass(frozen=True)
class DataTable:
    """The numbers behind a panel, as they were recorded."""

    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        key: name for links and files.
        section: heading it stands under.
        title: its own heading.
        sentence: what it shows, in a sentence.
        views: what can be shown, the first one at first; none when nothing was recorded.
        table: its data.
        missing: what was not recorded and how to record it.
        note: what was left out.
        log_switch: whether the reader can switch to a logarithmic vertical axis.
    """

    key: str
    section: str
    title: str
    sentence: str
    views: tuple[View, ...] = ()
    table: DataTable = field(default_factory=DataTable)
    missing: str = ""
    note: str = ""
    log_switch: bool = False


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most ``limit`` items, evenly spread, the first and the last among them.

    >>> thin(range(11), 3)
    [0, 5, 10]
    """
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def thin_table(columns: Sequence[str], records: Sequence[Mapping[str, Any]]) -> tuple[DataTable, str]:
    """Columns of records as a table of at most :data:`CELLS` cells, and what to say about rows that were left out."""
    kept = thin(records, max(1, CELLS // len(columns)))
    note = f"The table keeps {len(kept)} of {len(records)} rows, evenly spread; the run directory has all of them."
    rows = [[record.get(name) for name in columns] for record in kept]
    return DataTable(tuple(columns), rows), note if len(kept) < len(records) else ""


def shorten(name: str, limit: int = 24) -> str:
    """A long name without its middle.

    >>> shorten("encoder.layer.11.attention.self.query", 20)
    'encoder.l…self.query'
    """
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Values with five significant digits, more than a screen shows, to keep the page small."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
