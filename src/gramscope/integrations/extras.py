"""Optional packages: load them, or say what to install."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gramscope.errors import MissingExtraError


def load_extra(module: str, package: str, extra: str, least: str) -> Any:
    """Import an optional module.

    Args:
        module: what to import, such as ``"pyarrow.parquet"``.
        package: its name for pip.
        extra: the extra of gramscope that installs it.
        least: the oldest version that works.

    Raises:
        MissingExtraError: the package is not installed, or too old.
    """
    remedy = f"pip install --upgrade 'gramscope[{extra}]'"
    try:
        found = import_module(module)
        installed = version(package)
    except (ImportError, PackageNotFoundError) as error:
        raise MissingExtraError(f"this needs {package} {least} or newer ({error}): {remedy}") from error
    if _numbers(installed) < _numbers(least):
        raise MissingExtraError(f"this needs {package} {least} or newer, and {installed} is installed: {remedy}")
    return found


def _numbers(version_text: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("1.10.2rc1"), _numbers("2.13.0+cpu")
    ((1, 10, 2), (2, 13, 0))
    """
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version_text)[0])[:3])
