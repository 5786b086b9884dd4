"""Commands on folders of models of transformers: measure, series and compare."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gramscope as gs
from gramscope.errors import InputError
from gramscope_lab.cli.app import app
from gramscope_lab.data.sequences import check_tokenizers, read_sequences

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 30,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXT = "the cat sat on the mat and the dog sat on the cat " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints with a tokenizer of single letters, a text, and an .npz file."""
    tokenizers = pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("models")
    letters = {letter: i + 3 for i, letter in enumerate(sorted(set(TEXT)))}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    )
    for step in (0, 10):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).save_pretrained(root / f"step{step}")
        tokenizer.save_pretrained(root / f"step{step}")
    (root / "text.txt").write_text(TEXT)
    np.savez(root / "tokens.npz", input_ids=np.arange(60).reshape(6, 10) % 30)
    return root


def invoke(*words: Any) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.filterwarnings("ignore")
def test_measure_prints_stores_and_draws(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = invoke("measure", folder / "step0", "--text", folder / "text.txt", "--length", 12, "--out", out)
    assert "nfa_above" in printed
    table = gs.Table.load(out / "table.json")
    texts = {note.text[:30] for note in table.notes.values()}
    assert [text for text in texts if " ".join(printed.split()).count(text) != 1] == []
    batches = read_sequences(folder / "text.txt", None, folder / "step0", samples=256, length=12)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "step0")
    assert table.rows == gs.measure(model, batches).rows
    assert (out / "nfa.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore")
def test_series_and_compare(folder: Path, tmp_path: Path) -> None:
    words = ["--data", folder / "tokens.npz"]
    printed = invoke("series", folder, *words, "--measures", "nfa,weights", "--out", tmp_path / "series")
    assert "2 tables, " in printed
    assert re.search(r"2 checkpoints, 6 sequences, one model of \d+ MiB and at most \d+ MiB of sums", printed)
    stored = gs.Series.load(tmp_path / "series" / "series-all.json")
    assert stored.steps == [0, 10]
    assert (tmp_path / "series" / "series.html").exists()
    printed = invoke("compare", folder / "step0", folder / "step10", *words, "--out", tmp_path / "change.json")
    assert "agop" in printed
    table = gs.Table.load(tmp_path / "change.json")
    assert table["transformer.h.1.mlp.c_fc"]["change"] > 0


def test_tokenizers_that_differ_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "step10", tmp_path / "step10")
    check_tokenizers(folder / "text.txt", folder / "step0", [folder / "step10", tmp_path / "step10"])
    content = (tmp_path / "step10" / "tokenizer.json").read_text()
    (tmp_path / "step10" / "tokenizer.json").write_text(content.replace('"c": 5', '"c": 6').replace('"d": 6', '"d": 5'))
    with pytest.raises(InputError, match=r"step0 and .*step10 cut .* into different tokens"):
        check_tokenizers(folder / "text.txt", folder / "step0", [tmp_path / "step10"])


def test_a_series_of_a_run_has_the_tables_of_its_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    invoke("train", "--data", "digits", "--model", "mlp", "--hidden", 8, "--epochs", 2, "--out", run,
           "--set", "checkpoint_every=1", "--set", "keep=0")  # fmt: skip
    printed = invoke("series", run, "--measures", "nfa,weight_change", "--samples", 50)
    stored = gs.Series.load(run / "series" / "series-all.json")
    words = ["--all", "--json", "--measures", "nfa,weight_change", "--samples", 50]
    tables = {item["step"]: item["layers"] for item in json.loads(invoke("measure", run, *words))}
    assert len(tables) >= 2
    assert {step: table.to_dict()["layers"] for step, table in stored.tables.items()} == tables
    assert f"{len(tables)} tables" in printed
    with pytest.raises(InputError, match="--parallel is not used of a run"):
        invoke("series", run, "--parallel", 2)


def test_wrong_data_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="either a text"):
        read_sequences(None, None, folder / "step0")
    with pytest.raises(InputError, match="fewer than one sequence of 5000"):
        read_sequences(folder / "text.txt", None, folder / "step0", length=5000)
    with pytest.raises(InputError, match="holds no tokenizer"):
        read_sequences(folder / "text.txt", None, tmp_path)
    np.savez(tmp_path / "x.npz", x=np.ones(3))
    with pytest.raises(InputError, match=r"input_ids \[sequences, length\]; it holds x"):
        read_sequences(None, tmp_path / "x.npz", tmp_path)
