"""Train what a configuration says: one member, or all seeds and sweep values."""

from __future__ import annotations

import shlex
import tempfile
from contextlib import ExitStack
from pathlib import Path

from gramscope_lab.data.dataset import DataSet
from gramscope_lab.runs.checkpoints import checkpoint_path, is_intact
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.layout import CHECKPOINTS
from gramscope_lab.runs.starting import check_free, remove_litter
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.engine import Engine, SingleEngine
from gramscope_lab.training.execution import choose_execution
from gramscope_lab.training.interrupt import Interrupted
from gramscope_lab.training.job import Job, prepare
from gramscope_lab.training.layer_measures import LayerMeasures
from gramscope_lab.training.loop import Loop, Measure, Outcome
from gramscope_lab.training.members import MemberTask, Workers, run_members
from gramscope_lab.training.model_factory import load_state
from gramscope_lab.training.placement import Placement
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.sample_losses import SampleLoss
from gramscope_lab.training.stacking import StackedEngine
from gramscope_lab.training.start import (
    ModelFactory,
    Parts,
    config_to_resume,
    execution_asked,
    member_directories,
    prepare_members,
    record_start,
)  # fmt: skip
from gramscope_lab.training.trained import Member, Trained


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
    placement: Placement | None = None,
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
        placement: where the members train, this machine by default.

    Raises:
        Interrupted: the user asked to stop; everything is saved.
    """
    reporter = reporter or Reporter()
    parts, placement = Parts(data, model, loss, measure), placement or Placement()
    config = config.anchored()
    with ExitStack() as stack:
        root = None if out is None else RunDirectory(out)
        if root is not None and resume:
            config = config_to_resume(root, config)
            stack.enter_context(root.lock)
            remove_litter(root)
        elif root is not None:
            check_free(root, force=force, members=list(config.members()))
        members = config.members()
        portable = not parts.given()
        asked, note = placement.execution(execution_asked(root, config, resume), len(members), portable=portable)
        jobs = prepare_members(config, members, parts)
        execution, reason = choose_execution(list(jobs.values()), asked, portable=portable)
        groups = [list(jobs.values())] if execution == "vectorised" else [[job] for job in jobs.values()]
        # built before anything is written, because a method that does not fit the net raises here
        first: Engine | None = _engine(groups[0], execution)
        workers = placement.workers(len(members)) if execution == "processes" else None
        if workers is not None:
            stack.callback(workers.close)
        for text in (note, reason):
            if text:
                reporter.note(text)
        if root is not None:
            if not resume:
                RunDirectory.create(root.path, config.to_dict(), force=force)
                stack.enter_context(root.lock)
                config_to_resume(root, config)  # raises if another process has replaced the run meanwhile
            stack.callback(root.close)
            record_start(root, jobs, execution, parts, resume)
        if workers is not None:
            if root is None:
                root = RunDirectory.create(stack.enter_context(tempfile.TemporaryDirectory()), config.to_dict())
            trained = _in_processes(jobs, member_directories(root, members), reporter, workers)
        else:
            runs = None if root is None else member_directories(root, members)
            trained = {}
            for group in groups:
                engine, first = first or _engine(group, execution), None
                chosen = None if runs is None else [runs[job.name] for job in group]
                trained |= _run(engine, chosen, parts, reporter, root)
    return Trained(trained, execution, None if out is None else Path(out))


def resume_run(
    path: Path | str, *, reporter: Reporter | None = None, trust: bool = False, placement: Placement | None = None
) -> Trained:
    """Continue a stopped run from its newest checkpoint with the configuration stored there.

    Only with ``trust`` may that configuration name a function ``package.module:function`` as the net.
    """
    config = TrainConfig.from_stored(RunDirectory.open(path).config)
    if not trust:
        config.check_trusted(path)
    return train(config, path, resume=True, reporter=reporter, placement=placement)


def run_member(task: MemberTask, reporter: Reporter) -> None:
    """Train one member into its directory, from its last checkpoint on. Runs in a process of its own."""
    job = prepare(task.config, task.name, labels=task.labels)
    _run(SingleEngine(job), [RunDirectory(task.path)], Parts(), reporter, None)


def _engine(group: list[Job], execution: str) -> Engine:
    return StackedEngine(group) if execution == "vectorised" else SingleEngine(group[0])


def _in_processes(
    jobs: dict[str, Job], runs: dict[str, RunDirectory], reporter: Reporter, workers: Workers
) -> dict[str, Member]:
    tasks = [
        MemberTask(name, job.config, runs[name].path.absolute(), job.labels, job.plan.steps)
        for name, job in jobs.items()
        if not _is_complete(runs[name])
    ]
    if tasks:
        run_members(tasks, workers, reporter)
    return {name: _from_disk(job, runs[name]) for name, job in jobs.items()}


def _run(
    engine: Engine, runs: list[RunDirectory] | None, parts: Parts, reporter: Reporter, root: RunDirectory | None
) -> dict[str, Member]:
    if runs and all(map(_is_complete, runs)):
        return {job.name: _from_disk(job, run) for job, run in zip(engine.jobs, runs, strict=True)}
    config = engine.jobs[0].config
    measure = parts.measure or (LayerMeasures(engine.jobs) if config.measure.every else None)
    with ExitStack() as stack:
        for run in runs or []:
            stack.callback(run.close)
            if root is None or run.path != root.path:  # the root's lock is held already
                stack.enter_context(run.lock)
        loop = Loop(engine, runs, measure=measure, reporter=reporter)
        loop.resume()
        for note in engine.notes:
            reporter.note(note)
        outcome = loop.run()
    if not outcome.finished:
        raise Interrupted(_how_to_resume(outcome, config, runs, root))
    return {
        job.name: Member(job.name, job.config, model, records)
        for job, model, records in zip(engine.jobs, engine.models(), loop.records, strict=True)
    }


def _how_to_resume(
    outcome: Outcome, config: TrainConfig, runs: list[RunDirectory] | None, root: RunDirectory | None
) -> str:
    if not runs:
        return f"stopped after step {outcome.step}; nothing was saved because no run directory was given"
    path = shlex.quote(str((root or runs[0]).path)) + (" --trust" if config.factories() else "")
    return f"stopped after step {outcome.step} and saved; continue with: gramscope train --resume {path}"


def _is_complete(run: RunDirectory) -> bool:
    """Whether a run has ended and its last weights are there; damaged ones are computed again from the checkpoint before.

    A run without any checkpoint counts as complete: they were removed, and nothing is computed again without being asked for.
    """
    if run.status() != "finished":
        return False
    steps = run.checkpoint_steps()
    end = run.records("end")[-1].get("step")
    return not steps or (steps[-1] == end and is_intact(checkpoint_path(run.at(CHECKPOINTS), end)))


def _from_disk(job: Job, run: RunDirectory) -> Member:
    load_state(job.model, run.load_checkpoint().model, run.path)
    return Member(job.name, job.config, job.model, run.records())
