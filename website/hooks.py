"""What the site adds to the Markdown files of docs/: pages of the repository's root, executed tutorials, formulas as MathML."""

from __future__ import annotations

import html
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from tutorials import run_tutorial

ROOT = Path(__file__).parents[1]
#: pages of the site that are files of the repository's root
ROOT_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "architecture.md": "ARCHITECTURE.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
INLINE_CODE = re.compile(r"<code>([^<]*)</code>")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages and, in place of the tutorials' scripts, the pages they make."""
    for page, source in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_from_root, text)))
    scripts = [file for file in files if file.src_uri.startswith("tutorials/") and file.src_uri.endswith(".py")]
    execute = os.environ.get("TUTORIALS") != "skip"
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda file: run_tutorial(Path(file.abs_src_path), execute), scripts))
    for script, contents in zip(scripts, made, strict=True):
        files.remove(script)
        for name, content in contents.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def _from_root(link: re.Match[str]) -> str:
    """A link of a file of the root, as seen from docs/."""
    text, target = link.groups()
    if "://" in target or target.startswith("#"):
        return link[0]
    return f"[{text}]({target.removeprefix('docs/') if target.startswith('docs/') else '../' + target})"


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Point links to files of the root at their pages; name files that are not part of the site without a link."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def adjust(link: re.Match[str]) -> str:
        text, target = link.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        path, _, anchor = target.partition("#")
        full = (here / path).resolve()
        if full.is_relative_to(ROOT / "docs"):
            return link[0]
        if not full.exists():
            raise PluginError(f"{page.file.src_uri} links to {target}, which does not exist")
        name = full.relative_to(ROOT).as_posix()
        known = next((key for key, source in ROOT_PAGES.items() if source == name), None)
        if known is None:
            return f"`{name}`" if text.strip("`") == name.rstrip("/") else f"{text} (`{name}`)"
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{known}{'#' + anchor if anchor else ''})"

    return LINK.sub(adjust, markdown)


def on_page_content(html_text: str, page: Page, config: Any, files: Files) -> str:
    """Turn LaTeX into MathML, which browsers draw without a script; keep names of options in one line."""

    def formula(found: re.Match[str]) -> str:
        kind, source = found[1], html.unescape(found[2]).strip()
        result = convert(source, display="block" if kind == "div" else "inline")
        if "\\" in result:
            raise PluginError(f"{page.file.src_uri}: a formula could not be converted: {source}")
        return result

    def in_one_line(code: re.Match[str]) -> str:
        return "<code>" + OPTION.sub(r'<span class="option">\g<0></span>', code[1]) + "</code>"

    return INLINE_CODE.sub(in_one_line, FORMULA.sub(formula, html_text))
