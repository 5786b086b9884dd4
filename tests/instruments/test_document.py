"""docs/measure.md: its code runs, and its table has every measure under its own formula."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from gramscope.measures.columns import COLUMNS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")
WORDS = {"loss": "loss", "jacobians": "Jacobians", "features": "features", "gram": "Gram", "labels": "labels",
         "reference": "reference", "held_out": "held-out"}  # fmt: skip


def test_python_blocks_run_in_order() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", DOCUMENT, flags=re.MULTILINE | re.DOTALL))
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        exec(compile(code, "measure.md", "exec"), names)
    assert names["stats"].n == names["merged"].n == 300
    assert [step for step, _ in names["monitor"].series("target_linearity")["2"]] == [0, 10, 20, 30]


def test_the_table_has_every_measure() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|", DOCUMENT, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == list(COLUMNS)
    for name, formula, needs in rows:
        known = COLUMNS[name].formula.removesuffix(" ([Gram] Theorem 3)")
        start = re.split(r", (?:exact|centred features|W̄ = )", known)[0]
        assert formula.startswith(start), name
        named = set(re.split(r"[,;] ", needs)) - {"", "reads the data twice"}
        assert named == {WORDS[need] for need in COLUMNS[name].needs if need in WORDS}, name
