"""Model × measure: ``gs.measure`` of the models people have, padded and not, against single samples and plain autograd.

``python tests/instruments/test_models.py`` prints the largest relative error of every measure for every model.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
from torch import nn

import gramscope as gs
from single_samples import GAMMA, RIDGE
from small_models import CASES, MODELS, ROTARY, batches, subject

MEASURES = [
    "gradient_norm", "vcs_cosine", "vcs_residual", "nfa", "agop_trace", "fact", "crh_outputs_gw",
    "target_linearity", "surrogate", "feature_rank", "nc1",
]  # fmt: skip


@cache
def errors(name: str, padding: str) -> dict[str, tuple[float, int]]:
    """The largest relative error of each measure, and the number of layers compared."""
    own = subject(name)
    tokens = {"tokens": "each"} if name == "U-Net" else {}
    data = batches(name, padding)
    table = gs.measure(
        own.model,
        data,
        nn.CrossEntropyLoss(),
        measures=MEASURES,
        ridge=RIDGE,
        gamma=GAMMA,
        **tokens,  # type: ignore[arg-type]
    )
    assert table.network["loss"] == pytest.approx(own.oracle.loss / own.oracle.terms, rel=1e-6)
    assert table.network["accuracy"] == pytest.approx(own.oracle.correct / own.oracle.terms)
    missing = set(own.oracle.weights) - set(table)
    assert not missing, missing
    # pads on the left move the angles of rotary embeddings, which are in float32
    limit = 1e-3 if padding == "left" and name in ROTARY else 1e-5
    found: dict[str, tuple[float, int]] = {}
    for layer in own.oracle.weights:
        for measure, expected in own.oracle.measures(layer).items():
            value = table[layer][measure]
            if math.isnan(expected):
                continue
            error = math.inf if value is None else abs(value - expected) / max(abs(expected), 1e-9)
            worst, count = found.get(measure, (0.0, 0))
            found[measure] = (max(worst, error), count + 1)
            assert error < limit, (layer, measure, value, expected)
    return found


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_every_measure_of_every_model(name: str, padding: str) -> None:
    found = errors(name, padding)
    assert set(found) == set(MEASURES)
    assert min(count for _, count in found.values()) >= 2


def main() -> None:
    """Print the table in Markdown: for each model the largest error over its paddings."""
    print("| model | padding | layers | " + " | ".join(f"`{m}`" for m in MEASURES) + " |")
    print("|---" * (len(MEASURES) + 3) + "|")
    for name in MODELS:
        paddings = [padding for own, padding in CASES if own == name]
        found = [errors(name, padding) for padding in paddings]
        layers = max(count for _, count in found[0].values())
        worst = [max(part[m][0] for part in found) for m in MEASURES]
        print(f"| {name} | {', '.join(paddings)} | {layers} | " + " | ".join(f"{e:.0e}" for e in worst) + " |")


if __name__ == "__main__":
    main()
