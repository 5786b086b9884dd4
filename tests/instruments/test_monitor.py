from __future__ import annotations

import copy
import json
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramscope as gs
from cases import BY_NAME, Around, normal, refused, train
from gramscope.errors import InputError, NumericalError
from gramscope.instruments.monitor import geometric
from gramscope.measures.table import format_value


def data(n: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(n, 5)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def test_records_equal_measure_and_training_is_undisturbed() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    twin = copy.deepcopy(model)
    x, y = data()
    rng = torch.get_rng_state()
    monitor = gs.Monitor(
        model, (x, y), nn.CrossEntropyLoss(), every=3, measures=["nfa_centered", "target_linearity", "nfa"]
    )
    start = copy.deepcopy(model)
    train(model, x, y, 7, monitor)
    train(twin, x, y, 7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert [r["step"] for r in monitor.records] == [0, 3, 6]
    record = monitor.record()
    table = gs.measure(model, (x, y), reference=start, measures=["nfa_centered", "target_linearity", "nfa"])
    assert record["layers"] == table.to_dict()["layers"]
    assert record["step"] == 7
    assert json.loads(json.dumps(monitor.records)) == monitor.records
    assert monitor.series["nfa"]["0"] == {r["step"]: r["layers"]["0"]["nfa"] for r in monitor.records}
    assert monitor.series["nfa_centered"]["0"][0] is None
    refused(monitor.series.__getitem__, "nc1", match="no measure 'nc1'; there are: nfa")


def test_default_cadence_and_measures() -> None:
    assert sum(geometric(step) for step in range(20 * 782 + 1)) >= 30
    assert sum(geometric(step) for step in range(782 + 1)) >= 20
    model, _, _ = BY_NAME["mlp"].make()
    x, y = data()
    monitor = gs.Monitor(model, (x, y), nn.CrossEntropyLoss())
    train(model, x, y, 20, monitor)
    assert [r["step"] for r in monitor.records] == [0, 1, 2, 3, 4, 6, 9, 13, 18]
    assert all(value is not None for row in monitor.records[-1]["layers"].values() for value in row.values())
    assert monitor.records[-1]["network"]["accuracy"] > monitor.records[0]["network"]["accuracy"]
    without = gs.Monitor(model, (x, y))
    assert "loss" not in without.records[0]["network"]


def test_held_sample_comes_from_loaders_data_sets_and_tensors() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x, y = data()
    expected = gs.Monitor(model, (x[:20], y[:20]), samples=20).records
    rng = torch.get_rng_state()
    for source in (
        DataLoader(TensorDataset(x, y), batch_size=7),
        TensorDataset(x, y),
        (x, y),
        [(x[:15], y[:15]), (x[15:], y[15:])],
    ):
        records = gs.Monitor(model, source, samples=20).records
        for layer, row in records[0]["layers"].items():
            assert row == pytest.approx(expected[0]["layers"][layer])
        assert records[0]["network"]["samples"] == 20
    gs.Monitor(model, DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True), samples=20)
    assert torch.equal(rng, torch.get_rng_state())
    kept = x.clone()
    monitor = gs.Monitor(model, (x, y), samples=20)
    x.zero_()
    assert monitor.record()["layers"] == monitor.records[0]["layers"]
    assert kept.any()


def test_state_continues() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x, y = data()
    monitor = gs.Monitor(model, (x, y), every=2)
    train(model, x, y, 3, monitor)
    resumed = gs.Monitor(model, (x, y), every=2)
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    for m in (monitor, resumed):
        m.step()
    assert resumed.records == monitor.records
    assert resumed.records[-1]["step"] == 4


def test_bad_arguments() -> None:
    model, x, y = BY_NAME["mlp"].make()
    refused(gs.Monitor, model, (x, y), samples=1, match="samples=1")
    refused(gs.Monitor, model, (x, y), reference="start", match="reference='start'")
    refused(gs.Monitor, model, [], match="yielded no batch")
    refused(gs.Monitor, model, (x, y), measures="tl", match="no measure 'tl'")
    for every in ("epoch", 2.5, 0, -1, "2 epochs", True):
        with pytest.raises(
            InputError, match=r"every=.*: give a positive whole number of steps.*once an epoch with every=1"
        ):
            gs.Monitor(model, (x, y), every=every)  # type: ignore[arg-type]
    refused(gs.Monitor, model, (x, y), log="runs", match="log='runs' is a str; give a function")
    refused(gs.Monitor, model, (x, y), samples=2.5, match="samples=2.5")


def test_a_run_that_diverges_goes_on() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x, y = data()
    seen: list[tuple[int, dict[str, Any]]] = []
    monitor = gs.Monitor(
        model, (x, y), nn.CrossEntropyLoss(), every=1, measures=["weight_norm", "nfa", "target_linearity"],
        log=lambda step, record: seen.append((step, record)),
    )  # fmt: skip
    with torch.no_grad():
        model[2].weight.fill_(float("nan"))
    record = monitor.step()
    assert record == {
        "step": 1,
        "layers": {},
        "network": {},
        "notes": {"(model)": "the model's output is NaN or infinite in batch 0; look at its inputs and weights"},
    }
    assert seen == [(0, monitor.records[0]), (1, record)]
    assert list(monitor.series["nfa"]["0"]) == [0]
    refused(gs.Monitor, model, (x, y), match="output is NaN", error=NumericalError)


def test_a_diverged_run_with_a_writer(tmp_path: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model, _, _ = BY_NAME["mlp"].make()
    with SummaryWriter(str(tmp_path)) as writer:
        monitor = gs.Monitor(model, data(), nn.CrossEntropyLoss(), every=1, log=writer)
        with torch.no_grad():
            model[0].weight.fill_(float("inf"))
        assert monitor.step()["layers"] == {}


def test_mappings_and_notes_in_records() -> None:
    x, y = data(12)
    named = Around(lambda m, pixels: m.head(pixels), head=nn.Linear(5, 3))
    monitor = gs.Monitor(named, [UserDict({"pixels": x, "labels": y})], measures=["target_linearity"], samples=4)
    assert monitor.records[0]["network"]["samples"] == 4
    assert "near 1 for any target: 4 samples" in monitor.records[0]["notes"]["head.target_linearity"]


def test_a_resumed_monitor_compares_with_the_first_initial_weights() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x, y = data()
    start = copy.deepcopy(model)
    first = gs.Monitor(model, (x, y), measures=["weight_change"], every=2)
    train(model, x, y, 2, first)
    state = first.state_dict()
    resumed = copy.deepcopy(model)
    second = gs.Monitor(resumed, (x, y), measures=["weight_change"], every=2)
    second.load_state_dict(state)
    train(resumed, x, y, 2, second)
    assert [record["step"] for record in second.records] == [0, 2, 4]
    expected = gs.measure(resumed, (x, y), measures=["weight_change"], reference=start)
    assert second.records[-1]["layers"] == expected.to_dict()["layers"]
    assert "initial" not in gs.Monitor(model, (x, y)).state_dict()  # no copy where nothing is compared


def test_other_samples_can_be_held() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x, y = data()
    monitor = gs.Monitor(model, (x, y), measures=["surrogate"], samples=20)
    monitor.hold((x[20:], y[20:]))
    assert monitor.record()["layers"] == gs.measure(model, (x[20:], y[20:]), measures=["surrogate"]).to_dict()["layers"]


def test_printing_a_monitor_says_where_it_is() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    monitor = gs.Monitor(net, (torch.rand(30, 3), torch.arange(30) % 2), every=5, measures=["target_linearity", "nc1"])
    for _ in range(7):
        monitor.step()
    first, *values = repr(monitor).splitlines()
    assert first == "Monitor: 2 tables, 3 layers, 2 measures, steps 0 to 5"
    last = monitor.records[-1]["layers"]
    one, other = last["0"]["target_linearity"], last["4"]["target_linearity"]
    assert values[0] == f"  target_linearity: {format_value(one)} (0) … {format_value(other)} (4) at the last step"
    assert len(values) == 2
    monitor.records.clear()
    assert repr(monitor) == "Monitor: 0 tables, 0 layers, 0 measures"
