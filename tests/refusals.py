"""Calls that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gramscope.errors import InputError


def assert_refused(message: str, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """The call raises an ``InputError`` whose text matches the regular expression ``message``."""
    with pytest.raises(InputError, match=message):
        call(*arguments, **options)
