"""What a notebook shows: a table, a monitor, a plot that is drawn anew, and the example notebook itself."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import IPython.display
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.errors import Note
from gramscope.integrations.loggers import LivePlot
from gramscope.measures.table import Table

NOTEBOOK = Path(__file__).parents[2] / "examples" / "monitor_in_a_notebook.ipynb"


class Tags(HTMLParser):
    """Counts tags and checks that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.text = text
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1


def monitor(**options: Any) -> gs.Monitor:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    watched = gs.Monitor(net, (torch.rand(30, 3), torch.arange(30) % 2), nn.CrossEntropyLoss(), every=1, **options)
    for _ in range(2):
        with torch.no_grad():
            net[0].weight.mul_(1.5)
        watched.step()
    return watched


def test_a_table_is_shown_with_escaped_names() -> None:
    table = Table({"<b>": {"nc1": 0.5, "nfa": None}}, {"loss": 2.0}, {"<b>.nfa": Note("missing", "a < b")})
    text = table._repr_html_()
    assert Tags(text).counts == {"table": 1, "tr": 2, "th": 3, "td": 3, "div": 2}
    assert "<td>&lt;b&gt;</td><td>0.5000</td><td>-</td>" in text
    assert "a &lt; b" in text


def test_a_monitor_draws_what_changes_and_its_last_table() -> None:
    watched = monitor(measures=["weight_norm", "nc1"])
    text = watched._repr_html_()
    curves = watched.series.curves()
    assert curves["weight_norm"]["0"] == watched.series["weight_norm"]["0"]
    changing = [name for name, lines in curves.items() if any(len(set(line.values())) > 1 for line in lines.values())]
    assert {"weight_norm", "loss"} <= set(changing)
    assert "samples" not in changing
    assert Tags(text).counts["svg"] == len(changing)
    assert "step 2" in text
    assert "nan" not in text


def test_records_stay_plain_in_a_state() -> None:
    watched = monitor()
    assert type(watched.state_dict()["records"]) is list
    again = monitor()
    again.load_state_dict(watched.state_dict())
    assert again._repr_html_() == watched._repr_html_()
    assert gs.Series()._repr_html_() == "<p>no tables yet</p>"
    diverged = {"step": 3, "layers": {}, "network": {}, "notes": {"(model)": "diverged"}}
    assert "diverged" in Tags(gs.Series.from_records([diverged])._repr_html_()).text


def test_a_live_plot_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[str] = []

    class Handle:
        def update(self, picture: Any) -> None:
            pictures.append(picture.data)

    def display(picture: Any, display_id: bool) -> Handle:
        assert display_id
        pictures.append(picture.data)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    watched = monitor(log=LivePlot())
    assert len(pictures) == 3
    assert pictures[-1] == watched._repr_html_()


def test_the_example_notebook_runs() -> None:
    program = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(*(output["data"]["text/html"] for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
        if "text/html" in output.get("data", {})), sep="\\n")
"""
    result = subprocess.run([sys.executable, "-c", program, str(NOTEBOOK)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "<svg" in result.stdout
    assert "<table" in result.stdout
