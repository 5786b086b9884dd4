"""A missing package is named with what to install."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

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
        ("pyarrow", "parquet", "gramscope_lab.runs.export:to_arrow([])"),
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


def test_the_table_of_versions() -> None:
    """The oldest versions are those of pyproject.toml, and no version newer than the installed one counts as tested."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = {extra: found[0].split(">=") for extra, found in project["optional-dependencies"].items()}
    needed["none"] = next(item for item in project["dependencies"] if item.startswith("torch>=")).split(">=")
    text = (root / "docs" / "integrations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.*?\]\(\S+\) \| (.+?) \| (.+?) \| (.+?) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 12
    oldest_installed = version("numpy").startswith(project["dependencies"][1].split(">=")[1])  # make lowest
    for extra, oldest, tested in rows:
        name, lowest = needed[re.sub(r"^`gramscope\[(\w+)\]`.*", r"\1", extra)]
        assert oldest.removeprefix(f"{name} ") == lowest
        for item in tested.split(", "):
            package, _, number = item.rpartition(" ")
            if number[0].isdigit() and not oldest_installed:
                assert Version(number) <= Version(version(package or name)), package or name
