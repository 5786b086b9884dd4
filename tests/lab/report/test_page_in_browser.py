"""The report in a real browser: Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gramscope_lab.report import write_report
from made_up_runs import write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
#: where in the page each target of a link begins
PLACES = """() => Object.fromEntries([...document.querySelectorAll("nav a")].map((link) => [link.hash,
    document.querySelector(link.hash).getBoundingClientRect().top + scrollY]))"""
#: how many numbers each figure shows
NUMBERS = """() => Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [plot.dataset.figure,
    (plot.data || []).filter((trace) => trace.visible).flatMap((trace) => (trace.z || [trace.y]).flat())
    .filter((value) => typeof value === "number").length]))"""
#: place of the last point of the first subplot of target linearity
LAST_POINT = """() => { const plot = document.querySelector("#layers-linearity .plot"), { xaxis, yaxis } = plot._fullLayout;
    const line = plot.data.findLast((trace) => trace.visible === true && trace.xaxis === "x" && trace.mode.includes("markers"));
    return [xaxis._offset + xaxis.l2p(line.x.at(-1)), yaxis._offset + yaxis.l2p(line.y.at(-1))]; }"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Any, page_file: Path, **options: Any) -> Iterator[Any]:
    """A page; it is an error if its console said anything or anything was fetched from elsewhere."""
    said: list[str] = []
    context = browser.new_context(**{**DESKTOP, **options})
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: said.append(request.url) if _foreign(request.url) else None)
    page.goto(page_file.as_uri())
    yield page
    context.close()
    assert said == []


def _foreign(address: str) -> bool:
    return not address.startswith(("file:", "data:", "blob:"))


@pytest.fixture(scope="module")
def report(group: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([group], tmp_path_factory.mktemp("page"))


def until(page: Any, condition: str, seconds: float = 30) -> None:
    """Wait for a condition; the page's policy forbids Playwright's own function, which evaluates text."""
    for _ in range(int(seconds * 20)):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never became true: {condition}")


def draw_all(page: Any) -> dict[str, int]:
    """Scroll to every panel, as a reader does, until all figures are drawn."""
    for panel in page.locator(".panel").all():
        panel.scroll_into_view_if_needed()
        panel.locator(".plot .main-svg").first.wait_for()
    return dict(page.evaluate(NUMBERS))


@pytest.mark.parametrize(("screen", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_every_panel_is_drawn_with_data(browser: Any, report: Path, screen: dict[str, Any], scheme: str) -> None:
    with opened(browser, report, color_scheme=scheme, **screen) as page:
        reserved = page.evaluate(PLACES)
        numbers = draw_all(page)
        assert len(numbers) == 12
        assert all(numbers.values()), numbers
        assert page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
        assert page.evaluate(PLACES) == pytest.approx(reserved, abs=2)  # links land where they point
        text = page.evaluate("getComputedStyle(document.querySelector('.xtitle')).fill")
        assert (min(map(int, text[4:-1].split(","))) > 128) == (scheme == "dark")


def test_links_land_where_they_point(browser: Any, report: Path) -> None:
    with opened(browser, report, reduced_motion="reduce") as page:
        for key in page.evaluate("[...document.querySelectorAll('nav a')].map((link) => link.hash)"):
            page.locator(f"nav a[href='{key}']").click()
            top = f"Math.abs(document.querySelector('{key}').getBoundingClientRect().top)"
            end = "innerHeight + scrollY > document.documentElement.scrollHeight - 2"
            until(page, f"{top} < (scrollY === 0 || {end} ? innerHeight : 40)", 5)


def test_menu_slider_and_scale(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        draw_all(page)
        plot = "document.querySelector('#layers-linearity .plot')"
        shown = f"{plot}.data.filter((trace) => trace.visible).at(-1).y.at(-1)"
        before = page.evaluate(shown)
        page.locator("#layers-linearity .updatemenu-header").click()
        page.locator("#layers-linearity .updatemenu-dropdown-button").nth(1).click()
        until(page, f"{plot}._fullLayout.yaxis.type === 'log'")
        assert page.evaluate(shown) == pytest.approx(1000 * before)

        spectrum = "document.querySelector('#spectra .plot').data[0].y.join()"
        last = page.evaluate(spectrum)
        rail = page.locator("#spectra .slider-rail-touch-rect")
        rail.scroll_into_view_if_needed()
        rail.click(position={"x": 3, "y": 5})
        until(page, f"{spectrum} !== '{last}'")
        assert page.locator("#spectra .slider-label").first.text_content() == "epoch 0"
        page.locator("#spectra .updatemenu-button").click()
        until(page, f"{spectrum} === '{last}'")

        page.locator("#loss .updatemenu-header").click()
        page.locator("#loss .updatemenu-dropdown-button", has_text="logarithmic").click()
        until(page, "document.querySelector('#loss .plot')._fullLayout.yaxis2.type === 'log'")


def test_tables_sort(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        table = page.locator("#run table.sortable")
        heading, first = table.locator("th", has_text="test accuracy, last"), table.locator("tbody td").first
        heading.get_by_role("button").click()
        assert (heading.get_attribute("aria-sort"), first.inner_text()) == ("ascending", "sgd")
        heading.get_by_role("button").press("Enter")
        assert (heading.get_attribute("aria-sort"), first.inner_text()) == ("descending", "vcl")


def test_hovering_shows_values(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        draw_all(page)
        plot = page.locator("#layers-linearity .plot")
        plot.scroll_into_view_if_needed()
        box, (x, y) = plot.bounding_box(), page.evaluate(LAST_POINT)
        page.mouse.move(box["x"] + x, box["y"] + y)
        hover = page.locator("#layers-linearity .hovertext").first
        hover.wait_for()
        assert "epoch" in hover.text_content()
        assert " to " in hover.text_content()


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=\"window.hurt='yes'\">"
    kinds = (hostile, "</script><script>window.hurt=1</script>", "fc")
    layers = [f"layers.{i}.{kind}" for i in range(3) for kind in kinds]  # enough for a map
    run = write_run(tmp_path / "x", method=hostile, layers=layers, epochs=2)
    write_run(tmp_path / "y", method="=1+1", layers=layers, epochs=2)
    with opened(browser, write_report([run.path, tmp_path / "y"], tmp_path / "out")) as page:
        draw_all(page)
        ticks = page.locator("#layers-alignment .yaxislayer-above").first.text_content()
        assert "<img" in ticks
        assert page.locator("main img").count() == 0
        page.locator("#layers-alignment .nsewdrag").first.hover()
        page.locator("#layers-alignment .hovertext").first.wait_for()
        assert page.evaluate("window.hurt") is None


def test_a_deep_net_by_block(browser: Any, tmp_path: Path) -> None:
    kinds = ("self_attn.q_proj", "mlp.up_proj")
    layers = [f"model.layers.{i}.{kind}" for i in range(28) for kind in kinds] + ["lm_head"]
    page_file = write_report([write_run(tmp_path / "deep", layers=layers, epochs=2).path], tmp_path)
    for screen in (DESKTOP, PHONE):
        with opened(browser, page_file, **screen) as page:
            draw_all(page)
            assert page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
            panel = page.locator("#layers-alignment")
            assert panel.bounding_box()["height"] < 900
            assert len(panel.locator(".yaxislayer-above").first.text_content()) == len("".join(kinds))  # no stray rows
            if screen is DESKTOP:
                panel.locator(".nsewdrag").hover(position={"x": 5, "y": 5})
                hover = panel.locator(".hovertext").first
                hover.wait_for()
                assert "0 self_attn.q_proj" in hover.text_content()


def test_printing_draws_everything(browser: Any, report: Path) -> None:
    with opened(browser, report, color_scheme="dark") as page:
        assert page.pdf(format="A4").startswith(b"%PDF")
        assert all(page.evaluate(NUMBERS).values())
        assert page.evaluate("document.documentElement.className") == ""
