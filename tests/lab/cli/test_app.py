"""The command as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gramscope.errors import InputError
from gramscope.linalg.measured import Measured
from gramscope.measures.table import format_cell
from gramscope_lab.cli import app
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.layer_measures import load_weights
from refusals import assert_refused

Command = Callable[..., "Done"]
RUN = [sys.executable, "-c", "from gramscope_lab.cli.app import main; main()"]


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def gramscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs the command in this process, in an empty directory; what it prints and its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)

    def call(*arguments: str) -> Done:
        out, err, code = io.StringIO(), io.StringIO(), 0
        monkeypatch.setattr(sys, "argv", ["gramscope", *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                app.main()
            except SystemExit as end:
                code = int(end.code or 0)
        return Done(code, out.getvalue(), err.getvalue())

    return call


def test_help_and_completion_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['gramscope', *sys.argv[1:]]\n"
        "from gramscope_lab.cli.app import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)
    for arguments in (
        "--help",
        "train --help",
        "measure --help",
        "runs list",
        "reproduce --list",
        "data --help",
    ):
        done = run([sys.executable, "-c", code, *arguments.split()])
        assert done.returncode == 0, done.stderr
    complete = {"_GRAMSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "gramscope tr", "COMP_CWORD": "1"}
    done = run([sys.executable, "-c", code], env={**os.environ, **complete})
    assert "train" in done.stdout
    assert "torch was imported" not in done.stderr


def tables_of(gramscope: Command, measures: str) -> list[dict[str, Any]]:
    done = gramscope("measure", "runs/x", "--measures", measures, "--samples", "200", "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_train_measure_runs_resume(gramscope: Command) -> None:
    arguments = ["train", "--data", "digits", "--hidden", "8", "--epochs", "2", "--seeds", "2", "--out", "runs/x"]
    arguments += ["--checkpoint-every", "1"]
    done = gramscope(*arguments, "--json")
    assert done.code == 0, done.err
    assert [row["run"] for row in json.loads(done.out)["runs"]] == ["seed-0", "seed-1"]
    assert "epoch 2, test accuracy" in done.err  # plain lines where there is no terminal
    assert "\x1b" not in done.err

    done = gramscope(*arguments)
    assert done.code == 2
    assert (
        done.err
        == "gramscope: runs/x already holds a run; resume it (--resume) or replace it (--force, in Python force=True)\n"
    )

    tables = tables_of(gramscope, "nfa,target_linearity")
    assert [table["run"] for table in tables] == ["seed-0", "seed-1"]
    assert set(tables[0]["layers"]) == {"hidden1", "readout"}
    assert 0 < tables[0]["layers"]["readout"]["target_linearity"] <= 1
    shown = gramscope("measure", "runs/x/seed-0", "--measures", "nfa,target_linearity", "--samples", "200").out
    assert "target_linearity" in shown  # as --measures takes it
    several = gramscope("measure", "runs/x", "--measures", "weight_norm", "--samples", "200").out
    norms = [table["layers"]["readout"]["weight_norm"] for table in tables_of(gramscope, "weight_norm")]
    assert "2 seeds, mean ± σ, step 46 (epoch 2)" in several
    assert format_cell(Measured(statistics.fmean(norms), statistics.stdev(norms))) in several
    assert "seed-1, step 46" in gramscope("measure", "runs/x", "--per-seed", "--samples", "200").out
    assert "nfa_ptk" in tables_of(gramscope, "all")[0]["layers"]["readout"]
    checkpoint = next(Path("runs/x/seed-1/checkpoints").iterdir())
    (table,) = json.loads(gramscope("measure", str(checkpoint), "--measures", "weight_norm", "--json").out)
    assert table["step"] == int(checkpoint.stem.removeprefix("step-"))
    series = json.loads(gramscope("measure", "runs/x/seed-1", "--all", "--measures", "weight_norm", "--json").out)
    assert [table["epoch"] for table in series] == [1, 2]
    assert "weight_norm" in gramscope("measure", "runs/x/seed-1", "--measures", "weight_norm", "--part", "test").out

    listed = json.loads(gramscope("runs", "list", "--json").out)
    assert (listed[0]["state"], listed[0]["runs"]) == ("finished", 2)
    shown = gramscope("runs", "show", "runs/x").out
    assert "Repeat it: gramscope train runs/x/config.toml" in shown
    assert len(json.loads(gramscope("runs", "show", "runs/x", "--json").out)["evaluations"]) == 6

    done = gramscope("train", "--resume", "runs/x")
    assert done.code == 0, done.err
    done = gramscope("train", "--resume", "runs/x", "--epochs", "9")
    assert "no other options" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --method sdg", "gramscope: method.name = 'sdg': no method 'sdg'; did you mean 'sgd'?"),
        ("train --data nosuchset", "nosuchset"),
        ("train --resume", "--resume: name the run directory"),
        ("train --resume nowhere", "holds no run"),
        ("train --lr", "requires an argument"),
        ("measure", "name a run directory, or your own net"),
        ("measure --model nomodule:f --data digits", "'nomodule:f': No module named 'nomodule'"),
        ("reproduce nfa-fig1 --device foo", "device = 'foo': use auto, cpu, cuda"),
        ("runs show nowhere", "nowhere holds no run (there is no such folder)"),
        ("nothing", "No such command"),
        (
            "measure x --set data.seed=3",
            "--set is not used with the run x, which is measured as its configuration says",
        ),
        ("measure x --text book.txt", "--text is not used with the run x"),
        ("measure --model mlp --data digits --all", "--all is not used with a net of your own"),
        ("measure --model mlp --data digits --out x", "--out is not used with a net of your own"),
        ("compare a b --data x.npz --length 3", "--length is not used without --text"),
        ("theory --alpha 2", "--alpha is not used with --data isotropic"),
        ("theory --data decay --balance 0.5", "--balance is not used with --data decay"),
        ("theory --data x.npz --n 5", "--n is not used with --data x.npz"),
        ("reproduce --list --seeds 2", "--seeds is not used with --list"),
        (
            "train --schedule cosine --set schedule.every=2",
            "schedule.every = 2.0: the schedule 'cosine' does not use it",
        ),
        (
            "train --method vcl --set method.readout=adam --set method.readout_momentum=0.5",
            "the readout's adam does not use",
        ),
        ("train --method vcl --set method.solver=exact --set method.rank=3", "the exact solver does not use it"),
        ("measure --model mlp --data digits --set method.lr=3", "method: set model.KEY or data.KEY"),
        ("measure --model mlp --data digits --set model=cnn", "model: set model.KEY or data.KEY"),
    ],
)
def test_wrong_use_is_one_clear_line(gramscope: Command, arguments: str, message: str) -> None:
    done = gramscope(*arguments.split())
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert "measuring " not in done.err  # nothing has begun


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--epochs", "1", "--hidden", "4", "--out", "afile/x"],
        ["demo", "--epochs", "1", "--seeds", "1", "--out", "afile/x"],
        ["reproduce", "nfa-fig6", "--out", "afile/x"],
        ["report", "afile/x"],
        ["runs", "list", "afile/x"],
        ["train", "afile/x.toml"],
        ["data", "fetch", "mnist", "--data-dir", "afile/x"],
        ["train", "--hidden", "4", "--out", "n" * 300],
    ],
)
def test_paths_that_cannot_be_used_are_one_clear_line(gramscope: Command, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "afile").touch()
    done = gramscope(*arguments)
    assert done.code == (1 if "fetch" in arguments else 2)
    last = done.err.splitlines()[-1]
    assert last.startswith("gramscope: ")
    assert "afile" in last or "nnn" in last


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError(13, "Permission denied", "runs/x"), 2, "gramscope: runs/x: Permission denied\n"),
        (OSError(28, "No space left on device", "runs/x"), 1, "gramscope: runs/x: No space left on device\n"),
        (TimeoutError("timed out"), 1, "gramscope: timed out\n"),
    ],
)
def test_errors_of_the_system(
    gramscope: Command, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int, message: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    done = gramscope()
    assert (done.code, done.err) == (code, message)


def test_a_run_that_cannot_be_read_is_listed_with_the_others(gramscope: Command, tmp_path: Path) -> None:
    for name in ("good", "bad", "worse"):
        done = gramscope("train", "--hidden", "4", "--epochs", "1", "--out", f"runs/{name}")
        assert done.code == 0, done.err
    with (tmp_path / "runs/bad/records.jsonl").open("r+") as file:
        file.write("?")
    (tmp_path / "runs/worse/config.toml").write_text("= 3")
    rows = {Path(row["run"]).name: row for row in json.loads(gramscope("runs", "list", "--json").out)}
    assert rows["good"]["state"] == "finished"
    assert rows["good"]["error"] is None
    assert rows["bad"]["state"] == "finished"  # a list reads the ends of records alone
    assert rows["worse"]["state"] == "unreadable"
    assert "config.toml" in rows["worse"]["error"]
    assert "line 1 is not JSON" in gramscope("runs", "show", "runs/bad").err


def test_debug_shows_where_an_error_came_from(gramscope: Command) -> None:
    with pytest.raises(InputError):
        gramscope("--debug", "train", "--method", "sdg")


def test_interrupt_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*RUN, "train", "--data", "digits", "--hidden", "8", "--epochs", "5000", "--out", "runs/long"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:  # wait until it trains
        if "epoch 2" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130, rest
    assert "saved; continue with: gramscope train --resume runs/long" in rest
    assert "Traceback" not in rest


FACTORY = """
from torch import nn

def build(width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""


def test_measuring_your_own_net(gramscope: Command, tmp_path: Path) -> None:
    (tmp_path / "mynets.py").write_text(FACTORY)
    own = ["measure", "--model", "mynets:build", "--data", "digits", "--samples", "100", "--measures", "weight_norm"]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    done = gramscope(*own, "--weights", "w.safetensors", "--set", "model.width=6", "--json")
    assert done.code == 0, done.err
    (table,) = json.loads(done.out)
    assert table["layers"]["1"]["weight_norm"] == pytest.approx(float(net[1].weight.detach().norm()))
    torch.save({"state_dict": net.state_dict()}, tmp_path / "w.pt")
    assert gramscope(*own, "--weights", "w.pt", "--set", "model.width=6").code == 0
    done = gramscope(*own, "--weights", "w.pt")
    assert done.code == 2
    assert "w.pt does not fit Sequential" in done.err


def test_files_that_would_run_code_are_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.system, (f"touch {tmp_path / 'ran'}",))

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    net = nn.Linear(1, 1)
    assert_refused("cannot be read as weights only", load_weights, net, tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "short.pt").write_bytes(b"PK")
    assert_refused(r"short\.pt", load_weights, net, tmp_path / "short.pt")
    assert_refused("is not a file", load_weights, net, tmp_path / "none.pt")


def test_runs_of_an_own_loop_are_listed_and_their_measures_explained(gramscope: Command) -> None:
    for seed in range(2):
        run = RunDirectory.create(f"runs/group/seed-{seed}", {"seed": seed})
        run.append({"step": 0, "layers": {"0": {"nfa": 0.5}}})
    (row,) = json.loads(gramscope("runs", "list", "--json").out)
    assert (row["run"], row["state"], row["runs"]) == ("runs/group", "recorded", 2)
    done = gramscope("measure", "runs/group/seed-0")
    assert (done.code, "written by your own training loop" in done.err) == (2, True)


def test_the_demonstration_writes_into_no_folder_that_is_used(gramscope: Command, tmp_path: Path) -> None:
    (tmp_path / "used" / "folder").mkdir(parents=True)
    done = gramscope("demo", "--out", "used")
    assert (done.code, done.err) == (2, "gramscope: used is not empty; choose another --out\n")


@pytest.mark.slow
def test_demo(gramscope: Command) -> None:
    done = gramscope("demo", "--epochs", "2", "--seeds", "2", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [row["method"] for row in result["layers"]] == [
        name for name in ("sgd", "vcl", "free-muon") for _ in range(3)
    ]
    assert all("→" in row["target linearity"] for row in result["layers"])
    assert "free-muon has test accuracy" in " ".join(result["summary"])
    assert Path(result["report"]).read_text(encoding="utf-8").startswith("<!")
    assert gramscope("runs", "list", "demo", "--json").code == 0
