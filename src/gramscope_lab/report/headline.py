"""The first sentences of a report: how the settings compare early in training, and where each of them ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gramscope_lab.report.loaded_runs import Runs
from gramscope_lab.report.measure_texts import readable
from gramscope_lab.report.seed_statistics import Curve, Summary, evaluation_curve
from gramscope_lab.report.tables import main_score, plural, with_spread

#: most settings whose values are all named
NAMED = 4


def headline(runs: Runs) -> str:
    """The outcome in one or two sentences."""
    score = main_score(runs)
    own = sum(run.monitored for run in runs.all)
    source = f"{plural(own, 'run')} of your own training loop, watched by gs.Monitor. " if own else ""
    if score is None:
        claims = runs.records("claim")
        held = sum(claim.get("holds") is True for claim in claims)
        if claims:
            return f"{source}Of {plural(len(claims), 'claim')} {held} {'holds' if held == 1 else 'hold'}."
        return source + f"{plural(len(runs.all) + len(runs.others), 'run')} without evaluations of a net."
    key, more = score
    found = {setting.name: evaluation_curve(setting, key, runs.clock) for setting in runs.settings}
    curves = {name: curve for name, curve in found.items() if curve}
    if len(curves) == 1:
        return source + _course(*next(iter(curves.items())), key, runs.clock)
    return source + _comparison(curves, key, runs.clock, more=more)


def _course(name: str, curve: Curve, key: str, clock: str) -> str:
    """Where one setting begins and ends."""
    first, last = curve.values[0], curve.values[-1]
    seeds = plural(last.count, "seed")
    end = f"{with_spread(last, key)} at {clock} {curve.times[-1]:g} ({seeds})"
    if len(curve.values) == 1:
        return f"{name} has {readable(key)} {end}."
    return f"The {readable(key)} of {name} goes from {_number(first, key)} at {clock} {curve.times[0]:g} to {end}."


def _comparison(curves: Mapping[str, Curve], key: str, clock: str, *, more: bool) -> str:
    """Who is ahead early, and where everybody ends."""
    ends = {name: curve.values[-1] for name, curve in curves.items()}
    times = sorted({curve.times[-1] for curve in curves.values()})
    when = f"{clock} {times[0]:g}" if len(times) == 1 else f"{clock} {times[0]:g} to {times[-1]:g}"
    counts = sorted({value.count for value in ends.values()})
    seeds = plural(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    ranked = _ranked(ends, more)
    text = f"{_early(curves, key, clock, more=more)}t the end ({when}, {seeds}) {_listed(ranked, ends, key)}."
    rivals = [name for name in ranked[1:] if not _apart(ends[ranked[0]], ends[name])]
    if rivals and counts[-1] > 1:
        names = " and ".join(rivals) if len(rivals) < 3 else f"{len(rivals)} others"
        text += f" The spread over seeds of {names} overlaps with that of {ranked[0]}."
    return text


def _early(curves: Mapping[str, Curve], key: str, clock: str, *, more: bool) -> str:
    """An early lead, up to the “a” of “at the end”; only the latter if nobody is clearly ahead.

    The lead is that of the best setting over the next best where all were evaluated; the first one is told that is half
    as large as the largest before the end.
    """
    common = sorted(set.intersection(*(set(curve.steps) for curve in curves.values())) - {0})
    name = readable(key)
    if len(common) < 2:
        return f"{name.capitalize()} a"

    def lead(step: int) -> float:
        best, second, *_ = sorted((curve.by_step[step].mean for curve in curves.values()), reverse=more)
        return abs(best - second)

    largest = max(map(lead, common[:-1]))
    step = next(step for step in common if lead(step) >= largest / 2)
    values = {name: curve.by_step[step] for name, curve in curves.items()}
    leader, *others = _ranked(values, more)
    if any(not _apart(values[leader], values[other]) for other in others):
        return f"{name.capitalize()} a"
    curve = curves[leader]
    time = curve.times[curve.steps.index(step)]
    unit = clock if time == 1 else f"{clock}s"
    rest = _listed(others, values, key)
    return f"{leader} reaches {name} {_number(values[leader], key)} after {time:g} {unit}, where {rest}; a"


def _listed(names: Sequence[str], values: Mapping[str, Summary], key: str) -> str:
    """``vcl has 95 %, sgd 94 %``; of many settings the best and the range of the others."""
    first, *others = names
    text = f"{first} has {_number(values[first], key)}"
    if len(names) <= NAMED:
        return text + "".join(f", {name} {_number(values[name], key)}" for name in others)
    low, high = (_number(values[name], key) for name in (others[-1], others[0]))
    return f"{text}, the other {len(others)} settings {low} to {high}"


def _ranked(values: Mapping[str, Summary], more: bool) -> list[str]:
    """Names by their means, the best first."""
    return sorted(values, key=lambda name: values[name].mean, reverse=more)


def _apart(a: Summary, b: Summary) -> bool:
    """Whether the spreads of two values do not overlap."""
    return a.low > b.high or b.low > a.high


def _number(value: Summary, key: str) -> str:
    return with_spread(Summary(value.mean, None, 1, value.mean, value.mean), key)
