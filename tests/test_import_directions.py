"""Dependencies point one way: the imports are those of the table in ARCHITECTURE.md, which is in order."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import gramscope

ROOT = Path(gramscope.__file__).parent
ARCHITECTURE = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
#: folder -> folders it imports from, from top to bottom
TABLE = {
    folder: set(re.findall(r"\w+", uses))
    for folder, uses in re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", ARCHITECTURE, re.M)
}


def imported(path: Path) -> set[str]:
    """Top folders of gramscope that a file imports, also inside functions and for type checking."""
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


def test_folders_import_what_the_table_says() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(TABLE)
    wrong = []
    for folder, allowed in TABLE.items():
        used = {
            path: imported(path) - {folder, "errors", "names", "notes"}
            for path in sorted((ROOT / folder).rglob("*.py"))
        }
        wrong += [f"{path.relative_to(ROOT)} imports {sorted(u - allowed)}" for path, u in used.items() if u - allowed]
        unused = allowed.difference(*used.values())
        wrong += [f"ARCHITECTURE.md: {folder} does not import {sorted(unused)}"] if unused else []
    assert not wrong, wrong


def test_folders_stand_above_those_they_import() -> None:
    order = list(TABLE)
    wrong = [f"{a} imports {b}" for a in order for b in TABLE[a] if order.index(b) <= order.index(a)]
    assert not wrong, wrong


def test_import_needs_no_torch() -> None:
    code = "import sys, gramscope; assert 'torch' not in sys.modules; assert 'VCL' in dir(gramscope)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves() -> None:
    for name in gramscope.__all__:
        assert getattr(gramscope, name) is not None
