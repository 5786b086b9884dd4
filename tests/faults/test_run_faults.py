"""Every file operation of a run, and of a sweep, fails once; nothing that was reported is lost, and it can be resumed.

A stand-in for the system counts the operations of an undisturbed run, and then the run is made again for each of them, which
fails in one of several ways. Operations that are added later are found too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from faults.faulty_disk import CRASHES, ERRORS, Crash, FaultyDisk
from faults.small_run import Reported, check_kept, check_resumed, configuration, outcome, small_data, stale
from gramscope.errors import GramscopeError, InputError, ResultWarning
from gramscope_lab.data import DataSet
from gramscope_lab.runs import files
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training import job, sweep
from gramscope_lab.training import train as train_module
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.train import train
from gramscope_lab.training.trainer import Trainer

FAULTS = (*ERRORS, "short write", *CRASHES)
#: one run, and a sweep of two; the faults that are tried at least
LEAST = {"run": 450, "sweep": 200}


class Here(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


@pytest.fixture(autouse=True)
def known_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "describe_environment", lambda device: {"torch": "2", "device": device})


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """The last step of each run whose checkpoint was written, as far as the run knows."""
    steps: dict[Path, int] = {}
    save = RunDirectory.save_checkpoint

    def noted(run: RunDirectory, step: int, *rest: Any) -> Path:
        path = save(run, step, *rest)
        steps[run.path] = step
        return path

    monkeypatch.setattr(RunDirectory, "save_checkpoint", noted)
    return steps


def check_fault(folder: Path, config: TrainConfig, disk: FaultyDisk, saved: dict[Path, int], whole: Any) -> None:
    path, reported = folder / "run", Reported()
    saved.clear()
    with disk.installed(), suppress(GramscopeError, Crash):
        train(config, path, reporter=reported, parallel="2")
    disk.cut_power()
    for lock in path.rglob("lock.json"):  # of a process that is gone
        lock.write_text(lock.read_text().replace('"started": "', '"started": "before '))
    check_kept(path, reported.found)
    for run, step in saved.items():
        assert max(RunDirectory(run).checkpoint_steps(), default=-1) >= step, (
            "a checkpoint was written and is not there"
        )
    with FaultyDisk(folder).installed():
        check_resumed(path, config, None, whole)


@pytest.mark.parametrize("kind", LEAST)
def test_every_file_operation_may_fail(
    kind: str,
    tmp_path: Path,
    data: DataSet,
    monkeypatch: pytest.MonkeyPatch,
    saved: dict[Path, int],
    record_property: Any,
) -> None:
    monkeypatch.setattr(job, "load_data", lambda *_: data)
    monkeypatch.setattr(sweep, "local_executor", lambda *_: Here())
    config = configuration([0] if kind == "run" else [0, 1])
    counter = FaultyDisk(tmp_path)
    with counter.installed():
        train(config, tmp_path / "whole", parallel="2")
    whole = outcome(tmp_path / "whole")
    assert stale(tmp_path) == []
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    wrong: list[str] = []
    for at, name in enumerate(counter.calls):
        for fault in FAULTS if kind == "run" else [FAULTS[at % len(FAULTS)]]:
            if fault == "short write" and name != "write":
                continue
            tried[fault] += 1
            folder = tmp_path / f"{at}-{fault.replace(' ', '-')}"
            folder.mkdir()
            try:
                check_fault(folder, config, FaultyDisk(folder, at, fault), saved, whole)
            except Exception as error:
                lost[fault] += 1
                wrong.append(f"operation {at} ({name}), {fault}: {type(error).__name__}: {error}")
    print(f"{kind}: {len(counter.calls)} operations, {tried.total()} faults")
    for fault, times in tried.items():
        record_property("fault", f"{fault}|{kind}|{times}|{lost[fault]}")
    assert wrong == []
    assert tried.total() >= LEAST[kind]


def unfinished(path: Path) -> RunDirectory:
    """Take the last record of a run, which says that it has ended."""
    run = RunDirectory(path)
    records = run.path / "records.jsonl"
    records.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:-1]))
    return run


def test_checkpoints_beyond_the_resumed_step_do_not_push_out_good_ones(
    tmp_path: Path, data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration([0, 1]).with_values({"keep": 2})
    train(config, tmp_path / "run", data=data, parallel="stack")
    one, other = (unfinished(run.path) for run in RunDirectory(tmp_path / "run").members())
    first, last = one.checkpoint_steps()  # stopped after one of two members had saved
    other.checkpoint_path(last).unlink()
    monkeypatch.setattr(Trainer, "run", lambda trainer: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", data=data, resume=True)
    assert one.checkpoint_steps() == other.checkpoint_steps() == [first]


@pytest.mark.parametrize("parallel", ["1", "stack"])
def test_the_last_weights_of_a_finished_run_are_made_again(tmp_path: Path, data: DataSet, parallel: str) -> None:
    config = configuration([0, 1]).with_values({"keep": 3})
    train(config, tmp_path / "run", data=data, parallel=parallel)
    whole = outcome(tmp_path / "run")
    run = RunDirectory(tmp_path / "run" / "seed-0")
    newest = run.checkpoint_path(run.checkpoint_steps()[-1])
    newest.write_bytes(b"")
    with pytest.warns(ResultWarning, match="the checkpoint before it is used"):
        train(config, tmp_path / "run", data=data, resume=True, parallel=parallel)
    assert outcome(tmp_path / "run") == whole
    newest.unlink()
    train(config, tmp_path / "run", data=data, resume=True, parallel=parallel)
    assert outcome(tmp_path / "run") == whole
    files.remove(newest.parent)
    with pytest.raises(InputError, match="no checkpoint yet"):
        train(config, tmp_path / "run", data=data, resume=True, parallel=parallel)
    assert run.status() == "finished"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are not listed here")
def test_a_run_that_fails_leaves_no_file_open(tmp_path: Path, data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InputError("no")

    monkeypatch.setattr(RunDirectory, "save_checkpoint", fail)
    with pytest.raises(InputError, match="no"):
        train(configuration([0, 1]), tmp_path / "run", data=data, parallel="1")
    left = [os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir()]
    assert [name for name in left if str(tmp_path) in name] == []


def _value(key: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, key: value}


@pytest.mark.parametrize(
    "change",
    [
        _value("seconds", {}),
        _value("training", {}),
        lambda state: None,
    ],
)
def test_a_checkpoint_of_somebody_else_is_refused(
    tmp_path: Path, data: DataSet, change: Callable[[dict[str, Any]], Any]
) -> None:
    """Its digest fits, its content does not."""
    config = configuration([0]).with_values({"keep": 0})
    train(config, tmp_path / "run", data=data)
    run = unfinished(tmp_path / "run")
    found = run.load_checkpoint(run.checkpoint_steps()[-1])
    run.rewind(None)
    run.save_checkpoint(1, found.model, change(dict(found.state)))
    with pytest.raises(
        InputError, match="does not fit its configuration .*; restore both, or start again with --force"
    ):
        train(config, tmp_path / "run", data=data, resume=True)


def test_a_damaged_checkpoint_is_announced_and_made_again(tmp_path: Path, data: DataSet) -> None:
    config = configuration([0, 1]).with_values({"keep": 0})
    for name in ("whole", "damaged"):
        train(config, tmp_path / name, data=data, parallel="1")
    whole = outcome(tmp_path / "whole")
    runs = [
        unfinished(tmp_path / "damaged" / name) for name in ("seed-0", "seed-1")
    ]  # both were stopped before the end
    newest = runs[0].checkpoint_path(runs[0].checkpoint_steps()[-1])
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    with pytest.warns(ResultWarning, match="it is not what was written.*the checkpoint before it is used"):
        train(config, tmp_path / "damaged", data=data, resume=True, parallel="1")
    assert outcome(tmp_path / "damaged") == whole


def test_records_that_are_missing_are_noticed(tmp_path: Path, data: DataSet) -> None:
    config = configuration([0]).with_values({"keep": 0, "evaluate_every": 0.5})
    train(config, tmp_path / "run", data=data)
    path = unfinished(tmp_path / "run").path / "records.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    before = path.read_bytes()
    with pytest.raises(InputError, match="records are missing, or the file was edited; restore it, or start again"):
        train(config, tmp_path / "run", data=data, resume=True)
    assert path.read_bytes() == before
