"""Colours of lines, the same in reports and in the figures of experiments."""

from __future__ import annotations

#: Okabe and Ito's palette, which colour-blind readers can tell apart; grey in place of black and yellow, so that all are
#: legible on white and on black
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C")


def colour(index: int) -> str:
    """Colour number ``index``; after the last one they start again."""
    return PALETTE[index % len(PALETTE)]
