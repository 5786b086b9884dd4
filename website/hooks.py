"""What the site adds to the Markdown files of docs/: executed tutorials, formulas as MathML."""

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
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
INLINE_CODE = re.compile(r"<code>([^<]*)</code>")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Put the pages that the tutorials make in place of their scripts."""
    scripts = [file for file in files if file.src_uri.startswith("tutorials/") and file.src_uri.endswith(".py")]
    execute = os.environ.get("TUTORIALS") != "skip"
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda file: run_tutorial(Path(file.abs_src_path), execute), scripts))
    for script, contents in zip(scripts, made, strict=True):
        files.remove(script)
        for name, content in contents.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Name files that are not part of the site without a link."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def adjust(link: re.Match[str]) -> str:
        text, target = link.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        full = (here / target.partition("#")[0]).resolve()
        if full.is_relative_to(ROOT / "docs"):
            return link[0]
        if not full.exists():
            raise PluginError(f"{page.file.src_uri} links to {target}, which does not exist")
        name = full.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") == name.rstrip("/") else f"{text} (`{name}`)"

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
