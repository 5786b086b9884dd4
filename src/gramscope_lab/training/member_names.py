"""Names of the members of a sweep, such as ``lr-0.1``: short, safe in file names, and all different."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: words for signs, used where names would be equal without them
_SIGNS = {"+": "_plus_", "*": "_times_", "/": "_over_", "^": "_to_", "%": "_mod_", "<": "_below_", ">": "_above_"}


def short_key(key: str) -> str:
    """``method.lr`` as ``lr``, other tables' keys as ``data_seed``."""
    return key.removeprefix("method.").replace(".", "_")


def value_labels(values: Sequence[Any]) -> list[str]:
    """A name for each of different values, as short as tells them apart.

    >>> value_labels([0.1, 0.01]), value_labels(["x+y", "x*y"])
    (['0.1', '0.01'], ['x_plus_y', 'x_times_y'])
    """
    for spelling in (_short, _exact):
        labels = [spelling(value) for value in values]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label}-{number}" for number, label in enumerate(labels, start=1)]


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return _safe("x".join(map(str, value)))
    if _is_file(value):
        return _safe(Path(value).name)
    return _safe(f"{value:g}" if isinstance(value, float) else str(value))


def _exact(value: Any) -> str:
    if isinstance(value, tuple):
        return _safe("x".join(map(repr, value)))
    return _safe(str(value) if _is_file(value) else "".join(_SIGNS.get(letter, letter) for letter in str(value)))


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(".npz")


def _safe(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)
