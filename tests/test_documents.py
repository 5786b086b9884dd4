"""Documents are true: code blocks and examples run, commands have the options shown, links lead somewhere, messages exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import gramscope as gs
from gramscope.measures.columns import COLUMNS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: pages whose blocks are run, with more checks, by a test beside their subject
RUN_ELSEWHERE = {"docs/report.md"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_readme_shows_both_commands_on_its_first_screen() -> None:
    first_screen = "\n".join(README.splitlines()[:25])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_readme_runs_in_a_process_of_its_own_and_prints_what_it_shows() -> None:
    found = blocks(ROOT / "README.md", "python")
    assert len(found) >= 4
    program = "\n".join(found)
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (shown,) = blocks(ROOT / "README.md", "text")
    words, printed = shown.split(), result.stdout.split()[: len(shown.split())]
    numbers = [word.rstrip("*,") for word in words]
    for word, number, new in zip(words, numbers, printed, strict=True):
        if re.fullmatch(r"-?\d+\.\d+", number):  # training rounds in other ways on other machines
            assert float(new.rstrip("*,")) == pytest.approx(float(number), abs=0.03), (word, new)
        else:
            assert new == word


def test_commands_of_the_readme_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from gramscope_lab.cli.app import app

    monkeypatch.chdir(tmp_path)
    (block,) = blocks(ROOT / "README.md", "console")
    lines = [shlex.split(line, comments=True)[1:] for line in block.splitlines() if line.startswith("gramscope ")]
    elsewhere = [["demo"]]  # the wheel runs it (make wheel-demo)
    assert all(line in lines for line in elsewhere)
    for line in lines:
        if line not in elsewhere:
            result = CliRunner().invoke(app, line)
            assert result.exit_code == 0, (line, result.output)
    assert (tmp_path / "runs/x/figures/report.html").exists()


WITH_PYTHON = [p for p in PAGES if blocks(p, "python") and name_of(p) not in RUN_ELSEWHERE | {"README.md"}]


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        names: dict[str, Any] = {"__name__": "__main__"}
        if name_of(page) in ("docs/vcl.md", "docs/free-muon.md"):
            names["loader"] = [(torch.randn(64, 3072), torch.randint(10, (64,))) for _ in range(2)]
        for number, block in enumerate(blocks(page, "python"), 1):
            exec(compile(block, f"{name_of(page)}, block {number}", "exec"), names)


def commands() -> dict[str, list[str]]:
    """Commands of gramscope in console blocks and indented blocks of all pages."""
    found = {}
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        lines = [line for block in blocks(page, "console") for line in block.splitlines()]
        text = re.sub(r"\\\n *", "", page.read_text(encoding="utf-8"))  # commands over several lines
        lines += re.findall(r"^    (gramscope .*)$", text, flags=re.MULTILINE)
        for line in lines:
            if line.startswith("gramscope ") and "|" not in line and "…" not in line:
                found[line.split("  #")[0].strip()] = shlex.split(line, comments=True)
    return found


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """Help of the commands asked for so far."""
    return {}


@pytest.mark.parametrize("command", commands().values(), ids=commands())
def test_commands_exist_with_these_options(command: list[str], help_texts: dict[str, str]) -> None:
    words = [word for word in command[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
    groups = {"data", "theory", "runs"}
    name = words[:2] if words and words[0] in groups else words[:1]
    key = " ".join(name)
    if key not in help_texts:
        from typer.testing import CliRunner

        from gramscope_lab.cli.app import app

        result = CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"})
        assert result.exit_code == 0, result.output
        help_texts[key] = result.output
    for option in (word.split("=")[0] for word in command if word.startswith("--")):
        assert option in help_texts[key] or option in {"--help", "--install-completion"}, (key, option)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    result = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout


# -- links --------------------------------------------------------------------------------------------------------
def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower(), flags=re.ASCII).strip()) for title in found}


#: pages that the site makes: changelog.md and its kin from the root, tutorials from scripts
MADE = {f"docs/tutorials/{path.stem}.md" for path in (ROOT / "docs" / "tutorials").glob("*.py")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        full = (page.parent / path).resolve() if path else page
        if name_of(full) in MADE:
            continue
        assert full.exists(), target
        if anchor:
            assert anchor in headings(full), target


# -- what the pages say about the code ----------------------------------------------------------------------------
def test_messages_of_the_faq_exist() -> None:
    """Literals of the source, adjacent parts joined and values replaced by {}, contain every quoted message."""
    literals = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                literals.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.append(node.value)
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(quoted) >= 15
    assert [message for message in quoted if not any(message in text for text in literals)] == []


#: what a column needs, in the words of the page
WORDS = {"loss": "loss", "jacobians": "Jacobians", "features": "features", "gram": "Gram", "labels": "labels",
         "reference": "reference", "held_out": "held-out"}  # fmt: skip


def test_the_pages_on_measures_have_every_column_once() -> None:
    pages = (ROOT / "docs" / "measures").glob("*.md")
    rows = [
        row
        for page in pages
        for row in re.findall(
            r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|", page.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    ]
    assert sorted(name for name, _, _ in rows) == sorted(COLUMNS)
    for name, formula, needs in rows:
        known = COLUMNS[name].formula.removesuffix(" ([Gram] Theorem 3)")
        start = re.split(r", (?:exact|centred features|W̄ = )", known)[0]
        assert formula.startswith(start), name
        named = set(re.split(r"[,;] ", needs)) - {"", "reads the data twice"}
        assert named == {WORDS[need] for need in COLUMNS[name].needs if need in WORDS}, name


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: gramscope\.(\w+)$", text, flags=re.MULTILINE))
    assert set(gs.__all__) - {"__version__"} <= documented


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert project["version"] == gs.__version__ == re.findall(r"^version: (.+)$", citation, flags=re.MULTILINE)[0]


def test_the_page_on_reliability_names_tests_that_exist() -> None:
    """The page is written from a run of the tests; a test that was renamed since is found here."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page))
    assert len(named) >= 40
    missing = [
        f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []
