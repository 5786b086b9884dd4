"""Today's tables of a dozen kinds of nets against stored ones: no number changes unless that is decided."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from golden import store

STORED: dict[str, Any] = json.loads(store.STORED.read_text())

#: columns that no longer exist or mean something else, with the reason
DECIDED: dict[str, str] = {
    "nfa_power": "where a flat maximum lies: by the root of its slope, to 1e-15; golden sections found it to 1e-8",
}
#: cells ``(net, column)`` whose value or absence changed, with the reason
DECIDED_CELLS: dict[tuple[str, str], str] = {
    ("bert", "surrogate_normalized"): "none for constant features, where it was rounding divided by rounding",
    **{
        (net, "feature_rank"): "directions of a singular HᵀH that are rounding do not count, 1e-7 of the value"
        for net in ("mlp few samples", "mlp estimated", "cnn", "vit", "gpt2", "gpt2 padded", "bert", "mamba", "lora")
    },
    (
        "mlp estimated",
        "fle_residual",
    ): "rounding alone, 1e-16: the gradients are subtracted before they meet the probes",
}


def difference(stored: float | None, value: float | None, error: float | None) -> float:
    """The relative difference, in units of four standard errors for estimates; infinite where one of them is missing."""
    if stored is None or value is None:
        return 0.0 if stored is value else math.inf
    if error:
        return abs(value - stored) / (4 * error)
    return abs(value - stored) / max(abs(stored), 1e-6)


@pytest.mark.parametrize("name", STORED)
def test_the_table_is_the_stored_one(name: str) -> None:
    net, stored = store.NETS[name], STORED[name]
    found = store.table_of(net)
    assert list(found["values"]) == list(stored["values"])
    limit = 1e-9 if net.dtype == torch.float64 else 1e-5
    wrong = []
    for layer, row in stored["values"].items():
        for column, value in row.items():
            if column in DECIDED or (name, column) in DECIDED_CELLS:
                continue
            error = stored["errors"].get(layer, {}).get(column)
            new = found["values"][layer].get(column)
            if column == "fle_residual" and value is not None and new is not None and max(value, new) < 1e-6:
                continue  # rounding alone, which differs with the number of threads
            if not difference(value, new, error) <= (1 if error else limit):
                wrong.append(f"{layer}.{column}: stored {value}, now {new}, error {error}")
    assert not wrong, "\n".join(wrong)
    for column, value in stored["network"].items():
        assert found["network"][column] == pytest.approx(value, rel=limit)
