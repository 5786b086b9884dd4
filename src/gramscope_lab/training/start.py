"""Before the first step: load data and build nets for every member, and check what a resumed run was begun with."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.named_sets import is_generated
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.environment import describe_environment, differences
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.config_tables import DataTable
from gramscope_lab.training.fingerprint import check_same_data, fingerprints
from gramscope_lab.training.job import Job, arrange, load_data, prepare, resolve_device
from gramscope_lab.training.loop import Measure
from gramscope_lab.training.sample_losses import SampleLoss

#: makes a member's net in Python instead of from its configuration
ModelFactory: TypeAlias = Callable[[TrainConfig, DataSet], nn.Module]


@dataclass(frozen=True)
class Parts:
    """Python objects in place of those the configuration names."""

    data: DataSet | None = None
    model: ModelFactory | None = None
    loss: SampleLoss | None = None
    measure: Measure | None = None

    def given(self) -> bool:
        """Whether anything is given (such parts cannot be sent to other processes)."""
        return any(getattr(self, item.name) is not None for item in dataclasses.fields(self))


def config_to_resume(root: RunDirectory, config: TrainConfig) -> TrainConfig:
    """The configuration to resume ``root`` with: ``config``, with the earlier defaults the run was begun with."""
    stored = TrainConfig.from_stored(RunDirectory.open(root.path).config).anchored()
    config = config.to_resume(stored)
    if config != stored:
        raise InputError(f"{root.path} holds a run of another configuration; resume it with its own")
    return config


def member_directories(root: RunDirectory, members: dict[str, TrainConfig]) -> dict[str, RunDirectory]:
    """The run directory of each member, made where it is not there; a single member uses the root itself."""
    if len(members) == 1:
        return dict.fromkeys(members, root)
    runs = {}
    for name, member in members.items():
        run = root.member(name)
        runs[name] = run if run.exists() else RunDirectory.create(run.path, member.to_dict())
    return runs


def prepare_members(config: TrainConfig, members: dict[str, TrainConfig], parts: Parts) -> dict[str, Job]:
    """The members, ready to train. A data set is loaded once, however many members share it."""
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
    """Whether a data set prepared for two nets has the same form for both."""
    return one.x_train.dtype == other.x_train.dtype and one.classes == other.classes


def record_start(root: RunDirectory, jobs: dict[str, Job], execution: str, parts: Parts, resume: bool) -> None:
    """Record environment and data of a new run; compare those of a resumed run with what is recorded."""
    now = describe_environment(str(next(iter(jobs.values())).device))
    before = root.environment if resume else {}
    changed = differences(before, now) if before else {}
    if changed:
        changes = "; ".join(f"{key}: {old} then, {new} now" for key, (old, new) in changed.items())
        warnings.warn(
            f"resuming {root.path} elsewhere ({changes}): the last bits may differ", ResultWarning, stacklevel=3
        )
    data = fingerprints(job.data for job in jobs.values())
    generated = parts.data is not None or any(is_generated(job.config.data.name) for job in jobs.values())
    check_same_data(root.path, before.get("data", []), data, drawn=bool(changed) and generated)
    facts = {**(before or now), "execution": execution, "data": before.get("data", data)}
    if facts != before:
        root.write_environment(facts)


def execution_asked(root: RunDirectory | None, config: TrainConfig, resume: bool) -> str:
    """How to run the members; a resumed run keeps the way it was begun in."""
    before = root.environment.get("execution") if root is not None and resume else None
    return before or config.execution
