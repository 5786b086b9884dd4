"""Colours, dashes and markers of the settings: Okabe and Ito's palette, which colour-blind readers can tell apart."""

from __future__ import annotations

from gramscope_lab.palette import PALETTE
from gramscope_lab.palette import colour as colour

DASHES = ("solid", "dash", "dot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")

#: their names in matplotlib
MATPLOTLIB_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
MATPLOTLIB_MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X", "cross": "P", "star": "*",
}  # fmt: skip

SEQUENTIAL = "cividis"
DIVERGING = "RdBu_r"


def dash(index: int) -> str:
    """Dashes of setting ``index``; they change when all colours are used."""
    return DASHES[index // len(PALETTE) % len(DASHES)]


def marker(index: int) -> str:
    """Marker of setting ``index``."""
    return MARKERS[index % len(MARKERS)]


def faint(hexadecimal: str, alpha: float) -> str:
    """A colour with transparency, for bands.

    >>> faint("#0072B2", 0.2)
    'rgba(0,114,178,0.2)'
    """
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
