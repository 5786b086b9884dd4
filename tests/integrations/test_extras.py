"""A missing package is named with what to install."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from gramscope.errors import MissingExtraError


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("lightning.pytorch", "lightning", "gramscope.integrations.lightning"),
        ("transformers", "transformers", "gramscope.integrations.transformers"),
        ("sklearn", "sklearn", "gramscope.integrations.sklearn"),
        ("torchmetrics", "torchmetrics", "gramscope.integrations.torchmetrics"),
        ("wandb", "wandb", "gramscope.integrations.loggers:WandbLog()"),
        ("mlflow", "mlflow", "gramscope.integrations.loggers:MlflowLog()"),
        ("IPython.display", "notebook", "gramscope.integrations.loggers:LivePlot()"),
    ],
)
def test_every_integration_names_its_extra(module: str, extra: str, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is missing: at import, or on first use for what is imported without it."""
    name, _, call = use.partition(":")
    monkeypatch.setitem(sys.modules, module, None)
    if not call:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install --upgrade 'gramscope\[{extra}\]'"):
        eval(call, dict(vars(import_module(name))))
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extra in extras
