"""Data sets: shipped, generated and downloaded.

The names below are loaded on first use, so that the catalogue can be listed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gramscope_lab.data.dataset import DataSet as DataSet
    from gramscope_lab.data.dataset import from_tensors as from_tensors
    from gramscope_lab.data.named_sets import catalogue as catalogue
    from gramscope_lab.data.named_sets import load as load

__all__ = ["DataSet", "catalogue", "from_tensors", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gramscope_lab.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(
        import_module(f"gramscope_lab.data.{'named_sets' if name in ('catalogue', 'load') else 'dataset'}"), name
    )
