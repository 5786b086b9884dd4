"""The errors and warnings gramscope raises, all of them naming the object, its value and the way out; and notes.

A note says why something is missing from a capture, from statistics or from a table, or why a value may mislead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class GramscopeError(Exception):
    """Base of every error raised on purpose by gramscope."""


class InputError(GramscopeError, ValueError):
    """An argument or the data cannot be used as given."""


class LayerError(GramscopeError, ValueError):
    """A layer was not found, not reached, or is not of a supported kind."""


class NumericalError(GramscopeError, ArithmeticError):
    """A computation produced NaN or infinity, or did not converge."""


class StorageError(GramscopeError, OSError):
    """The system could not write a file of a run; what was written before is intact."""


class DamagedCheckpointError(InputError):
    """The files of a checkpoint are not those that were written."""


class MissingExtraError(GramscopeError, ImportError):
    """An optional dependency is needed; the message names the extra that installs it."""


class GramscopeWarning(UserWarning):
    """Base of every warning issued by gramscope."""


class RescueWarning(GramscopeWarning):
    """A numerical rescue took place (a clamp, a ridge, a fallback); the message states its size."""


class ResultWarning(GramscopeWarning):
    """A result is correct but may mislead (for example target linearity with n ≤ rank)."""


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """The text of an error for an unknown name, with the nearest known ones.

    >>> no_such("measure", "nfaa", ["nfa", "nc1"])
    "no measure 'nfaa'; did you mean 'nfa'? There are: nfa, nc1"
    """
    names = sorted(known) if isinstance(known, set | frozenset) else list(known)
    near = get_close_matches(name, names, n=2)
    hint = f" did you mean {' or '.join(map(repr, near))}? There are:" if near else " there are:"
    return f"no {kind} {name!r};{hint} {', '.join(names)}"


class ArgumentError(GramscopeError, TypeError):
    """A function has no argument of this name."""


def checks_names(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function whose unknown keyword arguments raise an error with the nearest names.

    >>> checks_names(lambda layers=None: layers)(layer="fc")
    Traceback (most recent call last):
    gramscope.errors.ArgumentError: no argument 'layer'; did you mean 'layers'? There are: layers
    """
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_arguments(kwargs, known)
        return function(*args, **kwargs)

    return checked


def check_arguments(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise an error with the nearest names for an argument that is not among ``known``."""
    for name in given:
        if name not in known:
            raise ArgumentError(no_such("argument", name, known))


def load_extra(module: str, extra: str) -> Any:
    """Import a module of an optional package, or say which extra of gramscope installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"this needs {package} ({error}): pip install --upgrade 'gramscope[{extra}]'"
        ) from error


Kind = Literal[
    "unsupported",  # the layer cannot be captured
    "not applied",  # no forward pass used the layer
    "no gradient",  # the loss does not depend on the layer
    "no Jacobians",  # the output does not depend on the layer, or it ran without a gradient graph
    "left out",  # a statistic was not kept
    "undefined",  # a measure has no value here
    "doubtful",  # a measure has a value that may mislead
    "remark",  # anything else
]


class Note(NamedTuple):
    """A kind, which code looks at, and a text, which people read; ``str(note)`` is the text.

    >>> print(Note("left out", "no Σ: it needs too much memory"))
    no Σ: it needs too much memory
    """

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text


def joined(notes: Iterable[Note]) -> Note:
    """Several notes as one, of the kind of the first.

    >>> joined([Note("left out", "no Σ"), Note("left out", "no K")])
    Note(kind='left out', text='no Σ; no K')
    """
    several = list(notes)
    return Note(several[0].kind, "; ".join(note.text for note in several))
