"""What a rotation found in a basis is judged by."""

from __future__ import annotations

import pytest
import torch

from gramscope.linalg.turning import needed_iterations

GOOD = {
    "residual": 1e-6,
    "turned": 2.0,
    "lost": 0.0,
    "less": 1.0,
    "bent": 0.0,
    "tied": 0.0,
    "total": 1.0,
    "size": 1.0,
    "step": 1e-3,
    "angle": 0.1,
    "second": 1e-6,
    "distance": 0.1,
    "first effect": 1e-3,
    "second effect": 1e-6,
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 0),
        ({"tied": 2.2e-7}, 1),
        ({"bent": 2.2e-7}, 1),
        ({"tied": 3e-7}, None),
        ({"bent": 3e-7}, None),
        ({"bent": float("nan")}, None),
        ({"tied": float("nan")}, None),
        ({"lost": 3e-7}, None),
        ({"lost": 3e-7, "turned": 0.5}, 0),
        ({"lost": 1e-6, "turned": 0.5}, None),
        ({"less": 1e3}, None),
        ({"less": 1e3, "turned": 1e-4}, 0),
        ({"lost": float("inf"), "turned": 0.0}, 0),
        ({"lost": float("nan")}, None),
        ({"turned": float("nan"), "lost": 1e-9}, None),
        ({"residual": 0.1}, None),
        ({"distance": 0.82}, None),
        ({"distance": float("nan")}, None),
        ({"second": 3e-4, "angle": 0.01}, 0),
        ({"second": 3.2e-4, "angle": 0.01}, None),
        ({"angle": 2.0}, None),
        ({"step": 0.1}, None),
        ({"size": 1e-9}, None),
        ({"second effect": 1e-5}, None),
        ({"first effect": 2.6e-7, "second effect": 2.2e-7}, None),
        ({"first effect": 1e-6, "second effect": 2.2e-7}, 0),
        ({"second effect": float("nan")}, None),
        ({"first effect": 0.0, "second effect": 0.0}, 0),
    ],
)
def test_what_is_relied_on(changes: dict[str, float], wanted: int | None) -> None:
    figures = torch.tensor(list((GOOD | changes).values()))
    assert needed_iterations({"figures": figures, "nearest": torch.zeros(1)}) == wanted
