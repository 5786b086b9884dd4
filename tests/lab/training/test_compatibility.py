"""Net, data and loss that do not fit are told before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope_lab.data import DataSet
from gramscope_lab.nets import VAE
from gramscope_lab.nets.vae import vae_loss
from gramscope_lab.training.config import DataTable, MeasureTable, ModelTable, TrainConfig
from gramscope_lab.training.job import arrange, load_data, load_factory, prepare, resolve_device
from gramscope_lab.training.layer_measures import measure_own, measure_runs
from gramscope_lab.training.sample_losses import joined, joined_loss
from gramscope_lab.training.train import train
from lab.training.helpers import Config
from refusals import assert_refused


class Dict(nn.Linear):
    """Returns what no loss of ours takes."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: nn.Linear(9, 3), r"Linear fails on the inputs of blobs, float32 \[n, 8\]: RuntimeError: mat1"),
        (lambda: Dict(8, 3), r"Dict returns dict for two samples, but classification of blobs takes a tensor \[n, 3\]"),
        (lambda: nn.Linear(8, 2), r"returns float32 \[2, 2\] for two samples, but .* takes a tensor \[n, 3\]"),
        (
            lambda: nn.Sequential(nn.Linear(8, 3), nn.Flatten(0)),
            r"returns float32 \[6\] for two samples, but classification",
        ),
    ],
)
def test_a_net_that_does_not_fit(
    tmp_path: Path, config: Config, blobs: DataSet, net: Callable[[], nn.Module], message: str
) -> None:
    assert_refused(message, train, config(), tmp_path / "run", data=blobs, model=lambda member, data: net())
    assert not (tmp_path / "run").exists()


def test_a_loss_that_does_not_fit(config: Config, blobs: DataSet) -> None:
    scalar = r"the loss gives float32 \[\] for 2 samples; it must give one value a sample"
    assert_refused(scalar, train, config(), data=blobs, loss=nn.functional.cross_entropy)
    fails = "the loss fails on what the net MLP returns, float32 .*: AttributeError"
    assert_refused(fails, train, config(), data=blobs, loss=lambda output, target: output.logits)


def test_own_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, blobs: DataSet) -> None:
    (tmp_path / "ownnet.py").write_text("from torch import nn\n\n\ndef build(width=4):\n    return nn.Linear(8, 3)\n")
    monkeypatch.chdir(tmp_path)
    train(config(model={"name": "ownnet:build", "width": 5}, epochs=0), data=blobs)
    with pytest.raises(InputError, match="unexpected keyword argument 'foo'"):
        train(config(model={"name": "ownnet:build", "foo": 2}), data=blobs)
    for wrong in (":build", "./ownnet.py:build", "ownnet:", "own-net:build", "a..b:c"):
        assert_refused("give package.module:function, such as mynet:build", load_factory, wrong)


def test_devices_that_are_not_there() -> None:
    for name in ("meta", "meta:x", "privateuseone:9", *(() if torch.backends.mps.is_available() else ("xpu", "mps"))):
        assert_refused(f"device = '{name}'", resolve_device, name)


# -- whole numbers ------------------------------------------------------------------------------------------------
def test_whole_numbers_are_tokens(tmp_path: Path, config: Config) -> None:
    x = np.random.default_rng(0).integers(0, 5, (40, 6))
    path, y = tmp_path / "x.npz", np.arange(40) % 2
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    told = r"MLP fails on the inputs of x, int64 \[n, 6\]: .*; whole numbers are tokens, so store features as floats"
    assert_refused(told, train, config(data={"name": str(path)}))
    assert_refused(told, measure_own, ModelTable(name="mlp"), None, DataTable(name=str(path)), MeasureTable())


def test_tokens_go_to_nets_that_take_them(config: Config) -> None:
    tokens = {"name": "modular-arithmetic", "p": 7, "encoding": "tokens"}
    assert_refused("whole numbers are tokens", train, config(data=tokens))
    transformer = {"name": "transformer", "vocabulary": 7, "width": 8, "heads": 2, "depth": 1}
    job = prepare(config(data=tokens, model=transformer))
    assert job.data.x_train.dtype == torch.int64
    small = config(data=tokens, model=transformer | {"vocabulary": 6})
    assert_refused("Transformer fails on the inputs .*IndexError", prepare, small)


# -- VAE ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["adam", "sgd", "vcl", "muon", "whiten-sgd"])
def test_a_vae_reconstructs_and_has_no_accuracy(tmp_path: Path, config: Config, method: str) -> None:
    settings = config(
        {"name": method, **{"sgd": {"lr": 1e-3}, "vcl": {"gamma": 1e-3}}.get(method, {})},
        data={"name": "digits", "samples": 64, "test_samples": 20, "validation": 0.25},
        model={"name": "vae", "hidden": [12], "latent": 3, "beta": 0.5},
        epochs=2,
    )
    before = torch.get_rng_state()
    trained = train(settings, tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)
    member = trained.members["seed-0"]
    assert not any("accuracy" in key for record in member.records for key in record)
    assert isinstance(member.model, VAE)
    x = arrange(load_data(DataTable(name="digits")), settings.data).x_test
    with torch.no_grad():
        expected = vae_loss(member.model.eval()(x), x, beta=0.5).mean()
    assert member.last("test_loss") == pytest.approx(float(expected), rel=1e-5)
    (found,) = measure_runs(tmp_path / "run", MeasureTable(samples=20, names=("weight_norm",)), device="cpu")
    assert len(found.table.to_dict()["layers"]) == 5


def test_a_vae_is_measured_with_its_own_loss(tmp_path: Path, config: Config) -> None:
    table = {"name": "digits", "samples": 32, "test_samples": 20}
    vae = {"name": "vae", "hidden": [12], "latent": 3, "beta": 0.5}
    measure = {"every": 1, "samples": 32, "matrices": True}
    trained = train(config(data=table, model=vae, measure=measure, epochs=1), tmp_path / "run")
    assert {r["layer"] for r in trained.records if r["kind"] == "measurement"} >= {"mean", "log_variance"}
    job = prepare(config(data=table, model=vae))
    job.model.eval()
    x, y = job.data.x_train, job.data.y_train
    output = joined(job.model(x))
    assert output.shape == (32, 64 + 3 + 3)
    assert torch.allclose(joined_loss(job.model, job.loss)(output, y), job.loss(job.model(x), y))


def test_a_vae_refuses_other_losses_and_inputs(config: Config) -> None:
    vae = {"name": "vae", "hidden": [12], "latent": 3}
    assert_refused("loss = 'mse': a VAE has its own loss", train, config(model=vae, loss="mse"))
    with pytest.raises(InputError, match=r"inputs from -1 to 1; a VAE needs floats from 0 to 1, .*data.scale = 'unit'"):
        train(config(model=vae, data={"name": "digits", "scale": "signed"}))


# -- what the configuration says of the data ----------------------------------------------------------------------
def test_label_noise_spares_the_validation_set() -> None:
    table = DataTable(name="digits", validation=0.2, label_noise=0.5)
    noisy, clean = load_data(table), load_data(table.model_copy(update={"label_noise": 0.0}))
    assert noisy.y_val is not None
    assert clean.y_val is not None
    assert torch.equal(noisy.y_val, clean.y_val)
    assert 0.35 < float((noisy.y_train != clean.y_train).float().mean()) < 0.55


def test_given_data_are_arranged_as_configured(config: Config, blobs: DataSet) -> None:
    seen = []

    def net(member: TrainConfig, data: DataSet) -> nn.Module:
        seen.append(data)
        return nn.Linear(8, 3)

    table = {"name": "digits", "samples": 40, "test_samples": 9, "validation": 0.25, "label_noise": 0.5}
    member = train(config(data=table, epochs=1), data=blobs, model=net).members["seed-0"]
    assert [len(seen[0].x_train), len(seen[0].x_test)] == [30, 9]
    assert member.last("validation_accuracy") is not None
    clean = arrange(blobs, DataTable(name="x", samples=40, test_samples=9, validation=0.25))
    assert torch.equal(clean.x_train, seen[0].x_train)
    assert not torch.equal(clean.y_train, seen[0].y_train)
