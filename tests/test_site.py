"""The built documentation (make docs): complete, readable and searchable from disk, without a network."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "site"
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built: make docs")


def test_pages_load_nothing_from_elsewhere() -> None:
    loads = re.compile(r'<(?:script|img|link|iframe|source)[^>]*(?:src|href)="?(?:https?:)?//[^>]*>')
    found = {page.name: loads.findall(page.read_text(encoding="utf-8")) for page in SITE.rglob("*.html")}
    assert {name: tags for name, tags in found.items() if tags} == {}


def test_formulas_are_drawn_and_tutorials_were_run() -> None:
    assert "<math" in (SITE / "measures/virtual.html").read_text(encoding="utf-8")
    assert "test accuracy 0.9" in (SITE / "tutorials/first_table.html").read_text(encoding="utf-8")
    assert len(list((SITE / "tutorials").glob("*/*.png"))) >= 3


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
def test_search_works_from_disk() -> None:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    foreign: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: request.url.startswith("http") and foreign.append(request.url))
        page.goto((SITE / "index.html").as_uri())
        page.click(".md-search__input")
        page.type(".md-search__input", "padding")
        page.wait_for_selector(".md-search-result__item")
        titles = [item.inner_text() for item in page.query_selector_all(".md-search-result__item h1")]
        browser.close()
    assert "Your model" in titles
    assert foreign == []
