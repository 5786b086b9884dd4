"""The Python of the page on integrations runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if "GridSearchCV" not in block]
)  # that one trains for a minute
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_python_block_runs(block: str) -> None:
    for library in ("lightning", "transformers"):
        if library in block:
            pytest.importorskip(library)
    exec(compile(block, str(PAGE), "exec"), {})
