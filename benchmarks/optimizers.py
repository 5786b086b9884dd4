"""FreeMuon against peers at the rate that a validation split chose, from a few steps to thousands."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.optimizer_peers import Competitor, competitors
from benchmarks.optimizer_tasks import TASKS, Task, make_task
from benchmarks.timing import synchronize
from benchmarks.training import train
from gramscope.errors import InputError, NumericalError

#: steps of a run and its seeds, by scale
BUDGETS = {
    "quick": {10: 2, 30: 2, 100: 2},
    "full": {10: 12, 30: 12, 100: 3, 300: 3, 1_000: 3, 3_000: 3},
}
#: in runs of up to this many steps all seeds try all rates; in longer ones only the first seed does
CHEAP = 300


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
        median, spread: of the validation scores over the grid of rates: median, largest minus least. The score at a rate is a
            mean over the seeds that tried every rate. NaN where rates are missing.
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


def run_trial(task: Task, method: Competitor, rate: float, steps: int, seed: int) -> Trial:
    """Train a net for a number of steps while all rates fall linearly to 0. A run that fails scores as a constant guess."""
    generator = torch.Generator().manual_seed(seed)
    net = task.build(generator)
    start = time.perf_counter()
    failed = False
    try:
        for _ in train(net, method.make(net, rate), task.loss, task.train, task.batch, steps, generator, steps):
            pass
    except NumericalError:
        failed = True
    synchronize(task.train[0].device)
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

    All rates of a method run with all seeds; in runs of more than 300 steps with the first one, and the rate that counts
    (FreeMuon's default, or the best on validation) with the others too.

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
            count = seeds or BUDGETS[scale].get(steps, 3)
            trying = count if steps <= CHEAP else 1
            for method in methods or competitors():
                swept = [trial(task, method, rate, steps, seed) for rate in method.rates for seed in range(trying)]
                rate = rate_that_counts(method, validation_means(swept, method.rates))
                for seed in range(trying, count):
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


def validation_means(trials: Iterable[Trial], rates: Iterable[float]) -> dict[float, float]:
    """The validation score at each rate that ran, a mean over the seeds that all of them have."""
    found: dict[float, dict[int, float]] = {}
    for trial in trials:
        if trial.rate in rates:
            found.setdefault(trial.rate, {})[trial.seed] = trial.validation
    shared = set.intersection(*map(set, found.values())) if found else set()
    return {rate: statistics.fmean(scores[seed] for seed in shared) for rate, scores in found.items() if shared}


def rate_that_counts(method: Competitor, means: Mapping[float, float]) -> float:
    """The method's default rate, or the one that is best on validation."""
    return max(means, key=lambda rate: means[rate]) if method.default is None else method.default


def _line(trials: Sequence[Trial], method: Competitor) -> Line | None:
    """The line of one method; None where the rate that counts has not run yet."""
    means = validation_means(trials, method.rates)
    if not means:
        return None
    rate = rate_that_counts(method, means)
    scores = [t.test for t in trials if t.rate == rate]
    if not scores:
        return None
    first = trials[0]
    whole = len(means) == len(method.rates)
    return Line(
        net=first.net,
        data=first.data,
        steps=first.steps,
        method=method.name,
        rate=rate,
        seeds=len(scores),
        score=statistics.fmean(scores),
        error=statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan,
        median=statistics.median(means.values()) if whole else math.nan,
        spread=max(means.values()) - min(means.values()) if whole else math.nan,
        milliseconds=1e3 * statistics.median(t.seconds / t.steps for t in trials),
    )
