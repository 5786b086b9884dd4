"""Printing: results on standard output, everything else on standard error."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from gramscope.names import printable
from gramscope_lab.runs.files import to_json
from gramscope_lab.training.reporter import Reporter


class _PlainConsole(Console):
    """Prints text as it is: no markup, no wrapping, and no control characters."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, soft_wrap=True)

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)


def results() -> Console:
    """Where results go."""
    return _PlainConsole()


def messages() -> Console:
    """Where progress, notes and errors go."""
    return _PlainConsole(stderr=True)


def print_json(value: Any) -> None:
    """Print one JSON document, for machines."""
    sys.stdout.write(to_json(value, indent=1) + "\n")


def print_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print rows as a table; numbers are right-aligned with four significant digits. No word of a heading is broken."""
    console = Console(highlight=False, markup=False)
    names = list(columns or dict.fromkeys(key for row in rows for key in row))
    headings = [name.replace("_", " ") for name in names]
    narrowest = [max(map(len, heading.split()), default=0) for heading in headings]
    table = Table()
    for name, heading, width in zip(names, headings, narrowest, strict=True):
        number = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(
            Text(printable(heading)), justify="right" if number else "left", overflow="fold", min_width=width
        )
    for row in rows:
        table.add_row(*(Text(cell(row.get(name))) for name in names))
    # a pipe takes at least 200 characters, and a narrow window more than it shows rather than less
    console.width = max(console.width if console.is_terminal else 200, sum(narrowest) + 3 * len(names) + 1)
    if title:
        results().print(title)
    console.print(table)


def without_empty(rows: Sequence[Mapping[str, Any]], column: str) -> Sequence[Mapping[str, Any]]:
    """The rows without a column that is empty in all of them."""
    if any(row[column] for row in rows):
        return rows
    return [{key: value for key, value in row.items() if key != column} for row in rows]


def show(title: str, rows: Sequence[Mapping[str, Any]], json: bool) -> None:
    """Print rows as JSON or as a table."""
    print_json(rows) if json else print_table(title, rows)


def cell(value: Any) -> str:
    """A value as text for a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


class TerminalReporter(Reporter):
    """Bars with the time left on a terminal, one line an evaluation elsewhere."""

    def __init__(self) -> None:
        self._console = messages()
        self._progress: Progress | None = None
        self._task: Any = None
        self._told = 0.0

    @override
    def note(self, text: str) -> None:
        self._console.print(text)

    @override
    def start(self, label: str, total: int, unit: str = "step") -> None:
        self._label, self._total, self._unit = label, total, unit
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
        )
        self._task = self._progress.add_task(label, total=total, news="")
        self._progress.start()

    @override
    def advance(self, done: int) -> None:
        if self._progress is not None:
            now = time.perf_counter()
            if done == self._total or now - self._told > 0.1:  # drawing every step would slow training down
                self._told = now
                self._progress.update(self._task, completed=done)
        elif self._unit != "step":
            self._console.print(f"{self._label}: {done} of {self._total}")

    @override
    def records(self, records: Sequence[dict[str, Any]], label: str = "") -> None:
        keys = ("test_accuracy", "test_loss")
        shown = {key: [r[key] for r in records if r.get(key) is not None] for key in keys}
        text = ", ".join(f"{key.replace('_', ' ')} {statistics.fmean(v):.4g}" for key, v in shown.items() if v)
        if self._progress is not None:
            self._progress.update(self._task, news=f"{label} {text}".strip())
        else:
            self._console.print(f"{label or self._label}: epoch {records[0]['epoch']:g}, {text}")

    @override
    def finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
