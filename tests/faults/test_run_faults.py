"""Every file operation of a run fails once; nothing that was reported is lost, and the run can be resumed.

``runs/files.py`` calls the system through one name. Here a stand-in counts the calls of an undisturbed run, and then the
run is made again for each of them, which fails in one of several ways. Operations that are added later are found too.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from faults.small_run import Reported, check_kept, check_resumed, configuration, outcome, small_data, stale
from gramscope.errors import GramscopeError, InputError, ResultWarning
from gramscope_lab.data import DataSet
from gramscope_lab.runs import files
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training import train as train_module
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.train import train
from gramscope_lab.training.trainer import Trainer

ERRORS = {"full disk": errno.ENOSPC, "broken disk": errno.EIO, "no permission": errno.EACCES}
#: operations that change the disk
WRITES = ("write", "fsync", "replace", "mkdir", "ftruncate", "unlink")
#: one run, and two runs in one group
SEEDS = {"run": [0], "group": [0, 1]}
#: faults that are tried at least
LEAST = {"run": 300, "group": 150}


class Crash(BaseException):
    """The process is gone: nothing after it happens, not even cleaning up."""


class FaultySystem:
    """Stands in for ``os``: counts the calls and lets call number ``at`` fail."""

    def __init__(self, at: int = -1, fault: str = "") -> None:
        self.at, self.fault = at, fault
        self.calls: list[str] = []
        self.renamed: list[Path] = []
        self.handles: set[int] = set()
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        return (lambda *arguments: self._call(name, function, *arguments)) if callable(function) else function

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.dead:
            raise Crash
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            return self._fail(name, function, *arguments)
        return self._do(name, function, *arguments)

    def _do(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name == "fsync":  # the system itself does not crash here
            return None
        result = function(*arguments)
        if name == "open":
            self.handles.add(result)
        elif name == "close":
            self.handles.discard(arguments[0])
        elif name == "replace":
            self.renamed.append(Path(arguments[1]))
        return result

    def _fail(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.fault in ERRORS:
            if name == "close":
                self._do(name, function, *arguments)
            elif name == "write":
                function(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(ERRORS[self.fault], os.strerror(ERRORS[self.fault]), str(arguments[0]))
        if self.fault == "short write":
            shorter = (arguments[0], arguments[1][:1]) if name == "write" else arguments
            return self._do(name, function, *shorter)
        if self.fault == "crash after":
            self._do(name, function, *arguments)
        elif name == "write":
            function(arguments[0], arguments[1][: len(arguments[1]) // 2])
        self.dead = True
        raise Crash

    def leave(self) -> None:
        """The system closes what a dead process had open."""
        for handle in self.handles:
            with suppress(OSError):
                os.close(handle)


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, system: FaultySystem) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(files, "system", system)
        try:
            yield
        finally:
            system.leave()


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


@pytest.fixture(autouse=True)
def known_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "describe_environment", lambda device: {"torch": "2", "device": device})


def check_fault(
    path: Path, config: TrainConfig, data: DataSet, system: FaultySystem, monkeypatch: Any, whole: Any
) -> None:
    reported = Reported()
    with faulty(monkeypatch, system):
        try:
            train(config, path, data=data, reporter=reported, parallel="1")
        except (GramscopeError, Crash):
            pass
        except OSError:
            assert system.calls[system.at] not in WRITES, "an error of the system is not explained"
    for lock in path.rglob("lock.json"):  # of a process that is gone
        lock.write_text(lock.read_text().replace('"started": "', '"started": "before '))
    check_kept(path, reported.found)
    for done in {step.parent for step in system.renamed if step.name.startswith("step-")}:
        assert any(step.name.startswith("step-") for step in done.iterdir()), (
            "a checkpoint was written and none is there"
        )
    with faulty(monkeypatch, FaultySystem()):
        check_resumed(path, config, data, whole)


@pytest.mark.parametrize("kind", SEEDS)
def test_every_file_operation_may_fail(
    kind: str, tmp_path: Path, data: DataSet, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    config = configuration(SEEDS[kind])
    counter = FaultySystem()
    with faulty(monkeypatch, counter):
        train(config, tmp_path / "whole", data=data, parallel="1")
    whole = outcome(tmp_path / "whole")
    assert stale(tmp_path) == []
    faults = [*ERRORS, "short write", "crash before", "crash after"]
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    wrong: list[str] = []
    for at, name in enumerate(counter.calls):
        chosen = faults if name in (*WRITES, "open", "read", "close") and kind == "run" else [faults[at % len(faults)]]
        for fault in chosen:
            if fault == "short write" and name != "write":
                continue
            tried[fault] += 1
            path = tmp_path / f"{at}-{fault.replace(' ', '-')}"
            try:
                check_fault(path, config, data, FaultySystem(at, fault), monkeypatch, whole)
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
