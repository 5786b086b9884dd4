"""Settings of experiments: frozen dataclasses as plain values for TOML, and values of a user checked and put in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from gramscope.errors import InputError

S = TypeVar("S")


def settings_table(settings: Any) -> dict[str, Any]:
    """Settings as plain values for TOML."""
    return {key: _as_list(value) for key, value in dataclasses.asdict(settings).items() if value is not None}


def with_values(name: str, settings: S, values: Mapping[str, Any]) -> S:
    """Settings with some fields replaced; a value must have the type of the one it replaces."""
    known = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}  # type: ignore[arg-type]
    changed = {}
    for key, value in values.items():
        if key not in known:
            raise InputError(f"{name} has no setting {key!r}; it has: {', '.join(known)}")
        changed[key] = _like(f"{name}: {key}", value, known[key])
        _check(f"{name}: {key}", key, changed[key])
    return dataclasses.replace(settings, **changed)  # type: ignore[type-var]


#: settings in which a value may occur twice: sizes of layers, and epochs by data set
_REPEATING = ("hidden", "channels", "epochs")
#: settings that must be above zero
_POSITIVE = ("epochs", "every")


def _check(where: str, key: str, value: Any) -> None:
    """Numbers are finite and not negative, counts are at least 1, and no value occurs twice."""
    if isinstance(value, tuple):
        if len(set(value)) < len(value) and key not in _REPEATING:
            raise InputError(f"{where} = {list(value)!r}: a value occurs twice")
    elif isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise InputError(f"{where} = {value!r}: must be at least 1")
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, int | float):
            continue
        if not math.isfinite(item):
            raise InputError(f"{where} = {item!r}: must be finite")
        if item < 0 or (item == 0 and key in _POSITIVE):
            raise InputError(f"{where} = {item!r}: must {'be above zero' if key in _POSITIVE else 'not be negative'}")


def _like(where: str, value: Any, old: Any) -> Any:
    if isinstance(old, tuple):
        if isinstance(value, str):  # "2,8" from the command line
            value = [_number(item.strip()) for item in value.split(",") if item.strip()]
        items = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not items:
            raise InputError(f"{where} = {value!r}: give at least one value")
        return tuple(_like(where, item, old[0]) for item in items) if old else items
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if old is not None and type(value) is not type(old):
        raise InputError(f"{where} = {value!r}: give a value of the same type as {old!r}")
    return value


def _number(text: str) -> int | float | str:
    """The number that a text stands for, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, list | tuple) else value
