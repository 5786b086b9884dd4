"""Matrices and statistics in, numbers out. ``gs.measures()`` lists the columns of tables."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Measures(ModuleType):
    """This package, which is a function too: ``gs.measures`` has one name for both."""

    def __call__(self, *names: str) -> Any:
        """The columns that ``gs.measure`` can show, by group (:func:`gramscope.measures.columns.measures`)."""
        from gramscope.measures.columns import measures

        return measures(*names)


sys.modules[__name__].__class__ = _Measures
