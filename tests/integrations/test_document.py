"""The Python of the page on integrations runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS[1:], ids=range(1, len(BLOCKS)))  # the first trains for a minute; see examples
def test_python_block_runs(block: str) -> None:
    exec(compile(block, str(PAGE), "exec"), {})
