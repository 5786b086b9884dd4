from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import gramscope as gs
from gramscope_lab.cli.app import app
from gramscope_lab.report.read import read_runs


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
    shown = " ".join(result.stdout.split())
    assert shown.count("the columns nc1 to nc4 are for labels") == 1


def test_the_report_shows_what_was_measured_while_training_and_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    commands = [
        ["train", "--hidden", "4", "--epochs", "1", "--seeds", "2", "--out", str(run)],
        ["measure", str(run), "--measures", "nc3,nfa", "--samples", "200"],
        ["measure", str(run), "--measures", "nc2_equinorm", "--part", "test"],
        ["report", str(run)],
    ]
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    (setting,) = read_runs([run]).settings
    assert len(setting.curve("target_linearity", "hidden1", "epoch").times) == 2
    assert setting.curve("nc3", "readout", "epoch").times == [1.0]
    assert len(setting.curve("nfa", "hidden1", "epoch").times) == 2
    assert not setting.curve(
        "nc2_equinorm", "readout", "epoch"
    )  # of test samples, which are not compared with the others
