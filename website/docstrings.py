"""Prepare docstrings for the site: formulas are set as such, references like :func:`gs.measure` and doctests as code."""

from __future__ import annotations

import html
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`")
DOCTEST = re.compile(r"^( *)(>>> .*(?:\n *\S.*)*)", re.MULTILINE)
CODE = re.compile(r"``([^`]+)``")
#: code with one of these signs is a formula
SIGNS = set("ᵀ‖√⟨⁺⁻²∂∇½Σαβγδλμρστφ𝒦")
SUBSCRIPT = re.compile(r"_(\{[^}]*\}|[a-z]+|[A-Z]|[0-9]+|\*|[α-ωℓ])")
SUPERSCRIPT = re.compile(r"\^(\{[^}]*\}|\([^)]*\)|[A-Za-z]+|[0-9]+)")


def formula(found: re.Match[str]) -> str:
    """A formula in plain characters as HTML with subscripts and superscripts; other code as it is."""
    if not SIGNS & set(found[1]):
        return found[0]
    text = html.escape(" ".join(found[1].split()), quote=False)
    text = SUBSCRIPT.sub(lambda part: f"<sub>{part[1].strip('{}')}</sub>", text)
    text = SUPERSCRIPT.sub(lambda part: f"<sup>{part[1].strip('{}')}</sup>", text)
    for sign in "*_[]":  # they mean something else in Markdown
        text = text.replace(sign, f"&#{ord(sign)};")
    return f'<span class="formula">{text}</span>'


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda role: f"`{role[1].removeprefix('gramscope.')}`", obj.docstring.value)
            text = CODE.sub(formula, text)
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", text)
