"""A missing or old package is named with what to install."""

from __future__ import annotations

import sys

import pytest

from gramscope.errors import MissingExtraError
from gramscope.integrations.extras import load_extra


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtraError, match=r"needs nothing-here 1.0 or newer.*pip install.*gramscope\[parquet\]"):
        load_extra("nothing_here", "nothing-here", "parquet", "1.0")
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "gramscope.integrations.torchmetrics", raising=False)
    with pytest.raises(MissingExtraError, match=r"gramscope\[torchmetrics\]"):
        __import__("gramscope.integrations.torchmetrics")


def test_an_old_package_is_refused() -> None:
    assert load_extra("numpy", "numpy", "pandas", "1.9").__name__ == "numpy"
    with pytest.raises(MissingExtraError, match=r"numpy 99 or newer, and \d.* is installed"):
        load_extra("numpy", "numpy", "pandas", "99")
