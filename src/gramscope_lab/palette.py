"""Colours, dashes and markers of lines, the same in reports and in the figures of experiments."""

from __future__ import annotations

#: Okabe and Ito's palette, which colour-blind readers can tell apart; grey in place of black and yellow, so that all are
#: legible on white and on black
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C")
_DASHES = ("solid", "dash", "dot")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
#: matplotlib's RdBu_r, two-sided colours around zero
TWO_SIDED = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip


def colour(index: int) -> str:
    """Colour number ``index``; after the last one they start again."""
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    """Dashes of line ``index``, by plotly's names; they change when all colours are used."""
    return _DASHES[index // len(PALETTE) % len(_DASHES)]


def marker(index: int) -> str:
    """Marker of line ``index``, by plotly's names."""
    return _MARKERS[index % len(_MARKERS)]


def faint(hexadecimal: str, alpha: float) -> str:
    """A colour with transparency, for bands.

    >>> faint("#0072B2", 0.2)
    'rgba(0,114,178,0.2)'
    """
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
