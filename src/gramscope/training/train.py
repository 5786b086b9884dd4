"""Train what a configuration says: one member, or seeds and sweep values together."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from gramscope.data.dataset import DataSet
from gramscope.data.named_sets import is_generated
from gramscope.errors import InputError, ResultWarning
from gramscope.runs.directory import RunDirectory
from gramscope.runs.environment import describe_environment, differences
from gramscope.training.config import DataTable, TrainConfig
from gramscope.training.engine import Engine, SingleEngine
from gramscope.training.execution import choose_execution
from gramscope.training.fingerprint import check_same_data, fingerprints
from gramscope.training.interrupt import Interrupted
from gramscope.training.job import Job, arrange, load_data, prepare, resolve_device
from gramscope.training.layer_measures import LayerMeasures
from gramscope.training.loop import Loop, Measure, Outcome
from gramscope.training.processes import Errand, run_in_processes
from gramscope.training.reporter import Reporter
from gramscope.training.sample_losses import SampleLoss
from gramscope.training.stacking import StackedEngine

#: makes a member's net in Python instead of from its configuration
ModelFactory: TypeAlias = Callable[[TrainConfig, DataSet], nn.Module]


@dataclass(frozen=True)
class Parts:
    """What Python code may give in place of what the configuration names."""

    data: DataSet | None = None
    model: ModelFactory | None = None
    loss: SampleLoss | None = None
    measure: Measure | None = None

    def given(self) -> bool:
        """Whether anything is given (such parts cannot be sent to other processes)."""
        return any(getattr(self, item.name) is not None for item in dataclasses.fields(self))


@dataclass(frozen=True)
class Member:
    """A trained member: its net with the final weights, on the CPU or the training device, and its records."""

    name: str
    config: TrainConfig
    model: nn.Module = field(repr=False)
    records: Sequence[dict[str, Any]] = field(repr=False)

    def last(self, key: str) -> Any:
        """The newest recorded value of ``key``, such as ``test_accuracy``; ``None`` if it was never recorded."""
        return next((record[key] for record in reversed(self.records) if key in record), None)


@dataclass(frozen=True)
class Trained:
    """The outcome of :func:`train`."""

    members: dict[str, Member]
    execution: str
    path: Path | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of all members, each with the member's name as ``run``."""
        return [{"run": name, **record} for name, member in self.members.items() for record in member.records]


def train(
    config: TrainConfig,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
    data: DataSet | None = None,
    model: ModelFactory | None = None,
    loss: SampleLoss | None = None,
    measure: Measure | None = None,
) -> Trained:
    """Train every member of a configuration.

    Args:
        config: what to train.
        out: run directory; several members get sub-directories. Without it nothing is written.
        resume: continue what is in ``out`` (whose configuration must be this one).
        force: replace the run in ``out``.
        reporter: receives notes and progress.
        data, model, loss, measure: Python objects in place of the configured ones. The data are cut, split and noised as
            the configuration says.

    Raises:
        Interrupted: the user asked to stop; everything is saved.
    """
    reporter = reporter or Reporter()
    parts = Parts(data, model, loss, measure)
    config = config.anchored()
    members = config.members()
    with ExitStack() as stack:
        root = None if out is None else RunDirectory(out)
        if root is not None and resume:
            _check_configuration(root, config)
            stack.enter_context(root.lock)
        elif root is not None:
            root.check_free(force=force)
        jobs = _jobs(config, members, parts)
        execution, reason = choose_execution(
            list(jobs.values()), _asked(root, config, resume), portable=not parts.given()
        )
        groups = [list(jobs.values())] if execution == "vectorised" else [[job] for job in jobs.values()]
        # made here, so that a method that does not fit shows before anything is written
        first: Engine | None = _engine(groups[0], execution)
        if reason:
            reporter.note(reason)
        if root is not None:
            if not resume:
                RunDirectory.create(root.path, config.to_dict(), force=force)
                stack.enter_context(root.lock)
            stack.callback(root.close)
            _note_start(root, jobs, execution, parts, resume)
        if execution == "processes":
            if root is None:
                root = RunDirectory.create(stack.enter_context(tempfile.TemporaryDirectory()), config.to_dict())
            trained = _in_processes(jobs, _member_runs(root, members), reporter)
        else:
            runs = None if root is None else _member_runs(root, members)
            trained = {}
            for group in groups:
                engine, first = first or _engine(group, execution), None
                chosen = None if runs is None else [runs[job.name] for job in group]
                trained |= _run(engine, chosen, parts, reporter, root)
    return Trained(trained, execution, None if out is None else Path(out))


def resume_run(path: Path | str, *, reporter: Reporter | None = None) -> Trained:
    """Continue a stopped run from its newest checkpoint with the configuration stored there."""
    config = TrainConfig.from_dict(RunDirectory.open(path).config)
    return train(config, path, resume=True, reporter=reporter)


def run_member(errand: Errand, reporter: Reporter) -> None:
    """Train one member into its directory, going on where it stopped. Runs in a process of its own."""
    job = prepare(errand.config, errand.name, labels=errand.labels)
    _run(SingleEngine(job), [RunDirectory(errand.path)], Parts(), reporter, None)


# -- preparing ----------------------------------------------------------------------------------------------------
def _check_configuration(root: RunDirectory, config: TrainConfig) -> None:
    root = RunDirectory.open(root.path)
    if TrainConfig.from_dict(root.config).anchored() != config:
        raise InputError(f"{root.path} holds a run of another configuration; resume it with its own")


def _member_runs(root: RunDirectory, members: dict[str, TrainConfig]) -> dict[str, RunDirectory]:
    if len(members) == 1:
        return dict.fromkeys(members, root)
    runs = {}
    for name, member in members.items():
        run = RunDirectory(root.path / name)
        runs[name] = run if run.exists() else RunDirectory.create(run.path, member.to_dict())
    return runs


def _jobs(config: TrainConfig, members: dict[str, TrainConfig], parts: Parts) -> dict[str, Job]:
    """Load each data set once, however many members share it."""
    loaded: list[tuple[DataTable, DataSet]] = []
    fitted: list[tuple[DataSet, DataSet]] = []
    jobs = {}
    for name, member in members.items():
        data = next((found for table, found in loaded if table == member.data), None)
        if data is None:
            given = parts.data
            data = load_data(member.data) if given is None else arrange(given, member.data)
            data = data.to(resolve_device(member.device))
            loaded.append((member.data, data))
        model = None if parts.model is None else parts.model(member, data)
        labels = config.swept(member)
        job = prepare(member, name, data=data, model=model, loss=parts.loss, labels=labels)
        same = (found for raw, found in fitted if raw is data and _same_form(found, job.data))
        job = dataclasses.replace(job, data=next(same, job.data))
        fitted.append((data, job.data))
        jobs[name] = job
    return jobs


def _same_form(one: DataSet, other: DataSet) -> bool:
    """Whether one set prepared for two nets came out alike."""
    return one.x_train.dtype == other.x_train.dtype and one.classes == other.classes


def _engine(group: list[Job], execution: str) -> Engine:
    return StackedEngine(group) if execution == "vectorised" else SingleEngine(group[0])


def _note_start(root: RunDirectory, jobs: dict[str, Job], execution: str, parts: Parts, resume: bool) -> None:
    """Record what the run is made with; of a resumed run compare it, and the data, with what is recorded."""
    now = describe_environment(str(next(iter(jobs.values())).device))
    before = root.environment if resume else {}
    changed = differences(before, now) if before else {}
    if changed:
        told = "; ".join(f"{key}: {old} then, {new} now" for key, (old, new) in changed.items())
        warnings.warn(f"resuming {root.path} elsewhere ({told}): the last bits may differ", ResultWarning, stacklevel=3)
    data = fingerprints(job.data for job in jobs.values())
    generated = parts.data is not None or any(is_generated(job.config.data.name) for job in jobs.values())
    check_same_data(root.path, before.get("data", []), data, drawn=bool(changed) and generated)
    facts = {**(before or now), "execution": execution, "data": before.get("data", data)}
    if facts != before:
        root.write_environment(facts)


def _asked(root: RunDirectory | None, config: TrainConfig, resume: bool) -> str:
    """How to run the members; a resumed run goes on as it began."""
    before = root.environment.get("execution") if root is not None and resume else None
    return before or config.execution


# -- running ------------------------------------------------------------------------------------------------------
def _in_processes(jobs: dict[str, Job], runs: dict[str, RunDirectory], reporter: Reporter) -> dict[str, Member]:
    errands = [
        Errand(name, job.config, runs[name].path, job.labels, job.plan.steps)
        for name, job in jobs.items()
        if runs[name].status() != "finished"
    ]
    if errands:
        run_in_processes(errands, reporter)
    return {name: _from_disk(job, runs[name]) for name, job in jobs.items()}


def _run(
    engine: Engine, runs: list[RunDirectory] | None, parts: Parts, reporter: Reporter, root: RunDirectory | None
) -> dict[str, Member]:
    if runs and all(run.status() == "finished" for run in runs):
        return {job.name: _from_disk(job, run) for job, run in zip(engine.jobs, runs, strict=True)}
    config = engine.jobs[0].config
    measure = parts.measure or (LayerMeasures(engine.jobs) if config.measure.every else None)
    with ExitStack() as stack:
        for run in runs or []:
            if root is None or run.path != root.path:  # the root's lock is held already
                stack.enter_context(run.lock)
        loop = Loop(engine, runs, measure=measure, reporter=reporter)
        loop.resume()
        for note in engine.notes:
            reporter.note(note)
        outcome = loop.run()
    if not outcome.finished:
        raise Interrupted(_how_to_resume(outcome, runs, root))
    return {
        job.name: Member(job.name, job.config, model, records)
        for job, model, records in zip(engine.jobs, engine.models(), loop.records, strict=True)
    }


def _how_to_resume(outcome: Outcome, runs: list[RunDirectory] | None, root: RunDirectory | None) -> str:
    if not runs:
        return f"stopped after step {outcome.step}; nothing was saved because no run directory was given"
    path = shlex.quote(str((root or runs[0]).path))
    return f"stopped after step {outcome.step} and saved; continue with: gramscope train --resume {path}"


def _from_disk(job: Job, run: RunDirectory) -> Member:
    job.model.load_state_dict(dict(run.load_checkpoint().model))
    return Member(job.name, job.config, job.model, run.records())
