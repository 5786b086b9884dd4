"""The report in a real browser: Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gramscope_lab.report import write_report
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import append_epoch, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

Serving = Callable[[Path], AbstractContextManager[int]]
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
#: every number a plot shows, by panel
NUMBERS = """() => Object.fromEntries([...document.querySelectorAll(".panel")].map((panel) => [panel.dataset.key,
    [...panel.querySelectorAll(".plot")].map((plot) => (plot.data || []).flatMap((trace) => (trace.z || [trace.y]).flat())
    .filter((value) => typeof value === "number").length)]))"""

#: place of the last point of target linearity in its plot
LAST_POINT = """() => { const plot = document.querySelector("#panel-target-linearity .plot");
    const { xaxis, yaxis } = plot._fullLayout;
    return [xaxis._offset + xaxis.l2p(4), yaxis._offset + yaxis.l2p(plot.data.at(-1).y.at(-1))]; }"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A page; it is an error if its console said anything or anything was fetched from elsewhere."""
    said: list[str] = []
    context = browser.new_context(**{**DESKTOP, **options})
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: said.append(f"fetched {request.url}") if _foreign(request.url) else None)
    page.goto(address)
    yield page
    context.close()
    assert said == []


def _foreign(address: str) -> bool:
    return not address.startswith(("file:", "data:", "blob:", "http://127.0.0.1"))


@pytest.fixture(scope="module")
def report(group: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    return write_report([group], folder, figures=False).page.as_uri()


@pytest.fixture(scope="module")
def desk(browser: Any, report: str) -> Iterator[Any]:
    """The report on a desk, every panel drawn."""
    with opened(browser, report, accept_downloads=True) as page:
        draw_all(page)
        yield page


def until(page: Any, condition: str, seconds: float = 30) -> None:
    """Wait for a condition; the page's policy forbids Playwright's own function, which evaluates text."""
    for _ in range(int(seconds * 20)):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never became true: {condition}")


def draw_all(page: Any) -> dict[str, list[int]]:
    """Scroll to every panel, as a reader does, until all plots have their numbers."""
    for panel in page.locator(".panel").all():
        panel.scroll_into_view_if_needed()
        panel.locator(".plot .main-svg").first.wait_for()
    return dict(page.evaluate(NUMBERS))


@pytest.mark.parametrize(("screen", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_every_panel_is_drawn_with_data(browser: Any, report: str, screen: dict[str, Any], scheme: str) -> None:
    with opened(browser, report, color_scheme=scheme, **screen) as page:
        numbers = draw_all(page)
        assert len(numbers) == 13
        assert all(plots and all(plots) for plots in numbers.values()), numbers
        assert page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
        text = page.evaluate("getComputedStyle(document.querySelector('.xtitle')).fill")
        assert (min(map(int, text[4:-1].split(","))) > 128) == (scheme == "dark")


def test_slider_views_and_settings_with_the_keyboard(desk: Any) -> None:
    page = desk
    spectra = page.locator("#panel-spectra")
    lines = "() => document.querySelector('#panel-spectra .plot').data.map((trace) => [...trace.y])"
    last = page.evaluate(lines)
    assert spectra.locator("output").inner_text() == "epoch 4"
    spectra.locator("input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    assert spectra.locator("output").inner_text() == "epoch 3"
    assert page.evaluate(lines) != last
    page.keyboard.press("End")
    assert page.evaluate(lines) == last
    spectra.get_by_role("button", name="Play").press("Enter")
    until(page, "document.querySelector('#panel-spectra output').textContent === 'epoch 2'")
    until(page, "document.querySelector('#panel-spectra .play').textContent === '▶'")

    surrogate = page.locator("#panel-surrogate")
    assert surrogate.locator(".formula").inner_text() == "‖HᵀY‖F²"
    surrogate.get_by_role("combobox").select_option(label="Surrogate, normalised")
    assert "centred features" in surrogate.locator(".formula").inner_text()

    button = page.locator("#panel-accuracy .legend").get_by_role("button", name="vcl")
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    visible = "() => document.querySelector('#panel-accuracy .plot').data.map((trace) => trace.visible)"
    assert page.evaluate(visible) == [True, True, False, False]
    page.keyboard.press("Space")
    assert page.evaluate(visible) == [True] * 4
    scale = "document.querySelector('#panel-loss .plot').layout.yaxis.type"
    page.locator("#panel-loss .switch input").press("Space")
    assert page.evaluate(scale) == "log"
    page.locator("#panel-loss .switch input").press("Space")
    assert page.evaluate(scale) != "log"


def test_tables_sort_and_data_can_be_taken_away(desk: Any, tmp_path: Path) -> None:
    page = desk
    table = page.locator("table[data-table=results]")
    heading, first = table.locator("th", has_text="test accuracy, last"), table.locator("tbody td").first
    heading.get_by_role("button").click()
    assert (heading.get_attribute("aria-sort"), first.inner_text()) == ("ascending", "sgd")
    heading.get_by_role("button").press("Enter")
    assert (heading.get_attribute("aria-sort"), first.inner_text()) == ("descending", "vcl")

    def download(button: str) -> list[str]:
        with page.expect_download() as found:
            page.locator(button).click()
        found.value.save_as(tmp_path / found.value.suggested_filename)
        return (tmp_path / found.value.suggested_filename).read_text(encoding="utf-8").splitlines()

    lines = download("#panel-nfa .csv")
    assert (lines[0], len(lines)) == ("setting,seed,step,epoch,layer,nfa", 41)
    assert (tmp_path / "nfa.csv").exists()
    page.locator("#panel-nfa summary").click()
    page.locator("#panel-nfa details tbody tr").nth(39).wait_for()  # the page fills the table after the click
    assert page.locator("#panel-nfa details tbody tr").count() == 40
    assert download("[data-csv=results]")[2].startswith("vcl,0.88")


def test_hovering_shows_values(desk: Any) -> None:
    page = desk
    plot = page.locator("#panel-target-linearity .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    x, y = page.evaluate(LAST_POINT)
    page.mouse.move(box["x"] + x, box["y"] + y)
    hover = page.locator("#panel-target-linearity .hovertext").first
    hover.wait_for()
    assert "epoch" in hover.text_content()
    assert " to " in hover.text_content()


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=\"window.hurt='yes'\">"
    layers = (hostile, "</script><script>window.hurt=1</script>", *"abcdef")  # enough for a map
    run = write_run(tmp_path / "x", method=hostile, layers=layers, epochs=2)
    write_run(tmp_path / "y", method="=1+1", layers=layers, epochs=2)
    written = write_report([run.path, tmp_path / "y"], tmp_path / "out", figures=False).page
    with opened(browser, written.as_uri()) as page:
        draw_all(page)
        assert page.evaluate("window.hurt") is None
        ticks = page.locator("#panel-nfa .plot").first.locator(".yaxislayer-above").text_content()
        assert "<img" in ticks
        assert page.locator("main img").count() == 0
        page.locator("#panel-nfa .plot .nsewdrag").first.hover()
        page.locator("#panel-nfa .hovertext").first.wait_for()
        assert page.evaluate("window.hurt") is None


def test_a_deep_net_by_block(browser: Any, tmp_path: Path) -> None:
    layers = [f"model.layers.{i}.{kind}" for i in range(28) for kind in ("self_attn.q_proj", "mlp.up_proj")] + [
        "lm_head"
    ]
    run = write_run(tmp_path / "deep", layers=layers, epochs=2)
    for screen in (DESKTOP, PHONE):
        with opened(browser, write_report([run.path], tmp_path, figures=False).page.as_uri(), **screen) as page:
            draw_all(page)
            assert page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
            panel = page.locator("#panel-nfa")
            assert panel.bounding_box()["height"] < 900
            assert panel.locator(".yaxislayer-above").first.text_content() == "self_attn.q_projmlp.up_projlm_head"
            if screen is DESKTOP:
                panel.locator(".nsewdrag").hover(position={"x": 5, "y": 5})
                assert "self_attn.q_projblock 0" in panel.locator(".hovertext").first.text_content()
                bar, cells = panel.locator(".modebar").bounding_box(), panel.locator(".nsewdrag").bounding_box()
                assert bar["y"] + bar["height"] <= cells["y"]
            box = page.locator("#tables .scroll").last
            assert box.bounding_box()["x"] + box.bounding_box()["width"] <= screen["viewport"]["width"]


def test_printing_draws_everything(browser: Any, report: str) -> None:
    with opened(browser, report, color_scheme="dark") as page:
        assert page.pdf(format="A4").startswith(b"%PDF")
        numbers = dict(page.evaluate(NUMBERS))
        assert all(plots and all(plots) for plots in numbers.values())
        assert page.evaluate("document.documentElement.className") == ""


POINTS = "document.querySelector('#panel-accuracy .plot').data.at(-1).y.length"


def test_the_live_page_keeps_up_and_keeps_choices(browser: Any, tmp_path: Path, serving: Serving) -> None:
    run = write_run(tmp_path / "going", epochs=2, finished=False)
    with serving(run.path) as port, opened(browser, f"http://127.0.0.1:{port}/") as page:
        draw_all(page)
        assert page.evaluate(POINTS) == 3
        page.locator("#panel-surrogate").get_by_role("combobox").select_option(label="Surrogate, normalised")
        for _ in range(2):
            page.locator("table[data-table=layers] th", has_text="layer").get_by_role("button").click()
        append_epoch(run, 3)
        with RunDirectory(run.path).lock:
            until(page, f"{POINTS} === 4")
            until(page, "document.querySelectorAll('.state-running').length === 1")
        assert page.locator("#panel-surrogate select option:checked").text_content() == "Surrogate, normalised"
        assert page.evaluate("document.querySelector('#panel-surrogate .plot').data.at(-1).y.length") == 4
        assert "epoch 3" in page.locator("#summary").inner_text()
        assert page.locator("table[data-table=layers] tbody tr").first.locator("td").nth(1).inner_text() == "readout"
        run.append({"kind": "end", "step": 30, "finished": True, "reason": ""})
        run.close()
        until(page, "document.querySelector('#live').textContent === 'live, finished'")
