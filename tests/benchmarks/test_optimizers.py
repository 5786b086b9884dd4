"""The comparison of optimizers: what it trains, how it chooses rates, what it prints."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Muon

from benchmarks import optimizers
from benchmarks.optimizer_output import draw, rate_table, score_table
from benchmarks.optimizer_peers import Competitor, KernelMuon, competitors
from benchmarks.optimizer_tasks import NETS, CharacterGPT, make_task
from benchmarks.optimizers import Trial, compare_optimizers, lines, read_trials
from gramscope.optim.free_muon import FreeMuon
from refusals import assert_refused


def trial(method: str, rate: float, seed: int, validation: float, test: float) -> Trial:
    return Trial("mlp", "digits", 10, method, rate, seed, validation, test, 0.1)


def test_validation_chooses_the_rate_and_the_test_scores_of_all_seeds_count():
    grid = Competitor("peer", (0.1, 1.0), lambda net, rate: [])
    trials = [
        trial("peer", 0.1, 0, 50.0, 90.0),
        trial("peer", 1.0, 0, 60.0, 40.0),
        trial("peer", 1.0, 1, 70.0, 44.0),
    ]
    (line,) = lines(trials, [grid])
    assert (line.rate, line.seeds, line.score) == (1.0, 2, 42.0)
    assert line.error == pytest.approx(2.0)
    assert (line.median, line.spread) == (55.0, 10.0)
    assert line.milliseconds == pytest.approx(10.0)


def test_rates_are_compared_over_the_seeds_that_all_of_them_ran_with():
    grid = Competitor("peer", (0.1, 1.0), lambda net, rate: [])
    runs = ((0.1, 0, 50.0), (0.1, 1, 80.0), (1.0, 0, 60.0), (1.0, 1, 66.0), (1.0, 2, 99.0))
    (line,) = lines([trial("peer", rate, seed, score, score) for rate, seed, score in runs], [grid])
    assert (line.rate, line.seeds, line.score) == (0.1, 2, 65.0)
    assert (line.median, line.spread) == (64.0, 2.0)


def test_in_long_runs_only_the_first_seed_tries_all_rates(monkeypatch: pytest.MonkeyPatch):
    method = Competitor("SGD", (0.01, 0.1), lambda net, rate: [SGD(net.parameters(), lr=rate)])
    monkeypatch.setattr(optimizers, "CHEAP", 4)
    ask = {"tasks": [("mlp", "digits")], "budgets": (4, 5), "seeds": 3, "methods": [method]}
    found = Counter((t.steps, t.rate) for t in compare_optimizers(**ask))
    assert found[4, 0.01] == found[4, 0.1] == 3
    assert sorted((found[5, 0.01], found[5, 0.1])) == [1, 3]


def test_a_default_rate_counts_whatever_validation_says():
    ours = Competitor("ours", (1.0, 10.0), lambda net, rate: [], 1.0)
    trials = [trial("ours", r, 0, v, v) for r, v in ((1.0, 50.0), (10.0, 60.0))]
    (line,) = lines(trials, [ours])
    assert (line.rate, line.score, line.spread) == (1.0, 50.0, 10.0)
    assert math.isnan(line.error)


def test_the_tables_have_the_best_peer_and_mark_where_ours_is_not_below_it():
    scores = [("FreeMuon", 1.0, 90.0), ("Muon", 0.1, 80.0), ("Muon", 0.3, 84.0), ("SGD, momentum", 0.1, 70.0)]
    trials = [trial(method, rate, seed, value, value + seed) for method, rate, value in scores for seed in (0, 2)]
    grids = {"FreeMuon": (1.0,), "Muon": (0.1, 0.3), "SGD, momentum": (0.1,), "AdamW": (1e-3, 1e-2)}
    trials.append(trial("AdamW", 1e-3, 0, 60.0, 60.0))  # another rate is missing
    found = lines(trials, [Competitor(name, rates, lambda net, rate: []) for name, rates in grids.items()])
    assert score_table(found).splitlines()[2:] == [
        "| mlp, digits | 10 | **91.0 ± 1.0** | 85.0 ± 1.0 (Muon, rate 0.3) | 2 |"
    ]
    assert rate_table(found).splitlines() == [
        "| net, data | steps | FreeMuon | Muon | AdamW | SGD |",
        "| --- | --- | --- | --- | --- | --- |",
        "| mlp, digits | 10 | 90.0 / 0.0 | 82.0 / 4.0 |  | 70.0 / 0.0 |",
    ]
    loss = [
        replace(line, data="text", score=-line.score / 30)
        for line in found
        if line.method in ("FreeMuon", "SGD, momentum")
    ]
    assert score_table(loss).splitlines()[2:] == [
        "| mlp, text | 10 | 3.033 ± 1.000 | 2.367 ± 1.000 (SGD, rate 0.1) | 2 |"
    ]


def test_runs_are_kept_and_not_run_again(tmp_path: Path):
    made = []

    def make(net: nn.Module, rate: float) -> list[SGD]:
        made.append(rate)
        return [SGD(net.parameters(), lr=rate, momentum=0.9)]

    method = Competitor("SGD", (0.01, 0.1), make)
    records = tmp_path / "runs.jsonl"
    ask = {"tasks": [("mlp", "digits")], "budgets": (30,), "seeds": 2, "methods": [method], "records": records}
    first = compare_optimizers(**ask)
    assert len(made) == 4  # two rates, two seeds
    assert compare_optimizers(**ask) == first == read_trials(records)
    assert len(made) == 4
    assert max(t.test for t in first) > 60
    draw(first, tmp_path / "rates.png", [method])
    assert (tmp_path / "rates.png").stat().st_size > 1000


def test_a_diverged_run_scores_as_a_guess():
    broken = Competitor("broken", (1e30,), lambda net, rate: [SGD(net.parameters(), lr=rate)])
    (found,) = compare_optimizers(tasks=[("mlp", "digits")], budgets=(3,), seeds=1, methods=[broken])
    assert found.validation >= 10
    assert found.test < 40


@pytest.mark.parametrize("net", [*NETS, "vit", "gpt"])
def test_every_competitor_lowers_the_loss_of_every_net(net: str):
    task = make_task(net, "text" if net == "gpt" else "digits")
    pair = task.train[0][: task.batch], task.train[1][: task.batch]
    for method in competitors(soap=False):
        model = task.build(torch.Generator().manual_seed(0))
        before = float(task.loss(model, pair).detach())
        optimizers = method.make(model, method.default or method.rates[2])
        for _ in range(10):
            for optimizer in optimizers:
                optimizer.zero_grad()
            task.loss(model, pair).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert float(task.loss(model, pair).detach()) < before, method.name


def test_kernels_are_trained_as_matrices():
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(4, 3, 3, 3))
    matrix = nn.Parameter(kernel.detach().clone().flatten(1))
    kernel.grad = torch.randn_like(kernel)
    matrix.grad = kernel.grad.flatten(1).clone()
    KernelMuon([kernel], 0.1).step()
    Muon([matrix], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach(), rtol=0, atol=0)


def test_the_gpt_does_not_see_the_characters_it_predicts():
    model = CharacterGPT(7, 12, torch.Generator().manual_seed(0))
    x = torch.arange(12).remainder(7)[None]
    other = x.clone()
    other[0, 6:] = 0
    torch.testing.assert_close(model(x)[:, :6], model(other)[:, :6])
    assert not torch.equal(model(x)[:, 6:], model(other)[:, 6:])


def test_what_trains_which_weights_of_the_vit():
    table = FreeMuon(make_task("vit", "digits").build(torch.Generator().manual_seed(0))).summary().splitlines()
    by = {line.split()[0]: "Adam" if " Adam" in line else line.split()[-1] for line in table}
    matrices = ["embed", *(f"blocks.{i}.{x}" for i in (0, 1) for x in ("query", "key", "value", "out", "fc1", "fc2"))]
    assert {name for name, who in by.items() if who == "Muon"} == {f"{name}.weight" for name in matrices}
    assert by["token"] == by["position"] == by["readout.weight"] == by["embed.bias"] == "Adam"


def test_bad_requests_are_named(tmp_path: Path):
    assert_refused("scale='huge'", compare_optimizers, "huge")
    assert_refused("the gpt is for text", make_task, "gpt", "digits")
    assert_refused("net 'rnn' is not known", make_task, "rnn", "digits")
    (tmp_path / "bad").write_text("{}\n")
    assert_refused("not a file of optimizer runs", read_trials, tmp_path / "bad")
