from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.matplotlib_figures import save_panel
from gramscope_lab.report.page import Content, render_page
from gramscope_lab.report.write import report_content
from made_up_runs import write_run

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "a&b \"c\" 'd' $\\frac{$",
    "=cmd|x",
    "%{x}",
)


class Outline(HTMLParser):
    """Tags, attributes and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def page(content: Content) -> str:
    return render_page(content)


def test_the_page_stands_alone_and_is_small(page: str) -> None:
    assert len(page.encode()) < 8e6
    outline = Outline(page)
    for tag, attributes in outline.tags:
        for name in ("src", "href", "action", "data", "poster"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), (tag, address)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert sum(text.count("plotly.js v") for text in outline.scripts) == 1


def test_only_the_pages_own_scripts_may_run(page: str) -> None:
    policies = [a["content"] for t, a in Outline(page).tags if a.get("http-equiv") == "Content-Security-Policy"]
    (policy,) = policies
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    texts = Outline(page).scripts[1:]
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts} == allowed


def test_the_payload_holds_every_panel_and_plotly_accepts_every_plot(page: str) -> None:
    payload = json.loads(Outline(page).scripts[0])
    assert len(payload["panels"]) == 13
    count = 0
    for panel in payload["panels"]:
        assert panel["table"]["rows"]
        for view in panel["views"]:
            for facet in view["facets"]:
                for data in facet["frames"]:
                    go.Figure(data, facet["layout"])  # raises on what plotly does not know
                    assert any(values(trace) for trace in data)
                    count += 1
    assert count > 50


def values(trace: dict[str, Any]) -> list[Any]:
    flat = [v for row in trace["z"] for v in row] if "z" in trace else trace["y"]
    return [v for v in flat if v is not None]


def test_hostile_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    layers = (*HOSTILE, "six", "seven")  # enough for a map
    run = write_run(tmp_path / "x", method=HOSTILE[0], layers=layers, epochs=1)
    run.append({"kind": HOSTILE[1], HOSTILE[0]: HOSTILE[1]})
    claim = {"kind": "claim", "claim": HOSTILE[0], "published": HOSTILE[1], "measured": HOSTILE[2], "holds": None}
    run.append({**claim, "reason": HOSTILE[1]})
    run.close()
    write_run(tmp_path / "y", method=HOSTILE[1], layers=layers, epochs=1)
    content = report_content(read_runs([tmp_path / "x", tmp_path / "y"]))
    outline = Outline(render_page(content))
    assert len(outline.scripts) == 3
    assert [a for t, a in outline.tags if t == "img"] == []
    payload = json.loads(outline.scripts[0])
    assert [setting["name"] for setting in payload["settings"]] == list(HOSTILE[:2])
    nfa = next(panel for panel in payload["panels"] if panel["key"] == "nfa")
    ticks = nfa["views"][0]["facets"][0]["layout"]["yaxis"]["ticktext"]
    assert all("<" not in tick for tick in ticks)
    assert {row[nfa["table"]["columns"].index("layer")] for row in nfa["table"]["rows"]} == set(layers)
    for panel in content.panels:
        if panel.key in ("ends", "target-linearity", "spectra", "diagonals"):  # matplotlib reads dollars as mathematics
            assert all(path.stat().st_size > 1000 for path in save_panel(panel, tmp_path, "panel-"))
