"""Data sets: shipped, generated and downloaded.

The names below are loaded on first use, so that the catalogue can be listed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gramscope.data.dataset import DataSet as DataSet
    from gramscope.data.dataset import from_dataset as from_dataset
    from gramscope.data.dataset import from_tensors as from_tensors
    from gramscope.data.named_sets import catalogue as catalogue
    from gramscope.data.named_sets import load as load

_PUBLIC = {
    "DataSet": "gramscope.data.dataset",
    "catalogue": "gramscope.data.named_sets",
    "from_dataset": "gramscope.data.dataset",
    "from_tensors": "gramscope.data.dataset",
    "load": "gramscope.data.named_sets",
}

__all__ = ["DataSet", "catalogue", "from_dataset", "from_tensors", "load"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gramscope.data' has no attribute {name!r}; it has {', '.join(_PUBLIC)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
