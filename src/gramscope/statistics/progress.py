"""A progress bar on terminals, with the time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(text: str, total: int | None, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error, if that is a terminal, and yield a function that advances it by one.

    Args:
        text: what is being done.
        total: number of steps, ``None`` if it is not known.
        shown: ``False`` shows nothing.

    >>> with progress_bar("collecting", 2) as advance:
    ...     advance()
    """
    if not (shown and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left:"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)
