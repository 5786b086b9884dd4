"""VCL without arguments against peers at the rate that a validation split chose, from a few steps to thousands."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from gramscope.bench.optimizer_peers import Competitor, competitors
from gramscope.bench.optimizer_tasks import TASKS, Task, make_task
from gramscope.bench.timing import synchronize
from gramscope.errors import InputError, NumericalError

#: steps and seeds, by scale
BUDGETS = {"quick": (10, 30, 100), "full": (10, 30, 100, 300, 1_000, 3_000)}
SEEDS = {"quick": 2, "full": 3}


@dataclass(frozen=True)
class Trial:
    """One training run: what ran, its scores (accuracy in per cent, or minus the loss per character) and its seconds."""

    net: str
    data: str
    steps: int
    method: str
    rate: float
    seed: int
    validation: float
    test: float
    seconds: float


@dataclass(frozen=True)
class Line:
    """One method on one task at one budget.

    Attributes:
        rate: the default, or the one that validation chose.
        score, error: mean test score over seeds at that rate, and its standard error.
        median, spread: of the validation scores over the grid of rates, with the first seed: median, largest minus least.
        milliseconds: of a step.
    """

    net: str
    data: str
    steps: int
    method: str
    rate: float
    seeds: int
    score: float
    error: float
    median: float
    spread: float
    milliseconds: float

    def to_dict(self) -> dict[str, Any]:
        """The line as plain values."""
        return asdict(self)


def run_trial(task: Task, method: Competitor, rate: float, steps: int, seed: int) -> Trial:
    """Train a net for a number of steps while all rates fall linearly to 0. A run that fails scores as a constant guess."""
    generator = torch.Generator().manual_seed(seed)
    net = task.build(generator)
    optimizers = method.make(net, rate)
    schedules = [LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)) for optimizer in optimizers]
    x, y = task.train
    order: list[torch.Tensor] = []
    start = time.perf_counter()
    failed = False
    for _ in range(steps):
        if not order:
            whole = len(x) // task.batch * task.batch
            order = list(torch.split(torch.randperm(len(x), generator=generator)[:whole].to(x.device), task.batch))
        index = order.pop()
        for optimizer in optimizers:
            optimizer.zero_grad()
        task.loss(net, (x[index], y[index])).backward()  # type: ignore[no-untyped-call]
        try:
            for optimizer in optimizers:
                optimizer.step()
        except NumericalError:
            failed = True
            break
        for schedule in schedules:
            schedule.step()
    synchronize(x.device)
    seconds = time.perf_counter() - start
    scores = [task.score(net, pair) for pair in (task.validation, task.test)]
    worst = -10.0 if task.text else 10.0  # a loss of 10 per character, or one class of ten
    validation, test = (worst if failed or not math.isfinite(score) else max(score, worst) for score in scores)
    return Trial(task.net, task.data, steps, method.name, rate, seed, validation, test, seconds)


def compare_optimizers(
    scale: str = "quick",
    *,
    data_dir: str | None = None,
    device: str = "cpu",
    tasks: Sequence[tuple[str, str]] | None = None,
    budgets: Sequence[int] | None = None,
    seeds: int | None = None,
    methods: Sequence[Competitor] | None = None,
    records: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Trial]:
    """Train every net by every method at every budget.

    All rates of a method run with the first seed; the rate that counts (VCL's default, or the best on validation) runs with the
    other seeds too.

    Args:
        scale: ``"quick"`` on shipped data, or ``"full"``, which reads MNIST and CIFAR-10 from ``data_dir``.
        data_dir: folder with the official files.
        device: where to train.
        tasks, budgets, seeds, methods: in place of those of the scale.
        records: a file of JSON lines; runs that it holds are not run again, and new ones are added.
        tell: called with a line of text at the start and after each method.
    """
    if scale not in TASKS:
        raise InputError(f"scale={scale!r}: choose one of {', '.join(TASKS)}")
    known = [] if records is None else read_trials(records)
    done = {(t.net, t.data, t.steps, t.method, t.rate, t.seed): t for t in known}
    found: list[Trial] = []
    tell(f"comparing optimizers on {device} …")

    def trial(task: Task, method: Competitor, rate: float, steps: int, seed: int) -> Trial:
        key = (task.net, task.data, steps, method.name, rate, seed)
        if key not in done:
            done[key] = run_trial(task, method, rate, steps, seed)
            if records is not None:
                with records.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(done[key])) + "\n")
        found.append(done[key])
        return done[key]

    for net, data in tasks or TASKS[scale]:
        task = make_task(net, data, data_dir, device)
        for steps in budgets or BUDGETS[scale]:
            for method in methods or competitors():
                swept = [trial(task, method, rate, steps, 0) for rate in (*method.rates, *method.wide)]
                best = max(swept[: len(method.rates)], key=lambda t: t.validation).rate
                rate = best if method.default is None else method.default
                for seed in range(1, seeds or SEEDS[scale]):
                    trial(task, method, rate, steps, seed)
                tell(f"{net} on {data}, {steps} steps: {method.name} done")
    return found


def read_trials(records: Path) -> list[Trial]:
    """The runs in a file of JSON lines; none if there is no such file."""
    if not records.exists():
        return []
    try:
        return [Trial(**json.loads(line)) for line in records.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (ValueError, TypeError) as error:
        raise InputError(f"{records} is not a file of optimizer runs: {error}") from error


def lines(trials: Iterable[Trial], methods: Sequence[Competitor] | None = None) -> list[Line]:
    """One line for each task, budget and method."""
    by_name = {method.name: method for method in methods or competitors(soap=True)}
    grouped: dict[tuple[str, str, int, str], list[Trial]] = {}
    for trial in trials:
        grouped.setdefault((trial.net, trial.data, trial.steps, trial.method), []).append(trial)
    found = [_line(group, by_name[key[3]]) for key, group in grouped.items() if key[3] in by_name]
    return [line for line in found if line is not None]


def _line(trials: Sequence[Trial], method: Competitor) -> Line | None:
    """The line of one method; None where the rate that counts has not run yet."""
    swept = [t for t in trials if t.seed == 0 and t.rate in method.rates]
    rate = method.default
    if rate is None and swept:
        rate = max(swept, key=lambda t: t.validation).rate
    scores = [t.test for t in trials if t.rate == rate]
    if rate is None or not scores or not swept:
        return None
    over_rates = [t.validation for t in swept]
    first = trials[0]
    return Line(
        net=first.net,
        data=first.data,
        steps=first.steps,
        method=method.name,
        rate=rate,
        seeds=len(scores),
        score=statistics.fmean(scores),
        error=statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan,
        median=statistics.median(over_rates),
        spread=max(over_rates) - min(over_rates),
        milliseconds=1e3 * statistics.median(t.seconds / t.steps for t in trials),
    )
