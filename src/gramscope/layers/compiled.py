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
