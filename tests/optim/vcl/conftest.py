from __future__ import annotations

import pytest

from gramscope.optim.vcl import matrix_trainer


@pytest.fixture
def light_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small layers take light steps too, so that they can stand for large ones."""
    monkeypatch.setattr(matrix_trainer, "_FULL_ONLY", 0)
