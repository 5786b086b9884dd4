"""Write the tables of all nets, with all columns, to ``tables.json``: ``PYTHONPATH=src:tests python -m golden.store``.

Run it only to accept a decided difference, and say in the commit which columns changed and why.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gramscope as gs
from golden.nets import NETS, Net, made

STORED = Path(__file__).parent / "tables.json"


def table_of(net: Net) -> dict[str, Any]:
    """``{"values": {layer: {column: value}}, "errors": …, "network": …}`` of a net, with all columns it allows."""
    model, reference, data, held_out = made(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"reference": reference, "held_out": held_out, "weight_decay": 0.01, "process_group": False}
        table = gs.measure(model, data, net.loss, measures="all", **options, **net.options)
    stored = table.to_dict()
    return {"values": stored["layers"], "errors": stored.get("errors", {}), "network": stored["network"]}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.13g}") if isinstance(value, float) else value


if __name__ == "__main__":
    STORED.write_text(json.dumps({name: _rounded(table_of(net)) for name, net in NETS.items()}, separators=(",", ":")))
    print(f"{STORED.stat().st_size:,} bytes")
