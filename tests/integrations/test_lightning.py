"""Lightning's Trainer with our callback and optimizers: records read back from loggers, runs resumed, two processes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramscope as gs
from gramscope.errors import InputError
from refusals import assert_refused

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from gramscope.integrations.lightning import GramscopeCallback  # noqa: E402
from lightning_module import Net, data  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*LeafSpec.*")
X, Y = data()
HELD = (X[:24], Y[:24])
LOSS = nn.CrossEntropyLoss()
MEASURES = ["target_linearity", "gradient_norm", "weight_change"]


def fit(
    net: Any, folder: Path, callbacks: list[Any], ckpt_path: Any = None, batch_size: int = 8, **options: Any
) -> Any:
    settings: dict[str, Any] = {
        "max_epochs": 2, "accelerator": "cpu", "default_root_dir": folder, "logger": CSVLogger(folder), "deterministic": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, **options,
    }  # fmt: skip
    trainer = pl.Trainer(callbacks=callbacks, **settings)
    trainer.fit(net, DataLoader(TensorDataset(X, Y), batch_size=batch_size), ckpt_path=ckpt_path)
    return trainer


def logged(trainer: Any) -> dict[int, dict[str, float]]:
    """What the logger has written, by step."""
    found: dict[int, dict[str, float]] = {}
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            values = {name: float(value) for name, value in row.items() if name.startswith("gramscope") and value}
            found.setdefault(int(row["step"]), {}).update(values)
    return {step: values for step, values in found.items() if values}


def expected(net: nn.Module, start: nn.Module, held: Any = HELD, **options: Any) -> dict[str, float]:
    table = gs.measure(net, held, LOSS, measures=MEASURES, reference=start, **options)
    numbers = {f"gramscope/{name}/{layer}": v for layer, row in table.rows.items() for name, v in row.items()}
    return numbers | {f"gramscope/{name}": table.network[name] for name in ("loss", "accuracy")}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_logger_holds_what_measure_gives(precision: str, tmp_path: Path) -> None:
    """Also with accumulated batches: 16 of them are 8 steps."""
    net, start = Net("sgd"), Net("sgd")
    callback = GramscopeCallback(HELD, LOSS, measures=MEASURES, every_n_steps=4)
    trainer = fit(net, tmp_path, [callback], precision=precision, accumulate_grad_batches=2, batch_size=6)
    assert trainer.global_step == 8
    found = logged(trainer)
    assert list(found) == [0, 4, 8] == [record["step"] for record in callback.records]
    assert found[0] == pytest.approx(expected(start, Net("sgd")), rel=1e-6, abs=1e-9)
    assert found[8] == pytest.approx(expected(net, start), rel=1e-6, abs=1e-9)
    assert found[4] != found[8]
    norms = {
        name.removeprefix("gramscope/gradient_norm/"): x for name, x in found[4].items() if "gradient_norm" in name
    }
    assert {layer: line[4] for layer, line in callback.series["gradient_norm"].items()} == pytest.approx(norms)
    assert float(trainer.callback_metrics["gramscope/loss"]) == pytest.approx(found[8]["gramscope/loss"], rel=1e-6)


def test_training_batches_as_they_pass(tmp_path: Path) -> None:
    net, start = Net("sgd"), Net("sgd")
    callback = GramscopeCallback(None, LOSS, measures=MEASURES, every_n_epochs=1, module="net")
    trainer = fit(net, tmp_path, [callback])
    found = logged(trainer)
    assert list(found) == [0, 6, 12]
    last = (X[40:], Y[40:])
    assert found[12] == pytest.approx(expected(net.net, start.net, last), rel=1e-6, abs=1e-9)
    fit(Net("sgd"), tmp_path, [callback], max_epochs=1)  # used again, it begins anew
    assert [record["step"] for record in callback.records] == [0, 6]
    assert callback._batch is None


def test_a_compiled_module_is_measured_and_trains_with_its_graphs(tmp_path: Path) -> None:
    net, start = Net("sgd"), Net("sgd")
    callback = GramscopeCallback(HELD, LOSS, measures=MEASURES, every_n_steps=6)
    compiled: Any = torch.compile(net, backend="eager")
    trainer = fit(compiled, tmp_path, [callback])
    assert logged(trainer)[12] == pytest.approx(expected(net, start), rel=1e-6, abs=1e-9)
    plain = Net("sgd")
    fit(plain, tmp_path, [])
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["vcl", "whitened"])
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    """Weights, learning rates and records, also those compared with the initial weights."""
    callbacks = [GramscopeCallback(HELD, LOSS, measures=MEASURES, every_n_steps=3) for _ in range(3)]
    whole = Net(kind)
    trainer = fit(whole, tmp_path, [callbacks[0]])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25 * trainer.optimizers[0].defaults["lr"])
    first = fit(Net(kind), tmp_path, [callbacks[1]], max_epochs=1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Net(kind)
    with torch.no_grad():
        resumed.net[0].weight.add_(1.0)  # the checkpoint's weights must replace these, also as the initial ones
    fit(resumed, tmp_path, [callbacks[2]], ckpt_path=tmp_path / "half.ckpt")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert list(callbacks[2].records) == list(callbacks[0].records)
    assert [record["step"] for record in callbacks[2].records] == [0, 3, 6, 9, 12]


def test_accumulated_batches_equal_one_batch(tmp_path: Path) -> None:
    """Lightning divides by the number of batches; ``reduction`` makes up for it."""
    nets = [Net("vcl", accumulated=count) for count in (1, 2)]
    for net, count in zip(nets, (1, 2), strict=True):
        fit(net, tmp_path, [], batch_size=16 // count, accumulate_grad_batches=count, max_epochs=1)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_vcl_trains_in_mixed_precision(tmp_path: Path) -> None:
    net = Net("vcl")
    before = float(LOSS(net(X), Y).detach())
    fit(net, tmp_path, [], precision="bf16-mixed", max_epochs=6)
    assert float(LOSS(net(X), Y).detach()) < 0.9 * before


def test_two_processes_log_the_same_numbers(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "lightning_processes.py"
    result = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "sync_dist" not in result.stderr  # Lightning's advice on values that differ between processes
    files = sorted(tmp_path.glob("rank*.pt"))
    assert len(files) == 2
    first, second = (torch.load(file, weights_only=True) for file in files)
    net, start = Net("vcl"), Net("vcl")
    net.load_state_dict(first["weights"])
    wanted = expected(net, start)
    del wanted["gramscope/accuracy"]  # the second callback has replaced it
    for saved in (first, second):
        found = {name: saved["metrics"][name] for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7)
        for name, value in first["weights"].items():
            assert torch.equal(value, saved["weights"][name])
    assert first["steps"] == [0, 3, 6]
    assert second["steps"] == []
    # Each process takes every second sample; the inputs of the first layer do not change, so weights do not matter.
    batches = [(X[:16], Y[:16]), (X[32:48], Y[32:48]), (X[32:48], Y[32:48])]
    values = [gs.measure(net, batch, measures=["surrogate"])["net.0"]["surrogate"] for batch in batches]
    assert first["passing"] == second["passing"] == pytest.approx(values)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    assert_refused("give one of the two", GramscopeCallback, every_n_steps=2, every_n_epochs=1)
    with pytest.raises(InputError, match="no module 'nett'; did you mean 'net'"):
        fit(Net("sgd"), tmp_path, [GramscopeCallback(HELD, module="nett")])

    class NoForward(Net):
        forward = pl.LightningModule.forward

    with pytest.raises(
        InputError, match="no forward of its own; name the module to measure with module=, one of 'net'"
    ):
        fit(NoForward("sgd"), tmp_path, [GramscopeCallback(HELD)])


class Validated(Net):
    """Keeps the weights and the step at each validation batch."""

    def __init__(self) -> None:
        super().__init__("free")
        self.seen: dict[int, list[torch.Tensor]] = {}

    def validation_step(self, batch: Any, index: int) -> None:
        self(batch[0])
        self.seen[self.global_step] = [p.detach().clone() for p in self.parameters()]


def test_free_muon_validates_and_saves_the_average_inside_an_epoch(tmp_path: Path) -> None:
    net, alone = Validated(), Net("free")
    optimizer = alone.configure_optimizers()
    averages = {0: [p.detach().clone() for p in alone.parameters()]}
    batches = [(x, y) for x, y in DataLoader(TensorDataset(X, Y), batch_size=8)]
    for step, batch in enumerate(2 * batches, 1):
        optimizer.zero_grad()
        alone.training_step(batch, 0).backward()
        optimizer.step()
        averages[step] = [p.detach().clone() for p in alone.parameters()]
    saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
                               "enable_model_summary": False}  # fmt: skip
    trainer = pl.Trainer(val_check_interval=2, callbacks=[saving], **options)
    held = DataLoader(TensorDataset(*HELD), batch_size=24)
    trainer.fit(net, DataLoader(TensorDataset(X, Y), batch_size=8), held)
    assert sorted(net.seen) == [0, 2, 4, 6, 8, 10, 12]
    for step, weights in net.seen.items():
        torch.testing.assert_close(weights, averages[step], rtol=0, atol=1e-6)
    for step in (3, 6):
        stored = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        torch.testing.assert_close(list(stored["state_dict"].values()), averages[step], rtol=0, atol=1e-6)
    resumed = Validated()
    pl.Trainer(enable_checkpointing=False, num_sanity_val_steps=0, **options).fit(
        resumed, DataLoader(TensorDataset(X, Y), batch_size=8), held, ckpt_path=tmp_path / "step=6.ckpt"
    )
    torch.testing.assert_close([p.detach() for p in resumed.parameters()], averages[12], rtol=0, atol=1e-5)
