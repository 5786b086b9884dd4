"""Functions that ``torch.compile`` calls as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Have a compiled function call this one as it is, with all it calls, between two graphs.

    Tracing a step of an optimizer or a measurement would give dozens of small graphs, and minutes of compiling.
    ``torch.compiler.disable`` does the same but loads the compiler as soon as it decorates, which takes a second.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)  # type: ignore[no-any-return]


def while_tracing(function: Function) -> Function:
    """Have ``torch.compile`` call this function once, when it traces a call of it; it takes and returns nothing.

    ``torch.compiler.assume_constant_result`` sets the same mark but loads the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
