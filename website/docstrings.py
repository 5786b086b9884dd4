"""Prepare docstrings for the site: references such as :func:`gramscope.measure` become code, doctests code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`")
DOCTEST = re.compile(r"^( *)(>>> .*(?:\n *\S.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda role: f"`{role[1].removeprefix('gramscope.')}`", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", text)
