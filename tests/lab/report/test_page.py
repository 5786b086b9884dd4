"""The page stands alone, obeys no name it shows, is written where it belongs, and again while runs go on."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gramscope_lab.report.page as page_module
from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.report import write_live_report, write_report
from gramscope_lab.report.page import render
from gramscope_lab.report.read import Runs, read_runs
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import append_epoch, write_run

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
def page(runs: Runs) -> str:
    return render(runs)


def test_the_page_stands_alone_and_is_small(page: str) -> None:
    assert len(page.encode()) < 8e6
    outline = Outline(page)
    for tag, attributes in outline.tags:
        for name in ("src", "href", "action", "data", "poster"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), (tag, address)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert sum(text.count("plotly.js v") for text in outline.scripts) == 1
    anchors = {attributes.get("id") for _, attributes in outline.tags}
    assert {(a["href"] or "")[1:] for t, a in outline.tags if t == "a"} <= anchors


def test_only_the_pages_own_scripts_may_run(page: str) -> None:
    (policy,) = [a["content"] for _, a in Outline(page).tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    texts = Outline(page).scripts[1:]
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts} == allowed


def test_hostile_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    layers = [f"layers.{i}.{name}" for i in range(3) for name in HOSTILE]  # enough for a map
    run = write_run(tmp_path / "x", method=HOSTILE[0], layers=layers, epochs=1)
    run.append({"kind": HOSTILE[1], HOSTILE[0]: HOSTILE[1]})
    claim = {"kind": "claim", "claim": HOSTILE[0], "published": HOSTILE[1], "measured": HOSTILE[2], "holds": None}
    run.append({**claim, "reason": HOSTILE[1]})
    write_run(tmp_path / "y", method=HOSTILE[1], layers=layers, epochs=1)
    outline = Outline(render(read_runs([tmp_path / "x", tmp_path / "y"])))
    assert len(outline.scripts) == 3
    assert [a for t, a in outline.tags if t == "img"] == []
    figures = json.loads(outline.scripts[0])
    assert "&lt;script&gt;" in figures["accuracy"]["data"][0]["name"]
    (heat, *_) = figures["layers-alignment"]["data"]
    assert all("<" not in label for label in heat["y"])
    assert [row["text"] for row in figures["layers-alignment"]["layout"]["annotations"]] == [
        f"<b>{name.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')}</b>" for name in HOSTILE[:2]
    ]


def test_the_page_is_written_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one", epochs=1, layers=(), snapshots=False)
    assert write_report([run.path]) == tmp_path / "one" / "figures" / "report.html"
    assert run.status() == "finished"
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "two", epochs=1, seed=1)
    assert write_report(["one", "two"]) == Path("report/report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the report"):
        write_report(["one"], tmp_path / "file")
    with pytest.raises(InputError, match="at least one"):
        write_report([])
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"needs plotly.*gramscope\[lab\]"):
        write_report(["one"])


def test_a_live_page_is_written_again_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "going", epochs=1, finished=False)
    monkeypatch.setattr(RunDirectory, "status", lambda self, records=None: "finished" if waits > 2 else "running")
    pages: list[str] = []
    waits, shown = 0, list[Path]()

    def sleep(seconds: float) -> None:
        nonlocal waits
        waits += 1
        assert seconds >= page_module.INTERVAL
        pages.append((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
        if waits == 2:
            append_epoch(run, 2)

    page = write_live_report([run.path], tmp_path / "out", began=shown.append, sleep=sleep)
    first, unchanged, second = pages
    assert (shown, waits) == ([page], 3)
    assert first == unchanged  # nothing was recorded meanwhile
    assert 'http-equiv="refresh"' in first
    assert ("epoch 1<" in first, "epoch 2<" in second) == (True, True)
    assert 'http-equiv="refresh"' not in page.read_text(encoding="utf-8")
