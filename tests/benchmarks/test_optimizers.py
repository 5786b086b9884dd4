"""The comparison of optimizers: what it trains, how it chooses rates, what it stores and prints."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Muon

from benchmarks import optimizers
from benchmarks.__main__ import main
from benchmarks.optimizer_output import draw, report
from benchmarks.optimizer_peers import (
    ITSELF,
    OURS,
    Competitor,
    KernelMuon,
    LinearFreeMuon,
    competitors,
)
from benchmarks.optimizer_tasks import TASKS, CharacterGPT, CharacterGRU, make_task
from benchmarks.optimizers import (
    Records,
    Trial,
    common_rate,
    compare_optimizers,
    lines,
    run_trial,
)
from refusals import assert_refused

DIGITS = ("mlp", "digits")


def sgd(net: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    return [SGD(net.parameters(), lr=rate, momentum=0.9)]


def trial(
    method: str, rate: float, seed: int, validation: float, test: float, task: tuple[str, str, int] = (*DIGITS, 10)
) -> Trial:
    return Trial(*task, method, rate, seed, validation, test, 0.1)


def test_validation_chooses_the_rate_and_the_test_scores_of_all_seeds_count() -> None:
    grid = Competitor("peer", sgd, (0.1, 1.0))
    runs = [(0.1, 0, 50.0, 90.0), (1.0, 0, 60.0, 40.0), (1.0, 1, 70.0, 44.0)]
    (line,) = lines([trial("peer", *run) for run in runs], [grid])
    assert (line.rate, line.seeds, line.score) == (1.0, 2, 42.0)
    assert line.error == pytest.approx(2.0)
    assert line.at_edge


def test_rates_are_compared_over_the_seeds_that_all_of_them_ran_with() -> None:
    grid = Competitor("peer", sgd, (0.1, 1.0))
    runs = ((0.1, 0, 50.0), (0.1, 1, 80.0), (1.0, 0, 60.0), (1.0, 1, 66.0), (1.0, 2, 99.0))
    (line,) = lines([trial("peer", rate, seed, score, score) for rate, seed, score in runs], [grid])
    assert (line.rate, line.seeds, line.score) == (0.1, 2, 65.0)


def test_methods_without_tuning_count_at_factor_one() -> None:
    ours = Competitor("ours", sgd)
    (line,) = lines([trial("ours", rate, 0, v, v) for rate, v in ((1.0, 50.0), (10.0, 60.0))], [ours])
    assert (line.rate, line.score, line.at_edge) == (None, 50.0, False)
    assert math.isnan(line.error)


def test_the_common_rate_is_best_over_all_tasks() -> None:
    grid = Competitor("peer", sgd, (0.1, 1.0), common_rate=True)
    text = ("gpt", "text", 10)
    trials = [trial("peer", 0.1, 0, 98.0, 98.0), trial("peer", 1.0, 0, 99.0, 99.0)]  # half of the error at 1
    trials += [trial("peer", 0.1, 0, -1.0, -1.0, text), trial("peer", 1.0, 0, -3.0, -3.0, text)]  # three times the loss
    trials.append(trial("peer", 0.3, 0, -0.1, -0.1, text))  # ran on one task alone
    assert common_rate(trials, grid, 10) == 0.1
    found = {(line.method, line.net): line.rate for line in lines(trials, [grid])}
    assert found["peer", "mlp"] == 1.0
    assert found["peer, one rate", "mlp"] == found["peer, one rate", "gpt"] == 0.1


def test_a_grid_grows_while_its_edge_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(task: object, method: Competitor, rate: float, marks: list[int], seed: int) -> list[Trial]:
        distance = abs(math.log10(rate / 3))  # best at 3
        return [trial(method.name, rate, seed, 90 - distance, 90.0, (*DIGITS, marks[0]))]

    monkeypatch.setattr(optimizers, "run_trial", score)
    grid = Competitor("peer", sgd, (0.01, 0.03, 0.1))
    found = compare_optimizers(tasks=[DIGITS], budgets=(10,), seeds=1, methods=[grid])
    assert sorted(t.rate for t in found) == [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
    (line,) = lines(found, [grid])
    assert (line.rate, line.at_edge) == (3.0, False)
    assert "Warning" not in report(found, [grid])
    cut = [t for t in found if t.rate < 10]
    assert "Warning: the best rate is the least or largest that was tried: peer on mlp" in report(cut, [grid])


def test_in_long_runs_only_the_first_seed_tries_all_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Competitor("SGD", sgd, (0.003, 0.01, 0.03, 0.1))
    monkeypatch.setattr(optimizers, "CHEAP", 4)
    monkeypatch.setattr(optimizers, "_ADDED", 0)
    ask = {"tasks": [DIGITS], "budgets": (4, 5), "seeds": 3, "methods": [method]}
    found = Counter((t.steps, t.rate) for t in compare_optimizers(**ask))
    assert [found[4, rate] for rate in method.rates] == [3, 3, 3, 3]
    assert sorted(found[5, rate] for rate in method.rates) == [1, 1, 1, 3]


def test_methods_that_do_not_know_the_end_run_once_for_all_budgets() -> None:
    made = []

    def make(net: nn.Module, factor: float) -> list[torch.optim.Optimizer]:
        made.append(factor)
        return sgd(net, 0.1 * factor)

    free = Competitor("free", make, knows_end=False)
    found = compare_optimizers(tasks=[DIGITS], budgets=(20, 5), seeds=2, methods=[free])
    assert made == [1.0, 1.0]
    assert [(t.steps, t.seed) for t in found] == [(5, 0), (20, 0), (5, 1), (20, 1)]
    (alone,) = run_trial(make_task(*DIGITS), free, 1.0, [5], 0)
    assert alone.test == found[0].test
    assert alone.seconds > 0


def test_runs_are_kept_and_a_stopped_comparison_goes_on(tmp_path: Path) -> None:
    made = []

    def make(net: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
        made.append(rate)
        return sgd(net, rate)

    method = Competitor("SGD", make, (0.02, 0.2))
    path = tmp_path / "runs.jsonl"
    ask = {"tasks": [DIGITS], "budgets": (30,), "seeds": 2, "methods": [method]}
    first = compare_optimizers(records=Records(path), **ask)
    assert len(made) == 4  # two rates, two seeds
    assert compare_optimizers(records=Records(path), **ask) == first
    assert len(made) == 4
    whole = path.read_text()
    path.write_text(whole[:-20])  # stopped while the last run was written
    assert compare_optimizers(records=Records(path), **ask)[:3] == first[:3]
    assert len(made) == 5
    assert len(path.read_text().splitlines()) == 4
    assert max(t.test for t in first) > 60
    draw(first, tmp_path / "scores.png", [method])
    assert (tmp_path / "scores.png").stat().st_size > 1000


def test_stored_runs_are_printed_without_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    Records(path).add([trial(name, 1.0, seed, 50.0, 50.0 + seed) for name in (OURS, ITSELF) for seed in (0, 1)])
    assert main(["optimizers", "--print", "--records", str(path)]) == 0
    assert "As good in 1 of 1 cells." in capsys.readouterr().out


def test_the_report_has_differences_peers_sensitivity_and_time() -> None:
    tuned = Competitor("tuned", sgd, (0.1, 0.3, 1.0))
    methods = [Competitor(OURS, sgd), Competitor(ITSELF, sgd), Competitor("free", sgd), tuned]
    runs = [(OURS, 1.0, 90.0), (ITSELF, 1.0, 91.0), ("free", 1.0, 95.0), ("tuned", 0.1, 60.0), ("tuned", 0.3, 70.0)]
    runs += [("tuned", 1.0, 65.0), (OURS, 0.1, 30.0), (OURS, 0.3, 35.0), (OURS, 3.0, 45.0)]
    runs += [(OURS, 10.0, 40.0)]
    trials = [trial(name, rate, seed, value, value + seed) for name, rate, value in runs for seed in (0, 2)]
    text = report(trials, methods)
    assert "| mlp, digits | 10 | 91.0 | 92.0 | −1.0 ± 0.0 | **no** |" in text
    assert "FreeMuon is best in 0 of 1 cells.\n\n| net, data | steps | FreeMuon | free |" in text
    assert "| mlp, digits | 10 | 91.0 ± 1.0 | **96.0 ± 1.0** |" in text
    assert "| mlp, digits | 10 | **91.0 ± 1.0** | 71.0 ± 1.0 (0.3) |" in text
    assert "| mlp, digits | 10 | FreeMuon | 30.0 | 35.0 | 90.0 | 45.0 | 40.0 |" in text
    assert "| mlp, digits | 10.0 | 10.0 | 10.0 |" in text  # milliseconds
    alone = [t for t in trials if t.seed == 0]
    assert "| mlp, digits | 10 | 90.0 | 91.0 | −1.0 | **no** |" in report(alone, methods)
    loss = [replace(t, net="gpt", data="text", validation=-t.validation, test=-t.test) for t in trials]
    assert "| gpt, text | 10 | 91.000 | 92.000 | +1.000 ± 0.000 | yes |" in report(loss, methods)


@pytest.mark.parametrize("difference", [-0.31, -0.29])
def test_a_difference_of_less_than_the_goal_counts_as_equal(difference: float) -> None:
    both = [Competitor(OURS, sgd), Competitor(ITSELF, sgd)]
    trials = [
        trial(name, 1.0, seed, 0.0, 50 + seed + extra)
        for name, extra in ((OURS, difference), (ITSELF, 0.0))
        for seed in (0, 1)
    ]
    assert ("As good in 1 of 1" in report(trials, both)) == (difference > -0.3)


def test_a_diverged_run_scores_as_a_guess() -> None:
    broken = Competitor("broken", lambda net, rate: sgd(net, 1e30))
    (found,) = compare_optimizers(tasks=[DIGITS], budgets=(3,), seeds=1, methods=[broken])
    assert 10 <= found.validation < 40
    (found,) = compare_optimizers(tasks=[("mlp", "multi-index")], budgets=(3,), seeds=1, methods=[broken])
    assert (found.validation, found.test) == (0.0, 0.0)


@pytest.mark.parametrize(("net", "data"), [(net, "digits" if data in ("mnist", "cifar10") else data)
                                           for net, data in dict(TASKS["full"]).items()])  # fmt: skip
def test_every_competitor_lowers_the_loss_of_every_net(net: str, data: str) -> None:
    task = make_task(net, data)
    pair = task.train[0][: task.batch], task.train[1][: task.batch]
    for method in (m for m in competitors() if not m.missing and m.name not in ("LDoG, averaged", "DAdaptAdam")):
        model = task.build(torch.Generator().manual_seed(0))
        before = float(task.loss(model, pair).detach())
        chosen = method.make(model, method.rates[2] if method.rates else 1.0)
        for _ in range(10):
            for optimizer in chosen:
                optimizer.zero_grad()
            task.loss(model, pair).backward()
            for optimizer in chosen:
                optimizer.step()
        weights = model if method.averaged is None else method.averaged(model, chosen, task.train)
        assert float(task.loss(weights, pair).detach()) < before, method.name


def test_a_missing_package_is_named() -> None:
    told: list[str] = []
    absent = Competitor("absent", sgd, package=("some-package", "no_such_module"))
    assert compare_optimizers(tasks=[DIGITS], budgets=(3,), methods=[absent], tell=told.append) == []
    assert "absent is left out: pip install some-package" in told


def test_the_form_with_a_known_end_takes_muons_steps() -> None:
    """Twelve lines of Muon: rate min(0.18, 0.5/√n), β = min(0.95, n/(n+20)), decay 0.2 (1 − f)."""
    from gramscope.optim.orthogonalise import orthogonalised

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)).double()
    W, mean = net[0].weight.detach().clone(), torch.zeros(8, 6, dtype=torch.float64)
    optimizer = LinearFreeMuon(net)
    for n in range(1, 31):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        D, beta, f = net[0].weight.grad, min(0.95, n / (n + 20)), min(1, 25 / 9 / math.sqrt(n))
        mean = beta * mean + (1 - beta) * D
        O = orthogonalised(beta * mean + (1 - beta) * D)
        W = (1 - 0.18 * f * 0.2 * (1 - f)) * W - 0.18 * f * math.sqrt(8 / 6) * O
        optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), W)


def test_kernels_are_trained_as_matrices() -> None:
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(4, 3, 3, 3))
    matrix = nn.Parameter(kernel.detach().clone().flatten(1))
    kernel.grad = torch.randn_like(kernel)
    matrix.grad = kernel.grad.flatten(1).clone()
    KernelMuon([kernel], 0.1).step()
    Muon([matrix], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt", "gru"])
def test_nets_of_text_do_not_see_the_characters_they_predict(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = CharacterGPT(7, 12, generator) if kind == "gpt" else CharacterGRU(7, generator)
    x = torch.arange(12).remainder(7)[None]
    other = x.clone()
    other[0, 6:] = 0
    torch.testing.assert_close(model(x)[:, :6], model(other)[:, :6])
    assert not torch.equal(model(x)[:, 6:], model(other)[:, 6:])


def test_scores_of_values_are_shares_of_the_variance() -> None:
    task = make_task("deep mlp", "multi-index")
    pair = task.test
    assert task.score(nn.Flatten(), (pair[1], pair[1])) == pytest.approx(100)
    half = pair[1].mean() + 0.5 * (pair[1] - pair[1].mean())
    assert task.score(nn.Flatten(), (half, pair[1])) == pytest.approx(75, abs=0.1)


def test_bad_requests_are_named(tmp_path: Path) -> None:
    assert_refused("scale='huge'", compare_optimizers, "huge")
    assert_refused("gpt and gru are for text", make_task, "gpt", "digits")
    assert_refused("choose mlp or deep mlp", make_task, "cnn", "multi-index")
    assert_refused("net 'rnn' is not known", make_task, "rnn", "digits")
    (tmp_path / "bad").write_text("{}\n")
    assert_refused("not a file of optimizer runs", Records, tmp_path / "bad")
