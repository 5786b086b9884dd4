"""Reading the Python version of CIFAR without unpickling it.

The batches are pickles. A pickle is a program, and running one from a download is running a stranger's code; so this
reads the instruction stream with the standard library's disassembler and carries out only those that build dicts,
lists, tuples, strings and numbers. The three constructors a NumPy array of bytes needs are matched by name and replaced
by our own; anything else is refused. Nothing is imported and nothing in the file is called.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gramscope.errors import InputError


@dataclass
class _Name:
    """A constructor the file asks for, by name only."""

    name: str


@dataclass
class _Dtype:
    """A dtype by its code, such as ``u1``."""

    code: str


@dataclass
class _Array:
    """An array that is still without content."""

    content: Any = None


def _array(*_: Any) -> _Array:
    return _Array()


def _dtype(code: Any, *_: Any) -> _Dtype:
    return _Dtype(_text(code))


def _encode(text: Any, encoding: Any) -> bytes:
    """How Python 3 writes bytes in the old protocols: as a latin-1 string."""
    if _text(encoding) != "latin1":
        raise _Refused(f"encoding {_text(encoding)!r}")
    return _text(text).encode("latin1")


#: names in the file -> our own constructor; ``numpy.ndarray`` is only ever an argument
_KNOWN: dict[str, Callable[..., Any] | None] = {
    "numpy.core.multiarray _reconstruct": _array,
    "numpy._core.multiarray _reconstruct": _array,
    "numpy ndarray": None,
    "numpy dtype": _dtype,
    "_codecs encode": _encode,
}


class _Refused(Exception):
    """The file asks for something that is not data."""


_VALUES = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "SHORT_BINSTRING", "BINSTRING", "STRING", "BINUNICODE",
    "SHORT_BINUNICODE", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINFLOAT", "FLOAT",
}  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STORE = {"PUT", "BINPUT", "LONG_BINPUT"}
_RECALL = {"GET", "BINGET", "LONG_BINGET"}
_MARK = object()


def read_batch(path: Path) -> dict[str, Any]:
    """The dict in a CIFAR batch file; byte-string keys become text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of unknown escapes in texts
            content = _run(path.read_bytes())
    except _Refused as refusal:
        raise InputError(
            f"{path} is not a CIFAR batch: it asks for {refusal}, which is not read; use the binary version of the data"
        ) from refusal
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise InputError(
            f"{path} is truncated or not a CIFAR batch ({type(error).__name__}: {error}); fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not the dict of a CIFAR batch")
    return content


def _text(value: Any) -> str:
    """A string. Nothing else is turned into one: nested tuples that share parts would take for ever."""
    if not isinstance(value, bytes | str):
        raise _Refused(f"a {type(value).__name__} in place of a string")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _run(content: bytes) -> Any:
    """Carry out the data-building instructions and return what is left at the end."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        start = len(stack) - 1
        while stack[start] is not _MARK:
            start -= 1
        items = stack[start + 1 :]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            items = stack[-_TUPLES[name] :]
            del stack[-_TUPLES[name] :]
            stack.append(tuple(items))
        elif name in _STORE:
            memo[argument] = stack[-1]
        elif name in _RECALL:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif name == "APPENDS":
            items = since_mark()
            stack[-1].extend(items)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][_text(key)] = value
        elif name == "SETITEMS":
            items = since_mark()
            stack[-1].update(zip(map(_text, items[::2]), items[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _KNOWN:
                raise _Refused(repr(argument))
            stack.append(_Name(argument))
        elif name == "REDUCE":
            arguments, constructor = stack.pop(), stack.pop()
            build = _KNOWN[constructor.name] if isinstance(constructor, _Name) else None
            if build is None:
                raise _Refused(f"a call of a {type(constructor).__name__}")
            stack.append(build(*arguments))
        elif name == "BUILD":
            state = stack.pop()
            _fill(stack[-1], state)
        elif name == "STOP":
            return _finish(stack.pop())
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"the instruction {name}")
    raise ValueError("no end")


def _fill(target: Any, state: Any) -> None:
    """Give an array its content: (version, shape, dtype, Fortran order, bytes). A dtype's own state changes nothing."""
    if isinstance(target, _Dtype):
        return
    if not isinstance(target, _Array):
        raise _Refused(f"state for a {type(target).__name__}")
    _, shape, dtype, fortran, values = state
    if not all(isinstance(size, int) for size in shape):
        raise _Refused("a shape that is not of whole numbers")
    if dtype.code not in ("u1", "|u1"):
        raise _Refused(f"an array of {dtype.code}")
    values = values.encode("latin1") if isinstance(values, str) else values
    target.content = np.frombuffer(values, np.uint8).reshape(shape, order="F" if fortran else "C")


def _finish(value: Any) -> Any:
    """The dict with arrays in place of their stand-ins."""
    if isinstance(value, dict):
        return {key: item.content if isinstance(item, _Array) else item for key, item in value.items()}
    return value
