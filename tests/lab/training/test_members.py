"""The loop over workers: restarts, failures and interrupts, with workers that follow a script."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gramscope.errors import GramscopeError
from gramscope_lab.training.interrupt import Interrupted
from gramscope_lab.training.members import MemberTask, News, Workers, run_members
from lab.training.helpers import Config, Notes

#: what a worker does each time its member is started
Script = dict[str, list[str]]


class Scripted(Workers):
    """Each start of a member takes the next end of its script; ``wait`` ends only when asked to stop."""

    slots = 2  # type: ignore[assignment]

    def __init__(self, script: Script, checkpoint: Callable[[MemberTask], None] = lambda task: None) -> None:
        self.script, self.checkpoint = script, checkpoint
        self.running: list[str] = []
        self.started: list[str] = []
        self._news: list[News] = []

    def start(self, task: MemberTask) -> None:
        self.started.append(task.name)
        assert len(self.running) < 2
        end = self.script[task.name].pop(0)
        self.checkpoint(task)
        if end == "wait":
            self.running.append(task.name)
        else:
            self._news += [News(task.name, "step", 1), News(task.name, end, "why")]

    def news(self, timeout: float) -> Sequence[News]:
        found, self._news = self._news, []
        return found

    def stop(self) -> None:
        self._news += [News(name, "interrupted") for name in self.running]


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Callable[..., Scripted]:
    def call(script: Script, notes: Notes, **options: Callable[[MemberTask], None]) -> Scripted:
        workers = Scripted({name: list(ends) for name, ends in script.items()}, **options)
        tasks = [MemberTask(name, config(), tmp_path / name, {}, 1) for name in script]
        run_members(tasks, workers, notes)
        assert not any(workers.script.values())
        return workers

    return call


def test_a_lost_member_starts_again(run: Callable[..., Scripted]) -> None:
    notes = Notes()
    workers = run({"a": ["lost", "lost", "finished"], "b": ["finished"], "c": ["finished"]}, notes)
    assert workers.started.count("a") == 3
    assert notes.notes == ["a: why; it starts again from its last checkpoint"] * 2


def test_it_is_given_up_without_new_checkpoints_only(run: Callable[..., Scripted], tmp_path: Path) -> None:
    with pytest.raises(GramscopeError, match="a: why, 4 times without a new checkpoint"):
        run({"a": ["lost"] * 4, "b": ["wait"]}, Notes())

    def save(task: MemberTask) -> None:
        made = list(task.path.glob("checkpoints/*"))
        folder = task.path / "checkpoints" / f"step-{len(made):09}"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "training.safetensors", "state.json", "manifest.json"):
            (folder / name).touch()

    run({"a": ["lost"] * 6 + ["finished"]}, Notes(), checkpoint=save)


def test_a_failure_stops_the_others(run: Callable[..., Scripted]) -> None:
    with pytest.raises(GramscopeError, match="^b: why$"):
        run({"a": ["wait"], "b": ["failed"]}, Notes())


def test_an_interrupt_stops_all(run: Callable[..., Scripted], tmp_path: Path) -> None:
    class Interrupting(Notes):
        def member(self, name: str, done: int, total: int) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match=f"continue with: gramscope train --resume {tmp_path}"):
        run({"a": ["wait"], "b": ["lost"]}, Interrupting())
