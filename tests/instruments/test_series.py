"""Series of checkpoints: the numbers of single tables, whatever the weights come in, and no step measured twice."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.errors import InputError, ResultWarning
from gramscope.instruments import series as series_module
from gramscope.instruments.checkpoints import CheckpointError, find_checkpoints, load_weights
from gramscope.measures.plots import plot_series, write_report
from gramscope.measures.series import SeriesStore

LOSS = nn.CrossEntropyLoss()
DATA = (torch.randn(30, 5, generator=torch.Generator().manual_seed(3)), torch.arange(30) % 3)
HOW = {"measures": ["nfa", "weight_norm", "target_linearity"]}


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def table(model: nn.Module) -> gs.Table:
    return gs.measure(model, DATA, LOSS, **HOW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints as .safetensors files, one of them of a wrapped model."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    for step in (0, 10, 200):
        prefix = "module." if step == 10 else ""
        save_file(
            {prefix + name: t for name, t in net(step).state_dict().items()}, tmp_path / f"step{step}.safetensors"
        )
    return tmp_path


def test_tables_are_those_of_the_models(folder: Path) -> None:
    found = gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)
    assert found.steps == [0, 10, 200]
    for step in found.steps:
        assert found.tables[step] == table(net(step))
    assert found["nfa"]["2"][10] == table(net(10))["2"]["nfa"]
    assert found.network("loss")[0] == table(net(0)).network["loss"]


def test_pairs_of_steps_and_models_or_states_give_the_same(folder: Path) -> None:
    one = net()

    def same_model() -> Iterator[tuple[int, nn.Module]]:
        for step in (0, 10, 200):
            one.load_state_dict(net(step).state_dict())
            yield step, one

    expected = gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)
    states = [(step, net(step).state_dict()) for step in (200, 0, 10)]
    assert gs.series(same_model(), DATA, LOSS, measuring=HOW) == expected
    assert gs.series(states, DATA, LOSS, model=net(5), measuring=HOW) == expected


def test_a_stopped_series_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)
    measured: list[int] = []

    def stopping(*args: Any, **options: Any) -> gs.Table:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(1)
        return gs.measure(*args, **options)

    monkeypatch.setattr(series_module, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        gs.series(folder, DATA, LOSS, model=net(), out=tmp_path / "out", measuring=HOW)
    del measured[1:]
    found = gs.series(folder, DATA, LOSS, model=net(), out=tmp_path / "out", measuring=HOW)
    assert len(measured) == 2  # one table was missing
    assert found == whole == gs.Series.load(tmp_path / "out")
    for change in ({"measuring": {"measures": "nc1"}}, {"batches": (DATA[0] + 1, DATA[1])}, {"loss": nn.MSELoss()}):
        given = {"batches": DATA, "loss": LOSS, "measuring": HOW, **change}
        with pytest.raises(InputError, match="give another folder"):
            gs.series(folder, model=net(), out=tmp_path / "out", **given)


def test_checkpoints_that_cannot_be_read_are_skipped_and_equal_ones_named(folder: Path) -> None:
    whole = (folder / "step10.safetensors").read_bytes()
    (folder / "step11.safetensors").write_bytes(whole)
    (folder / "step12.safetensors").write_bytes(whole[: len(whole) // 2])
    torch.save({"0.weight": torch.zeros(2)}, folder / "step13.pt")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({k: v * float("nan") for k, v in net().state_dict().items()}, folder / "step15.safetensors")
    (folder / "step14").mkdir()
    (folder / "step14" / "config.json").write_text("{}")
    index = {"weight_map": {"0.weight": "model-1.safetensors", "2.weight": "model-2.safetensors"}}
    (folder / "step14" / "model.safetensors.index.json").write_text(json.dumps(index))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResultWarning)
        found = gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)
    assert found.steps == [0, 10, 11, 200]
    assert found.equal == {11: 10}
    assert list(found.skipped) == [12, 13, 14, 15]
    assert "output is NaN or infinite" in found.skipped[15]
    assert "is it complete?" in found.skipped[12]
    assert "0 of 4 names match" not in found.skipped[13]
    assert "1 of 4 names match" in found.skipped[13]
    assert "2 of 2 files are missing: model-1.safetensors" in found.skipped[14]
    assert sum("skipped" in str(w.message) for w in caught) == 4


class Ready(Future[Any]):
    """A result that nobody may wait for."""

    def result(self, timeout: float | None = None) -> Any:
        assert self.done()
        return super().result(timeout)


def test_tables_of_processes_are_stored_in_the_order_in_which_they_are_ready(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[tuple[Ready, Any]] = []

    class LastFirst(Executor):
        def submit(self, fn: Any, /, *args: Any, **options: Any) -> Any:
            future = Ready()
            tasks.append((future, lambda: fn(*args)))
            if len(tasks) == 3:
                end()
            return future

    def end() -> None:
        future, work = tasks.pop()
        future.set_result(work())

    write = SeriesStore.write

    def write_and_end_another(*args: Any) -> None:
        write(*args)
        if tasks:
            end()

    monkeypatch.setattr(SeriesStore, "write", write_and_end_another)
    found = gs.series(folder, DATA, LOSS, model=net(), executor=LastFirst(), out=tmp_path / "out", measuring=HOW)
    assert found == gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)


def test_weights_of_another_shape_leave_the_model_as_it_was() -> None:
    model, before = net(), net().state_dict()
    state = {**net(1).state_dict(), "2.bias": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"2\.bias has shape \(4,\), the model's \(3,\)"):
        load_weights(model, state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_paths_may_be_measured_at_the_same_time(folder: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        found = gs.series(folder, DATA, LOSS, model=net(), executor=executor, measuring=HOW)
    assert found == gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)
    with ThreadPoolExecutor(1) as executor, pytest.raises(InputError, match="cannot share a model"):
        gs.series([(0, net())], DATA, LOSS, executor=executor)


def test_folders_of_transformers_need_no_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 13,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    words = torch.randint(3, 13, (6, 5), generator=torch.Generator().manual_seed(0))
    models = {}
    for step in (100, 20):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            models[step] = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
        models[step].save_pretrained(tmp_path / f"checkpoint-{step}")
    data = {"input_ids": words, "labels": words}
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, "n_head": 4}))
    other.save_pretrained(tmp_path / "checkpoint-50")
    (tmp_path / "checkpoint-10").mkdir()  # the first one is damaged
    (tmp_path / "checkpoint-10" / "config.json").write_text((tmp_path / "checkpoint-20" / "config.json").read_text())
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"12345678901234567890")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResultWarning)
        found = gs.series(tmp_path, data, measuring={"measures": ["nfa"]})
    assert found.steps == [20, 100]
    assert "is it complete?" in found.skipped[10]
    assert "another architecture: n_head 4, not 2" in found.skipped[50]
    for step in found.steps:
        assert found.tables[step].rows == gs.measure(models[step], data, measures=["nfa"]).rows


@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_files_give_back_what_was_saved(folder: Path, tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    found = gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)
    found.save(tmp_path / f"a.{ending}")
    assert gs.Series.load(tmp_path / f"a.{ending}") == found


def test_a_map_and_a_page_show_every_step(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    pytest.importorskip("plotly")
    found = gs.series(folder, DATA, LOSS, model=net(), measuring=HOW)
    figure = plot_series(found, "nfa")
    assert figure.axes[0].images[0].get_array().shape == (2, 3)
    write_report(found, tmp_path / "page.html", "Three <steps>")
    page = (tmp_path / "page.html").read_text()
    assert "Three &lt;steps&gt;" in page
    assert "src=" not in page.split("<script")[0]
    with pytest.raises(InputError, match="did you mean 'nfa'"):
        plot_series(found, "nfaa")
    missing = gs.Series({0: gs.Table({"fc": {"nfa": None, "nc1": 1.0}})})
    with pytest.raises(InputError, match="nfa has no value at any step"):
        missing.plot("nfa")
    missing.report(tmp_path / "page.html")
    assert '"label":"nfa"' not in (tmp_path / "page.html").read_text()
    with pytest.raises(InputError, match="nothing was recorded yet"):
        gs.Series().report(tmp_path / "page.html")


def test_maps_have_kinds_below_each_other_and_colours_that_one_layer_does_not_set() -> None:
    pytest.importorskip("matplotlib").use("agg")
    names = ["wte", *(f"h.{i}.{kind}" for i in range(2) for kind in ("q", "fc")), "head"]
    figure = gs.Series({0: gs.Table({name: {"nfa": float(i)} for i, name in enumerate(names)})}).plot("nfa")
    shown = figure.axes[0].images[0]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "wte",
        "q 0",
        "q 1",
        "fc 0",
        "fc 1",
        "head",
    ]
    assert shown.get_array().ravel().tolist() == [0, 1, 3, 2, 4, 5]
    assert shown.get_clim() == (1, 4)


def test_two_checkpoints_of_one_step_are_an_error(folder: Path) -> None:
    torch.save(net().state_dict(), folder / "model_10.pt")
    with pytest.raises(InputError, match="both of step 10"):
        find_checkpoints(folder)
