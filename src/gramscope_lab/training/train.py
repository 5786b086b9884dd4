"""Train what a configuration says: one member, or all seeds and sweep values."""

from __future__ import annotations

import math
import os
import shlex
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.runs.directory import RunDirectory, describe_environment
from gramscope_lab.runs.files import RECORDS
from gramscope_lab.runs.records import last_record
from gramscope_lab.training import sweep
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job, ModelFactory, Overrides, Preparer, load_state, prepare, resolve_device
from gramscope_lab.training.layer_measures import LayerMeasures
from gramscope_lab.training.methods import build_method
from gramscope_lab.training.random_state import SMALL_STEP, SMALL_STEP_ON_GPU, operations_per_step
from gramscope_lab.training.reporter import Interrupted, Reporter
from gramscope_lab.training.sample_losses import SampleLoss
from gramscope_lab.training.stacking import StackedEngine, member_obstacle, stack_obstacle
from gramscope_lab.training.trainer import Engine, Measure, Outcome, SingleEngine, Trainer

__all__ = ["Member", "ModelFactory", "Parallel", "Trained", "resume_run", "train"]


# -- results ------------------------------------------------------------------------------------------------------
class Member:
    """One trained run: its net with the final weights, and its records; read from its directory if it trained elsewhere."""

    def __init__(self, config: TrainConfig, *, job: Job | None = None, records: Any = None, run: Any = None) -> None:
        self.config = config
        self._job, self._records, self._run = job, records, run

    @cached_property
    def model(self) -> nn.Module:
        """The net, on the training device or the CPU."""
        if self._job is None:
            job = prepare(self.config)
            load_state(job.model, self._run.load_checkpoint().model, self._run.path)
            return job.model
        return self._job.model

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """All records, in order."""
        return list(self._run.records() if self._records is None else self._records)

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


# -- how several members run --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parallel:
    """How several members train.

    Args:
        way: ``auto``; ``stack``: in one vectorised step; a number: in so many processes; ``ray`` or ``ray:ADDRESS``: on a
            cluster. The results of processes and of a cluster are the same bit for bit, those of a stack to float tolerance.
        gpus: share of a GPU for each run on a Ray cluster: 0.25 lets four share one.
    """

    way: str = "auto"
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.way not in ("auto", "stack", "ray") and not self.way.startswith("ray:") and self.processes < 1:
            raise InputError(f"--parallel {self.way}: use auto, stack, a number of processes, ray or ray:ADDRESS")
        share = self.gpus
        if share is not None and (not 0 < share < math.inf or (share > 1 and share != int(share))):
            raise InputError(f"--gpus {share:g}: give a share between 0 and 1, or whole GPUs")
        if share is not None and not self.way.startswith("ray"):
            raise InputError(f"--gpus {share:g} is for a Ray cluster: add --parallel ray")

    @property
    def processes(self) -> int:
        """The number asked for; 0 where none was."""
        return int(self.way) if self.way.isdecimal() else 0

    def executor(self, members: int, device: str) -> Any:
        """Makes what members are submitted to."""
        if self.way.startswith("ray"):
            return partial(sweep.RayExecutor, self.way.partition(":")[2], self.gpus)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return partial(sweep.local_executor, min(self.processes or cores, members), device)


def _choose(
    parallel: Parallel, config: TrainConfig, preparer: Preparer, unsendable: str
) -> tuple[str, str, Engine | None]:
    """How to run the members (``one-by-one``, ``processes``, ``ray`` or ``stack``), why, and what runs here first.

    Args:
        parallel: what was asked for.
        config: of all members.
        preparer: makes a member ready.
        unsendable: why members cannot train in other processes; empty if they can.
    """
    members, way = config.members(), parallel.way
    count, (name, member) = len(members), next(iter(members.items()))
    if way not in ("auto", "stack", "1") and unsendable and count > 1:
        raise InputError(f"--parallel {way}: {unsendable}; use --parallel 1 or stack")
    if count == 1 or way == "1":
        return "one-by-one", "", SingleEngine(preparer(member, name, config.swept(member)))
    if way not in ("auto", "stack"):
        chosen, where = ("processes", "in processes") if parallel.processes else ("ray", "on the Ray cluster")
        return chosen, f"{count} runs {where}, as asked", None
    first = Preparer(preparer.overrides, "cpu")(member)
    operations, on_cpu = operations_per_step(first), resolve_device(config.device).type == "cpu"
    obstacle = member_obstacle(first)
    if not obstacle and (way == "stack" or operations <= (SMALL_STEP if on_cpu else SMALL_STEP_ON_GPU)):
        jobs = [preparer(member, name, config.swept(member)) for name, member in members.items()]
        obstacle = stack_obstacle(jobs)
        if not obstacle:
            return "stack", f"{count} runs in one vectorised step", StackedEngine(jobs)
    if way == "stack":
        raise InputError(f"--parallel stack: {obstacle}; use auto, or a number of processes")
    # of large nets a stacked step is mostly memory traffic, which a stack makes no smaller
    obstacle = obstacle or f"a stacked step of nets this large is slower ({operations / 1e6:.0f} Mflop)"
    seconds = count * first.plan.steps * (5e-4 + operations / 1e10)
    if not unsendable and (not on_cpu or seconds > 20.0):  # shorter than starting them
        return "processes", f"{count} runs in processes, because {obstacle}", None
    return "one-by-one", f"{count} runs one after another, because {obstacle}", None


# -- training -----------------------------------------------------------------------------------------------------
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
    parallel: Parallel | str = "auto",
) -> Trained:
    """Train every member of a configuration.

    Args:
        config: what to train.
        out: run directory; several members get sub-directories. Without it nothing is written.
        resume: continue what is in ``out`` (whose configuration must be this one).
        force: replace the run in ``out``; with ``resume``, take over its lock from another host.
        reporter: receives notes and progress.
        data, model, loss, measure: Python objects in place of the configured ones. The data are cut, split and noised as
            the configuration says.
        parallel: how several members train, see :class:`Parallel`.

    Raises:
        Interrupted: the user asked to stop; everything is saved.
    """
    reporter, config = reporter or Reporter(), config.with_absolute_paths()
    overrides = Overrides(data, model, loss, measure)
    parallel = Parallel(parallel) if isinstance(parallel, str) else parallel
    members = config.members()
    root = None if out is None else RunDirectory(out)
    with ExitStack() as stack:
        if root is not None and resume:
            parallel = _take_up(root, config, parallel, force=force)
            stack.callback(root.lock.release)
        elif root is not None:
            root.check_free(force=force, members=list(members))
        preparer = Preparer(overrides)
        unsendable = "a run directory is needed" if root is None else ""
        unsendable = "objects given in Python cannot be sent to other processes" if overrides.given() else unsendable
        execution, reason, engine = _choose(parallel, config, preparer, unsendable)
        if engine is None:
            _check_members(config, overrides)
        if reason:
            reporter.note(reason)
        if root is not None:
            if not resume:
                RunDirectory.create(root.path, config.to_dict(), force=force)
                stack.enter_context(root.lock)
                _check_stored(root, config)  # raises if another process has replaced the run meanwhile
            _record_start(root, str(resolve_device(config.device)), execution, resume)
        runs = {} if root is None else _member_directories(root, members)
        trained: dict[str, Member] = {}
        if execution in ("processes", "ray"):
            tasks = [
                sweep.MemberTask(name, member, runs[name].path.absolute(), config.swept(member))
                for name, member in members.items()
                if not is_complete(runs[name])
            ]
            if tasks:
                sweep.run_members(tasks, parallel.executor(len(tasks), config.device), reporter)
            trained = {name: Member(member, run=runs[name]) for name, member in members.items()}
        elif execution == "stack" and engine is not None:
            trained = train_jobs(engine, list(runs.values()) or None, overrides, reporter, root)
        else:
            for name, member in members.items():
                engine = engine or SingleEngine(preparer(member, name, config.swept(member)))
                trained |= train_jobs(engine, [runs[name]] if runs else None, overrides, reporter, root)
                engine = None
    return Trained(trained, execution, None if out is None else Path(out))


def _take_up(root: RunDirectory, config: TrainConfig, parallel: Parallel, *, force: bool) -> Parallel:
    """Lock a run that is to go on; how its members ran before, where other ways give other last bits."""
    _check_stored(root, config)
    root.lock.acquire(force=force)
    root.remove_stale()
    if root.environment.get("execution") == "stack":
        return Parallel("stack")
    return replace(parallel, way="auto") if parallel.way == "stack" else parallel


def resume_run(
    path: Path | str,
    *,
    reporter: Reporter | None = None,
    trust: bool = False,
    parallel: Parallel | str = "auto",
    force: bool = False,
) -> Trained:
    """Continue a stopped run from its newest checkpoint with the configuration stored there.

    Only with ``trust`` may that configuration name a function ``package.module:function`` as the net.
    """
    config = TrainConfig.from_dict(RunDirectory.open(path).config)
    if not trust:
        config.check_trusted(path)
    return train(config, path, resume=True, reporter=reporter, parallel=parallel, force=force)


def train_jobs(
    engine: Engine,
    runs: Sequence[RunDirectory] | None,
    overrides: Overrides | None = None,
    reporter: Reporter | None = None,
    root: RunDirectory | None = None,
) -> dict[str, Member]:
    """Train one member, or a stack of them, from their last checkpoints on; the lock of ``root`` is held already."""
    jobs = engine.jobs
    if runs and all(map(is_complete, runs)):
        for job, run in zip(jobs, runs, strict=True):
            load_state(job.model, run.load_checkpoint().model, run.path)
        return {job.name: Member(job.config, job=job, run=run) for job, run in zip(jobs, runs, strict=True)}
    config = jobs[0].config
    measure = ((overrides and overrides.measure) or LayerMeasures(jobs)) if config.measure.samples else None
    reporter = reporter or Reporter()
    with ExitStack() as stack:
        for run in runs or []:
            if root is None or run.path != root.path:
                stack.enter_context(run.lock)
        trainer = Trainer(engine, runs, measure=measure, reporter=reporter)
        trainer.resume()
        for note in engine.notes:
            reporter.note(note)
        outcome = trainer.run()
    if not outcome.finished:
        raise Interrupted(_how_to_resume(outcome, config, runs, root))
    return {job.name: Member(job.config, job=job, records=r) for job, r in zip(jobs, trainer.records, strict=True)}


def _how_to_resume(
    outcome: Outcome, config: TrainConfig, runs: Sequence[RunDirectory] | None, root: RunDirectory | None
) -> str:
    if not runs:
        return f"stopped after step {outcome.step}; nothing was saved because no run directory was given"
    path = shlex.quote(str((root or runs[0]).path)) + (" --trust" if config.factories() else "")
    return f"stopped after step {outcome.step} and saved; continue with: gramscope train --resume {path}"


# -- before the first step ----------------------------------------------------------------------------------------
def _check_stored(root: RunDirectory, config: TrainConfig) -> None:
    if TrainConfig.from_dict(RunDirectory.open(root.path).config).with_absolute_paths() != config:
        raise InputError(f"{root.path} holds a run of another configuration; resume it with its own")


def _check_members(config: TrainConfig, overrides: Overrides) -> None:
    """Build net and optimizers of every sweep value on the CPU, one after the other: what does not fit raises before anything
    is written. Of nets made in Python only the first."""
    preparer = Preparer(overrides, "cpu")
    for index, member in enumerate(config.members().values()):
        if index == 0 or (member.seed == config.seeds[0] and not overrides.given()):
            build_method(member.method, preparer(member).model, reduction=member.reduction)


def _member_directories(root: RunDirectory, members: dict[str, TrainConfig]) -> dict[str, RunDirectory]:
    """The run directory of each member, made where it is not there; a single member uses the root itself."""
    if len(members) == 1:
        return dict.fromkeys(members, root)
    runs = {name: root.member(name) for name in members}
    for name, run in runs.items():
        if not run.exists():
            RunDirectory.create(run.path, members[name].to_dict())
    return runs


def _record_start(root: RunDirectory, device: str, execution: str, resume: bool) -> None:
    """Record the environment of a new run; compare that of a resumed one with what is recorded."""
    now = describe_environment(device)
    before = root.environment if resume else {}
    decisive = ("torch", "device", "machine", "threads")  # for the last bits
    changed = [
        f"{key}: {before.get(key)} then, {now.get(key)} now" for key in decisive if before.get(key) != now.get(key)
    ]
    if before and changed:
        changes = "; ".join(changed)
        warnings.warn(
            f"resuming {root.path} elsewhere ({changes}): the last bits may differ", ResultWarning, stacklevel=3
        )
    if not before:
        root.write_environment({**now, "execution": execution})


def is_complete(run: RunDirectory) -> bool:
    """Whether a run has ended and its last weights are there; damaged ones are computed again from the checkpoint before.

    A run without any checkpoint counts as complete: they were removed, and nothing is computed again without being asked for.
    """
    if run.status() != "finished":
        return False
    steps, end = run.checkpoint_steps(), last_record(run.at(RECORDS)) or {}
    try:
        return not steps or run.load_checkpoint(end.get("step")).step == steps[-1]
    except InputError:
        return False
