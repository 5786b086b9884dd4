"""Notes: why something is missing from a capture, from statistics or from a table, and why a value may mislead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

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
