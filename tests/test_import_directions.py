"""Dependencies point one way; this reads the imports and keeps it so."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gramscope

ROOT = Path(gramscope.__file__).parent

#: folder -> folders it may import from (besides itself, errors and notes)
ALLOWED: dict[str, set[str]] = {
    "linalg": set(),
    "layers": {"linalg"},
    "statistics": {"linalg", "layers"},
    "measures": {"linalg", "statistics"},
    "instruments": {"linalg", "layers", "statistics", "measures"},
    "optim": {"linalg", "layers"},
    "theory": {"linalg", "layers", "data"},
    "data": {"linalg"},
    "models": set(),
    "runs": set(),
    "training": {"linalg", "layers", "statistics", "measures", "instruments", "optim", "data", "models", "runs"},
    "experiments": {
        "linalg", "layers", "statistics", "measures", "instruments", "optim", "theory", "data", "models", "runs",
        "training", "report",
    },
    "report": {"runs"},
    "bench": {"linalg", "layers", "statistics", "measures", "instruments", "optim", "theory", "data", "models", "training"},
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """Top folders of gramscope that a file imports, also inside functions, but not for type checking only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "gramscope":
                names = [f"gramscope.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("gramscope.")}
    return found


def test_dependencies_point_one_way() -> None:
    wrong = []
    for folder, allowed in ALLOWED.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            extra = imported(path) - allowed - {folder, "errors", "notes"}
            if extra:
                wrong.append(f"{path.relative_to(ROOT)} imports {sorted(extra)}")
    assert not wrong, wrong


def test_every_folder_has_a_rule() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"cli"} == set(ALLOWED) & folders


def test_import_needs_no_torch() -> None:
    code = "import sys, gramscope; assert 'torch' not in sys.modules; assert 'VCL' in dir(gramscope)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves() -> None:
    for name in gramscope.__all__:
        assert getattr(gramscope, name) is not None
