"""The HTML page: one file that contains everything and fetches nothing."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import gramscope
from gramscope.errors import MissingExtraError
from gramscope_lab.report.loaded_runs import Runs
from gramscope_lab.report.overview import Overview
from gramscope_lab.report.palette import colour, dash
from gramscope_lab.report.panel import Facet, Panel
from gramscope_lab.report.plotly_figures import draw
from gramscope_lab.runs.files import plain

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Content:
    """The content of a report, before it is drawn."""

    runs: Runs
    overview: Overview
    panels: Sequence[Panel]


def require_extra() -> None:
    """Raise an error that says what to install if a drawing library is missing."""
    missing = [name for name in ("jinja2", "matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the report needs {' and '.join(missing)}, not installed here: pip install 'gramscope[report]'"
        )


def render_page(content: Content, *, version: str = "", interval: int = 0) -> str:
    """The whole page.

    Args:
        content: what to show.
        version: the live server's name for this state of the runs.
        interval: milliseconds between requests to the live server; 0 for a page without a server.
    """
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    style, script = _template_text("report.css"), _template_text("report.js")
    plotly = get_plotlyjs()
    sections: dict[str, list[Panel]] = {}
    for panel in content.panels:
        sections.setdefault(panel.section, []).append(panel)
    values = {
        **_template_values(content),
        "sections": list(sections.items()),
        "payload": payload(content, version=version, interval=interval),
        "policy": policy(plotly, script, live=interval > 0),
        "version": gramscope.__version__,
        "made": dt.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "live": interval > 0,
    }
    return (
        _environment()
        .get_template("page.html")
        .render(**values, style=Markup(style), script=Markup(script), plotly=Markup(plotly))
    )


def render_update(content: Content, *, version: str, interval: int) -> dict[str, Any]:
    """The data that the live server sends when the runs have changed."""
    render = _environment().get_template
    return {
        **payload(content, version=version, interval=interval),
        "summary_html": render("overview.html").render(_template_values(content)),
        "tables_html": render("tables.html").render(_template_values(content)),
    }


def _template_values(content: Content) -> dict[str, Any]:
    """Values for the templates of the summary and the tables."""
    return {"overview": content.overview, "missing": [panel for panel in content.panels if not panel.views]}


def payload(content: Content, *, version: str = "", interval: int = 0) -> dict[str, Any]:
    """Everything the page's script draws, as plain values for JSON."""
    found = {
        "version": version,
        "interval": interval,
        "status": content.overview.status,
        "settings": [
            {"name": setting.name, "colour": colour(setting.index), "dash": dash(setting.index)}
            for setting in content.runs.settings
        ],
        "panels": [_panel(panel) for panel in content.panels],
        "tables": {
            table.key: {"columns": table.columns, "rows": [[cell.value for cell in row] for row in table.rows]}
            for table in content.overview.all_tables
        },
    }
    return dict(plain(found))


def policy(*scripts: str, live: bool) -> str:
    """Content security policy: only the page's own scripts run, and data come from the live server alone."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    fetch = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; {fetch}"
        "base-uri 'none'; form-action 'none'"
    )


def formula_html(text: str) -> str:
    """A formula, escaped, with single letters after ``_`` set low.

    >>> formula_html("‖W_0‖_F < 1")
    '‖W<sub>0</sub>‖<sub>F</sub> &lt; 1'
    """
    return re.sub(r"_(\w)(?![A-Za-z0-9_])", r"<sub>\1</sub>", html.escape(text))


def _panel(panel: Panel) -> dict[str, Any]:
    views = [
        {
            "label": view.label,
            "formula": formula_html(view.formula),
            "moments": view.moments,
            "sentence": view.sentence or panel.sentence,
            "facets": [_facet(facet) for facet in view.facets],
        }
        for view in panel.views
    ]
    rows = [[float(f"{v:.7g}") if isinstance(v, float) else v for v in row] for row in panel.table.rows]
    table = {"columns": panel.table.columns, "rows": rows}
    head = {"key": panel.key, "title": panel.title, "note": panel.note, "log_switch": panel.log_switch}
    return {**head, "views": views, "table": table}


def _facet(facet: Facet) -> dict[str, Any]:
    plots = [draw(plot) for plot in facet.frames]
    frames = [traces for traces, _ in plots]
    return {"title": facet.title, "name": facet.name, "layout": plots[-1][1], "frames": frames}


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gramscope_lab.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment


@cache
def _template_text(name: str) -> str:
    return (resources.files("gramscope_lab.report") / "templates" / name).read_text(encoding="utf-8")
