from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import gramscope as gs
from gramscope_lab.cli.app import app
from gramscope_lab.cli.measure import print_measures


class Tokens(nn.Module):
    """Logits of five labels for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.readout = nn.Embedding(7, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.readout(torch.tanh(self.embedding(x)))
        return found


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens()


def test_labels_of_tokens(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 7, (12, 4))
    y = np.where(x == 6, -100, x % 5)
    np.savez(tmp_path / "tokens.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    own = ["--model", f"{__name__}:tokens", "--data", str(tmp_path / "tokens.npz")]
    result = CliRunner().invoke(app, ["measure", *own, "--measures", "target_linearity,gradient_norm", "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    table = gs.measure(tokens(), (torch.from_numpy(x), torch.from_numpy(y)), nn.CrossEntropyLoss())
    for layer in ("embedding", "readout"):
        for name in ("target_linearity", "gradient_norm"):
            assert found["layers"][layer][name] == pytest.approx(table[layer][name], rel=1e-6)
    refused = CliRunner().invoke(app, ["measure", *own, "--loss", "mse"])
    assert "labels of tokens go with cross-entropy" in str(refused.exception)
    refused = CliRunner().invoke(app, ["train", *own, "--out", str(tmp_path / "run")])
    assert "has a label for every token" in str(refused.exception)


def test_a_reason_is_told_once(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 7, (12, 4))
    np.savez(tmp_path / "tokens.npz", x_train=x, y_train=x % 5, x_test=x, y_test=x % 5)
    own = ["--model", f"{__name__}:tokens", "--data", str(tmp_path / "tokens.npz")]
    result = CliRunner().invoke(app, ["measure", *own, "--measures", "all"])
    shown = " ".join(result.stderr.split())
    assert shown.count("the columns nc1 to nc4 are for labels") == 1
    assert "embedding.nrc1, embedding.nrc2, embedding.nrc3, readout.nrc1, readout.nrc2, readout.nrc3: it is" in shown


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("layers", [2, 12])
def test_no_heading_is_broken_inside_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, layers: int
) -> None:
    monkeypatch.setattr("gramscope_lab.cli.measure.console_width", lambda: width)
    monkeypatch.setattr("gramscope_lab.cli.console.console_width", lambda: width)
    names = ["target_linearity", "surrogate_normalized", "weight_norm", "nfa", "nc1", "vcs_gram_cosine", "stable_rank"]
    rows = {f"encoder.layer.{number}": dict.fromkeys(names, 0.123456) for number in range(layers)}
    print_measures("a run", rows)
    shown = capsys.readouterr().out
    assert {name for name in (*names, *rows) if not re.search(rf"\b{re.escape(name)}\b", shown)} == set()
    assert shown.count("0.1235") == len(names) * layers
    assert max(map(len, shown.splitlines())) <= width
