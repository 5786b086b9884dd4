"""What the experiments record, at small settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gramscope as gs
from gramscope.errors import InputError
from gramscope_lab.data import load
from gramscope_lab.experiments import gram_grokking, gram_linearity
from gramscope_lab.experiments.experiment import Options, Reproduction, Results, reproduce
from gramscope_lab.experiments.nfa_matrices import FIG9
from gramscope_lab.experiments.vcl_diagonals import _diagonals, _pearson
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.job import arrange
from refusals import assert_refused
from small_experiments import SMALL

Read = Callable[[str], Results[Any]]
Run = Callable[[str], Reproduction]


def test_the_gram_of_the_unrolling_net_follows_the_virtual_covariance(results: Read) -> None:
    found = results("gram-fig1")
    first = found.records("frame", seed=1, epoch=0)[0]
    data = load("swiss-roll", seed=1, n_train=60)
    plain = gs.target_linearity(data.x_train, data.y_train, intercept=True)
    assert first["target_linearity"] == pytest.approx(float(plain), abs=1e-6)
    assert min(r["gram_cosine"] for r in found.records("frame") if r["epoch"]) > 0.99
    frames = found.artefact("seed-1", "frames")
    assert frames["points"].shape == (5, 60, 2)
    torch.testing.assert_close(frames["points"][0], data.x_train)


def test_the_error_splits_into_features_and_chase(results: Read) -> None:
    records = results("gram-fig8").records("measurement")
    assert len(records) == 2 * 3
    for record in records:
        assert record["error"] <= record["features"] + record["chase"] + 1e-4
        assert record["mse"] == pytest.approx(record["error"] ** 2 / 40)
    assert records[-1]["error"] < records[-3]["error"]


def test_every_hidden_layer_is_measured_at_its_output(results: Read) -> None:
    found = results("gram-fig4")
    measured = found.records("measurement")
    assert {r["layer"] for r in measured} == {"hidden2", "readout"}
    fast, _ = gram_linearity._runs(found)["digits"]
    assert [{r["layer"] for r in fast.features(layer)} for layer in (1, 2)] == [{"hidden2"}, {"readout"}]
    assert fast.line(2).x == [0, 1, 2, 3]
    (inputs,) = found.records("input")
    data = load("digits").flat()
    expected = gs.target_linearity(data.subset(300).x_train, data.subset(300).y_train)
    assert inputs["target_linearity"] == pytest.approx(float(expected))


def test_settings_are_told_apart_and_the_fitting_one_is_judged(results: Read, done: Run) -> None:
    made = done("gram-fig4")
    fast, slow = gram_linearity._runs(results("gram-fig4"))["digits"]
    assert (fast.name, slow.name) == ("digits, lr 0.1, momentum 0.9", "digits, lr 0.01, momentum 0.9")
    assert len(fast.evaluated) == len(slow.evaluated) == 2 * 4
    assert fast.accuracy("train").final > slow.accuracy("train").final + 0.2
    assert [run.name for run, _ in gram_linearity._judged(results("gram-fig4"))] == [fast.name]
    assert sum("accuracies" in claim.claim for claim in made.claims) == 2


def test_both_kernels_are_run(done: Run) -> None:
    made = done("gram-fig6")
    assert [claim.claim.split(":")[0] for claim in made.claims] == ["digits, 3×3 kernels", "digits, 2×2 kernels"]
    for size in (3, 2):
        stored = RunDirectory(made.path / f"sgd-kernel{size}-digits").load_checkpoint()
        assert stored.model["conv2.weight"].shape[-1] == size


def test_random_labels_lower_linearity_and_can_reach_the_test_set(results: Read) -> None:
    found = results("gram-fig12")
    last = {
        part: [r["target_linearity"] for r in found.records("measurement", part=part, layer="readout")][-1]
        for part in ("p-0-digits", "p-1-digits")
    }
    assert last["p-1-digits"] < last["p-0-digits"]
    settings = gram_linearity.Noisy(data=("digits",), fractions=(1.0,), noisy_test=True)
    (part,) = gram_linearity.noisy_parts(settings, Options())
    assert part.data is not None
    noisy, clean = arrange(part.data(), part.config.data), load("digits")
    assert (noisy.y_test != clean.y_test).float().mean() > 0.7
    assert (noisy.y_train != clean.y_train).float().mean() > 0.7


def test_the_vae_learns_and_its_interpolation_is_bounded(results: Read) -> None:
    found = results("gram-fig5")
    for beta in (0.1, 5.0):
        curve = [r["reconstruction"] for r in found.records("measurement", beta=beta)]
        assert len(curve) == 3
        assert curve[-1] < curve[0]
        (record,) = found.records("interpolation", beta=beta)
        assert record["error"] <= record["pair_residual"] + record["decoder_gap"] + 1e-9
        assert record["ols_residual"] <= record["bound"] + 1e-9
    strip = found.artefact("vae-digits.after", "strip-5")
    assert strip["decoded"].shape == strip["pixels"].shape == (9, 1, 8, 8)
    data = load("digits")
    torch.testing.assert_close(strip["pixels"][0], data.x_test[int((data.y_test == 2).nonzero()[0])])


def test_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.npz"
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).numpy()
    np.savez(path, x_train=x, y_train=np.arange(40) % 2, x_test=x, y_test=np.arange(40) % 2)
    values = {"data": (str(path),), "epochs": (1.0,)}
    with pytest.raises(InputError, match=r"needs floats from 0 to 1"):
        reproduce("gram-fig10", Options(device="cpu"), values=values, out=tmp_path / "vae")
    values = {"data": (str(path),), "epochs": 1.0, "seeds": (0,)}
    assert_refused("no images", reproduce, "vcl-fig1", Options(device="cpu"), values=values, out=tmp_path / "vcl")


def test_grokking_runs_are_told_apart_by_their_decay(results: Read) -> None:
    runs = gram_grokking._runs(results("gram-fig13"))
    assert [run.decay for run in runs] == [0.0, 1.0]
    assert len(runs[0].evaluated) == len(runs[1].evaluated) == 3
    assert runs[0].evaluated != runs[1].evaluated
    assert len(runs[0].gap()[0]) == 3


def test_single_jumps_do_not_count_as_a_change_of_the_gap() -> None:
    assert gram_grokking._smoothed([0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 1.0, 1.0]) == [0.0] * 6 + [0.5, 1.0]


def test_diagonals_are_those_of_the_trained_net(done: Run) -> None:
    run = RunDirectory(done("vcl-fig1").path / "sgd-digits" / "seed-1")
    found = _diagonals(run)
    weight = run.load_checkpoint().model["hidden1.weight"]
    torch.testing.assert_close(found["nfm"].flatten(), weight.square().sum(0), rtol=1e-4, atol=1e-5)
    a, b = torch.rand(3, 4), torch.rand(3, 4)
    expected = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1]
    assert _pearson(a, b) == pytest.approx(float(expected))


# -- nfa ----------------------------------------------------------------------------------------------------------
def test_corruption_loses_alignment(done: Run) -> None:
    for record in RunDirectory.open(done("nfa-fig1").path).records("alignment"):
        assert record["nfa"] > record["corrupted"]
        assert 0 < record["eigenvalue_spread"] < math.sqrt(15)


def test_curves_start_where_they_must(done: Run) -> None:
    records = RunDirectory.open(done("nfa-fig2").path).records("measurement")
    assert len(records) == 2 * 2 * 3 * 2 * 2  # varied, layers, steps, scales, seeds
    start = [r for r in records if r["step"] == 0]
    assert all(r["centered"] is None and r["uncentered"] > 0 for r in start)
    # at initialisation a factor on the first layer changes neither side of the uncentred ansatz but their scale
    first = {(r["seed"], r["scale"]): r["uncentered"] for r in start if r["layer"] == 1 and r["varied"] == "first"}
    assert first[0, 0.01] == pytest.approx(first[0, 1.0], rel=1e-4)
    assert all(0 <= r["centered"] <= 1 + 1e-9 for r in records if r["step"] > 0)


def test_the_figure_of_faces_says_what_its_numbers_are(results: Read) -> None:
    found = results("nfa-fig9")
    drawn = [place.get_title() for place in FIG9.figure(found).axes]
    (record,) = found.records("diagonals")
    assert f"{record['pearson']:.2f}" in drawn[1]
    assert "one draw" in drawn[2]
    assert f"mean over draws {record['corrupted']:.2f}" in drawn[2]


def test_a_start_that_failed_is_not_in_the_way(tmp_path: Path) -> None:
    small = {**SMALL["nfa-fig9"], "epochs": 1.0}
    run = partial(reproduce, "nfa-fig9", Options(device="cpu"), out=tmp_path / "x")
    assert_refused("digits has no option", run, values={**small, "data": "digits"})
    run(values=small)
