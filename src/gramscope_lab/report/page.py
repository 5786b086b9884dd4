"""The HTML page: one file that contains everything and fetches nothing."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import html
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import gramscope
from gramscope.errors import InputError, load_extra
from gramscope_lab.report import summary
from gramscope_lab.report.figures import Panel, figure, training_panels
from gramscope_lab.report.layer_figures import layer_panels
from gramscope_lab.report.read import Runs, read_runs
from gramscope_lab.report.snapshot_figures import snapshot_panels
from gramscope_lab.runs.files import to_json, write_file

PAGE = "report.html"
#: least seconds between two readings of a live page, and the largest share of the time spent on making it
INTERVAL, SHARE = 10, 0.1


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def write_report(paths: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write one self-contained HTML page about runs, and return its path.

    Args:
        paths: run directories or groups of them; several are compared.
        out: folder to write to; the run's own ``figures`` if there is one run, ``report`` in the working directory if
            there are several. An earlier report there is replaced.

    Raises:
        MissingExtraError: plotly is not installed.
        InputError: a path holds no run, or the folder cannot be written.
    """
    return _write(read_runs(paths), out, 0)


def write_live_report(
    paths: Sequence[Path | str],
    out: Path | str | None = None,
    *,
    began: Callable[[Path], None] = lambda page: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Write the report again and again until no run is running; ``began`` is called with the page once it is there."""
    wait, written = float(INTERVAL), -1
    while True:
        started, runs = time.perf_counter(), read_runs(paths)
        rows = [rows for run in runs.all for rows in (run.evaluations, *run.by_layer.values())]
        running, count = runs.status == "running", sum(map(len, rows)) + len(runs.claims)
        if count != written or not running:
            page = _write(runs, out, round(wait) if running else 0)
            if written < 0:
                began(page)
            wait = max(INTERVAL, (time.perf_counter() - started) / SHARE)
        if not running:
            return page
        written = count
        sleep(wait)


def _write(runs: Runs, out: Path | str | None, refresh: int) -> Path:
    """Write the page; browsers read it again after ``refresh`` seconds, if that is not 0."""
    if out is None and len(runs.roots) == 1:
        page = runs.roots[0].figure_path(PAGE)
    else:
        folder = Path("report" if out is None else out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write the report to {folder}: {error}; choose another --out") from error
        page = folder / PAGE
    write_file(page, render(runs, refresh=refresh).encode("utf-8", "replace"))
    return page


def all_panels(runs: Runs) -> list[Panel]:
    """Every panel with something to show: layers, training, matrices."""
    return [*layer_panels(runs), *training_panels(runs), *snapshot_panels(runs)]


def render(runs: Runs, *, refresh: int = 0) -> str:
    """The whole page."""
    panels = all_panels(runs)
    title = ", ".join(root.name for root in runs.roots)
    style, script, plotly = (
        _asset("report.css"),
        _asset("report.js"),
        load_extra("plotly.offline", "lab").get_plotlyjs(),
    )
    figures = to_json({panel.key: figure(panel) for panel in panels}).replace("<", "\\u003c")  # ends no script
    sections: dict[str, list[Panel]] = {}
    for panel in panels:
        sections.setdefault(panel.section, []).append(panel)
    shown = [tag("section", tag("h2", section), *map(_panel, own)) for section, own in sections.items()]
    main = tag("main", _outcome(runs, title), *shown, _how(runs), _tables(runs))
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_policy(plotly, script)}">'),
        Html(f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""),
        tag("title", f"{title} · gramscope report"),
        tag("style", Html(style)),
    ]
    body = [
        tag("header", tag("p", "gramscope report", class_="brand"), tag("p", _made(refresh)), class_="top"),
        tag("div", _contents(sections), main, class_="columns"),
        tag("script", Html(figures), type="application/json", id="figures"),
        tag("script", Html(plotly)),
        tag("script", Html(script)),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def _made(refresh: int) -> str:
    made = f"made {dt.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M:%S')} by gramscope {gramscope.__version__}"
    return f"{made} · live, read again every {refresh} s" if refresh else made


def _policy(*scripts: str) -> str:
    """Content security policy: only the page's own scripts run, and nothing is fetched."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {hashes}; {rest}"


# -- parts of the page ----------------------------------------------------------------------------------------------
def _contents(sections: Mapping[str, Sequence[Panel]]) -> Html:
    def link(key: str, text: str) -> Html:
        return tag("li", tag("a", text, href=f"#{key}"))

    groups = [
        tag("li", section, tag("ul", *(link(panel.key, panel.title) for panel in panels)), class_="group")
        for section, panels in sections.items()
    ]
    rest = link("run", "Results, and what was run"), link("tables", "Tables")
    return tag("nav", tag("ul", link("summary", "Summary"), *groups, *rest), aria_label="Contents")


def _outcome(runs: Runs, title: str) -> Html:
    words = [tag("li", sentence.replace(" %", "\u00a0%")) for sentence in summary.sentences(runs)]
    problems = tag("ul", *(tag("li", problem) for problem in runs.problems))
    given = [tag("h1", title), tag("ul", *words, class_="headline")]
    given.append(tag("p", summary.state(runs), class_=f"state state-{runs.status}"))
    given += [tag("div", "Could not be read:", problems, class_="missing")] if runs.problems else []
    claims = summary.claims_table(runs)
    given += [tag("h2", claims.title), table_html(claims)] if claims else []
    for name, source in summary.pictures(runs).items():
        image = tag("img", src=source, alt=f"Figure {name}")
        given.append(tag("figure", image, tag("figcaption", name), class_="picture"))
    return tag("section", *given, id="summary")


def _how(runs: Runs) -> Html:
    """What was run, and where each setting ended."""
    results = summary.results_table(runs)
    given = [tag("h2", results.title), table_html(results)] if results else []
    given.append(tag("h2", "What was run"))
    for root in runs.roots:
        facts = summary.facts(runs, root)
        rows = [tag("div", tag("dt", key), *(tag("dd", value) for value in values)) for key, values in facts]
        given += [tag("h3", root.name)] if len(runs.roots) > 1 else []
        given.append(tag("dl", *rows, class_="facts"))
    return tag("section", *given, id="run")


def _panel(panel: Panel) -> Html:
    terms = []
    for name, meaning, formula in panel.terms:
        said = f"{meaning}: " if formula else meaning
        terms.append(tag("div", tag("dt", name), tag("dd", said, tag("span", formula_html(formula), class_="formula"))))
    few = {"open": ""} if len(terms) < 3 else {}
    return tag(
        "section",
        tag(
            "h3", panel.title + (f": {panel.views[0].label}" if len(panel.views) == 1 and panel.views[0].label else "")
        ),
        tag("p", panel.sentence, class_="sentence"),
        tag("div", class_="plot", data_figure=panel.key, role="img", aria_label=panel.title),
        tag("p", panel.note, class_="note"),
        tag("details", tag("summary", "What is drawn"), tag("dl", *terms, class_="terms"), **few) if terms else Html(),
        class_="panel",
        id=panel.key,
    )


def _tables(runs: Runs) -> Html:
    shown = [part for table in summary.tables(runs) for part in (tag("h3", table.title), table_html(table))]
    return tag("section", tag("h2", "Tables"), *shown, id="tables")


# -- HTML -----------------------------------------------------------------------------------------------------------
def tag(name: str, *inside: str, **attributes: str) -> Html:
    """An element; text inside it and in attributes is escaped unless it is :class:`Html`.

    >>> tag("p", "a < b", tag("b", "c"), class_="note")
    '<p class="note">a &lt; b<b>c</b></p>'
    """
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{shown}>{_join(*inside)}" + ("" if name == "img" else f"</{name}>"))


def _join(*inside: str) -> Html:
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in inside))


def table_html(table: summary.Table) -> Html:
    """A table whose columns sort on a click."""

    def shown(text: str, value: float | str) -> Html:
        kind = {} if isinstance(value, str) else {"class": "number"}
        return tag("td", text, data_value=str(value), **kind)

    head = tag("tr", *(tag("th", tag("button", column, type="button"), scope="col") for column in table.columns))
    body = [tag("tr", *(shown(*cell) for cell in row)) for row in table.rows[: summary.ROWS]]
    cut = f"The first {summary.ROWS} of {len(table.rows)} rows." if len(table.rows) > summary.ROWS else ""
    drawn = tag("table", tag("thead", head), tag("tbody", *body), class_="sortable")
    where = {"class": "scroll", "tabindex": "0", "role": "region", "aria_label": table.title}
    return _join(tag("p", f"{table.note} {cut}".strip(), class_="sentence"), tag("div", drawn, **where))


def formula_html(text: str) -> Html:
    """A formula, escaped, with single letters after ``_`` set low.

    >>> formula_html("‖W_0‖_F < 1")
    '‖W<sub>0</sub>‖<sub>F</sub> &lt; 1'
    """
    return Html(re.sub(r"_(\w)(?![A-Za-z0-9_])", r"<sub>\1</sub>", html.escape(text)))


@cache
def _asset(name: str) -> str:
    return (resources.files("gramscope_lab.report") / "assets" / name).read_text(encoding="utf-8")
