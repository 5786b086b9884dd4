"""FreeMuon against its peers, from a few steps to thousands; what chooses a rate is a validation split."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.optimizer_peers import FACTORS, Competitor, competitors
from benchmarks.optimizer_tasks import TASKS, WORST, Task, make_task
from benchmarks.timing import synchronize
from benchmarks.training import train
from gramscope.errors import InputError, NumericalError

#: steps of a run, by scale
BUDGETS = {"quick": (10, 30, 100), "full": (10, 30, 100, 300, 1_000, 3_000)}
#: in runs of up to this many steps all seeds try all rates; in longer ones only the first seed does
CHEAP = 300
#: rates beyond a grid follow this series
_SERIES = [float(f"{digit}e{power}") for power in range(-7, 3) for digit in (1, 3)]
#: at most so many rates are added to a grid
_ADDED = 4


@dataclass(frozen=True)
class Trial:
    """One net after some steps: what trained it, its scores and the seconds that the steps took."""

    net: str
    data: str
    steps: int
    method: str
    rate: float
    seed: int
    validation: float
    test: float
    seconds: float

    @property
    def cell(self) -> tuple[str, str, int]:
        """Net, data and number of steps."""
        return self.net, self.data, self.steps


@dataclass(frozen=True)
class Line:
    """One method on one task after some steps.

    Attributes:
        rate: that validation chose; None for methods without tuning.
        at_edge: it is the smallest or largest that was tried.
        score, error: mean test score over seeds at that rate, and its standard error.
        seconds: of the steps, the least of all seeds: other programs only add to them.
        tests: seed → test score.
    """

    net: str
    data: str
    steps: int
    method: str
    rate: float | None
    at_edge: bool
    seeds: int
    score: float
    error: float
    seconds: float
    tests: dict[int, float] = field(repr=False)


def run_trial(task: Task, method: Competitor, rate: float, marks: Sequence[int], seed: int) -> list[Trial]:
    """Train a net and score it after each of ``marks`` steps. A run that fails scores as a constant guess from there on.

    Seconds are those of the processor where the net is on the CPU, so that other programs do not count.
    """
    device = task.train[0].device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    generator = torch.Generator().manual_seed(seed)
    net = task.build(generator)
    optimizers = method.make(net, rate)
    falling = max(marks) if method.knows_end else None
    run = train(net, optimizers, task.loss, task.train, task.batch, max(marks), generator, falling)
    found: list[Trial] = []
    seconds, start, failed = 0.0, clock(), False
    for step in range(1, max(marks) + 1):
        try:
            failed = failed or next(run) != step
        except NumericalError:
            failed = True
        if step in marks:
            synchronize(device)
            seconds += clock() - start
            validation = test = WORST[task.target]
            if not failed:
                weights = method.averaged(net, optimizers, task.train) if method.averaged is not None else net
                validation, test = (round(task.score(weights, pair), 5) for pair in (task.validation, task.test))
            found.append(Trial(*task.names, step, method.name, rate, seed, validation, test, round(seconds, 4)))
            start = clock()
    return found


class Records:
    """The runs so far, and the file of JSON lines to which every new one is added at once."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[tuple[str, str, int, str, float, int], Trial] = {}
        whole = b""
        if path is not None and path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]  # the last line is cut off where the program was ended there
            os.truncate(path, len(whole) + 1 if whole else 0)
        try:
            self._keep(Trial(**json.loads(line)) for line in whole.splitlines())
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} is not a file of optimizer runs: {error}") from error

    def _keep(self, trials: Iterable[Trial]) -> list[Trial]:
        new = {(*t.cell, t.method, t.rate, t.seed): t for t in trials}
        new = {key: trial for key, trial in new.items() if key not in self._known}
        self._known |= new
        return list(new.values())

    def add(self, trials: Iterable[Trial]) -> None:
        """Keep and store what is new."""
        new = self._keep(trials)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(trial)) + "\n" for trial in new))

    def run(self, task: Task, method: Competitor, rate: float, marks: Sequence[int], seeds: int) -> None:
        """Run a method up to the first of ``marks``, and to all if it does not know the end, unless that is known."""
        for seed in range(seeds):
            if (*task.names, marks[0], method.name, rate, seed) not in self._known:
                self.add(run_trial(task, method, rate, marks[:1] if method.knows_end else marks, seed))

    def trials(self, method: str | None = None, cell: tuple[str, str, int] | None = None) -> list[Trial]:
        """The runs of a method, or all."""
        return [t for t in self._known.values() if method in (None, t.method) and cell in (None, t.cell)]


def compare_optimizers(
    scale: str = "quick",
    *,
    data_dir: str | None = None,
    device: str = "cpu",
    tasks: Sequence[tuple[str, str]] | None = None,
    budgets: Sequence[int] | None = None,
    seeds: int = 3,
    methods: Sequence[Competitor] | None = None,
    factors: bool = False,
    records: Records | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Trial]:
    """Train every net by every method, the smallest budgets first; what the records hold is not run again.

    All rates of a method run with all seeds; in runs of more than 300 steps with the first one, and the rate that counts with
    the others too. Methods that do not know the end run once, up to the largest budget.

    Args:
        scale: ``"quick"`` on shipped data, or ``"full"``, which reads MNIST and CIFAR-10 from ``data_dir``.
        data_dir: folder with the official files.
        device: where to train.
        tasks, budgets, methods: in place of those of the scale.
        seeds: runs of each method.
        factors: run methods without tuning at 0.1 to 10 times their step length too.
        records: runs so far; new ones are added.
        tell: called with a line of text at the start and after each method.
    """
    if scale not in TASKS:
        raise InputError(f"scale={scale!r}: choose one of {', '.join(TASKS)}")
    records = records if records is not None else Records()
    budgets = sorted(budgets or BUDGETS[scale])
    tell(f"comparing optimizers on {device}, one thread …")
    torch.set_num_threads(1)
    ready = {pair: make_task(*pair, data_dir, device) for pair in dict.fromkeys(tasks or TASKS[scale])}
    for steps, method in itertools.product(budgets, methods or competitors()):
        if method.missing:
            tell(f"{method.name} is left out: pip install {method.missing}")
            continue
        marks = [budget for budget in budgets if budget >= steps]
        trying = seeds if steps <= CHEAP or not method.rates else 1
        for names, task in ready.items():
            rates = list(method.rates) or [1.0, *(f for f in FACTORS if factors and f != 1)]
            for rate in rates:
                records.run(task, method, rate, marks, trying)
            best = 1.0
            while method.rates:
                means = validation_means(records.trials(method.name, (*names, steps)))
                best = max(means, key=lambda rate: means[rate])
                beyond = _beyond(best, rates) if len(rates) < len(method.rates) + _ADDED else None
                if beyond is None:
                    break
                rates.append(beyond)
                records.run(task, method, beyond, marks, trying)
            records.run(task, method, best, marks, seeds)
            tell(f"{names[0]} on {names[1]}, {steps} steps: {method.name} done")
        if method.common_rate:
            rate = common_rate(records.trials(), method, steps)
            for task in ready.values():
                records.run(task, method, rate, marks, seeds)
    return [t for t in records.trials() if (t.net, t.data) in ready and t.steps in budgets]


def _beyond(best: float, rates: Iterable[float]) -> float | None:
    """The rate that follows in the series where the best one is the least or largest of those tried."""
    rates = sorted(rates)
    if best not in _SERIES or best not in (rates[0], rates[-1]):
        return None
    index = _SERIES.index(best) + (1 if best == rates[-1] else -1)
    return _SERIES[index] if 0 <= index < len(_SERIES) else None


def validation_means(trials: Iterable[Trial]) -> dict[float, float]:
    """The validation score at each rate, a mean over the seeds that all of them have."""
    found: dict[float, dict[int, float]] = {}
    for trial in trials:
        found.setdefault(trial.rate, {})[trial.seed] = trial.validation
    shared = set.intersection(*map(set, found.values())) if found else set()
    return {rate: statistics.fmean(scores[seed] for seed in shared) for rate, scores in found.items() if shared}


def common_rate(trials: Iterable[Trial], method: Competitor, steps: int) -> float:
    """The one rate for all tasks: the least mean, over tasks, of the logarithm of the validation error."""
    tasks: dict[tuple[str, str, int], list[Trial]] = {}
    for trial in trials:
        if (trial.method, trial.steps) == (method.name, steps):
            tasks.setdefault(trial.cell, []).append(trial)
    means = [found for found in map(validation_means, tasks.values()) if set(method.rates) <= set(found)]
    shared = set.intersection(*map(set, means)) if means else set(method.rates)
    return min(sorted(shared), key=lambda rate: sum(math.log(_error(scores[rate])) for scores in means))


def _error(score: float) -> float:
    """The loss, or what is missing to 100."""
    return max(-score if score < 0 else 100 - score, 0.1)


def lines(trials: Iterable[Trial], methods: Sequence[Competitor] | None = None) -> list[Line]:
    """One line for each task, budget and method, and one more for methods with one rate for all tasks."""
    methods = methods or competitors()
    trials = list(trials)
    common = {
        (method.name, steps): common_rate(trials, method, steps)
        for method in methods if method.common_rate for steps in {t.steps for t in trials if t.method == method.name}
    }  # fmt: skip
    cells: dict[tuple[str, str, int], dict[str, list[Trial]]] = {}
    for trial in trials:
        cells.setdefault(trial.cell, {}).setdefault(trial.method, []).append(trial)
    found = []
    for own in cells.values():
        for method in (method for method in methods if method.name in own):
            found.append(_line(own[method.name], method, None))
            if method.common_rate:
                found.append(_line(own[method.name], method, common[method.name, own[method.name][0].steps]))
    return [line for line in found if line is not None]


def _line(trials: Sequence[Trial], method: Competitor, rate: float | None) -> Line | None:
    """The line of one method, at the rate that validation chooses unless one is given; None before that rate has run."""
    means: Mapping[float, float] = validation_means(trials)
    name, at_edge = method.name, False
    if rate is not None:
        name += ", one rate"
    elif method.rates:
        rate = max(means, key=lambda r: means[r])
        at_edge = rate in (min(means), max(means))
    runs = [t for t in trials if t.rate == (1.0 if rate is None else rate)]
    if not runs:
        return None
    tests = {t.seed: t.test for t in runs}
    score, error = mean_and_error(list(tests.values()))
    return Line(*runs[0].cell, name, rate, at_edge, len(tests), score, error, min(t.seconds for t in runs), tests)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, NaN for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error
