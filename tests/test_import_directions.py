"""Dependencies point one way: the imports are those of the table in ARCHITECTURE.md, which is in order."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import gramscope

PROJECT = Path(__file__).parents[1]
LIBRARY, LAB, BENCHMARKS = PROJECT / "src" / "gramscope", PROJECT / "src" / "gramscope_lab", PROJECT / "benchmarks"
ARCHITECTURE = (PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8")
#: folder -> folders it imports from, from top to bottom
TABLE = {
    folder: set(re.findall(r"\w+", uses))
    for folder, uses in re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", ARCHITECTURE, re.M)
}
#: folder -> where it is
PLACES = {path.parent.name: path.parent for root in (LIBRARY, LAB) for path in root.glob("*/__init__.py")}
PLACES["benchmarks"] = BENCHMARKS


def imported(path: Path) -> set[str]:
    """Dotted names of ours that a file imports, also inside functions and for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name for name in names if name.partition(".")[0] in ("gramscope", "gramscope_lab", "benchmarks")}
    return found


def folder_of(name: str) -> str | None:
    """The folder of the table that a dotted name lies in; ``None`` for files beside the folders."""
    package, *rest = name.split(".")
    return "benchmarks" if package == "benchmarks" else rest[0] if rest and rest[0] in TABLE else None


def test_folders_import_what_the_table_says() -> None:
    assert set(PLACES) == set(TABLE)
    wrong = []
    for folder, allowed in TABLE.items():
        used = {
            path: {folder_of(name) for name in imported(path)} - {folder, None}
            for path in sorted(PLACES[folder].rglob("*.py"))
        }
        wrong += [f"{path.name} in {folder} imports {sorted(u - allowed)}" for path, u in used.items() if u - allowed]
        unused = allowed.difference(*used.values())
        wrong += [f"ARCHITECTURE.md: {folder} does not import {sorted(unused)}"] if unused else []
    assert not wrong, wrong


def test_the_library_never_imports_the_laboratory() -> None:
    wrong = [
        p for p in LIBRARY.rglob("*.py") if any(n.startswith(("gramscope_lab", "benchmarks")) for n in imported(p))
    ]
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
