"""Running, resuming, drawing and judging a made-up experiment, and every real one at small settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gramscope_lab.experiments import experiment as running
from gramscope_lab.experiments.catalogue import Entry
from gramscope_lab.experiments.experiment import (
    Claim,
    Computation,
    Experiment,
    Options,
    Part,
    Recorder,
    Reproduction,
    Results,
    Training,
    reproduce,
)
from gramscope_lab.experiments.plots import band, panels
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.reporter import Interrupted, Reporter
from gramscope_lab.training.train import Trained
from refusals import assert_refused
from small_experiments import SMALL
from small_experiments import MadeUpSettings as Settings


class Made:
    """The experiment, with a count of what was computed and a switch that interrupts a part."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.broken = ""
        self.error: type[BaseException] = KeyboardInterrupt

    def compute(self, settings: Settings, seed: int, recorder: Recorder) -> None:
        for step in recorder.track(range(settings.steps), settings.steps):
            recorder.record("value", seed=seed, step=step, value=float(seed + step))
            if self.broken == f"seed-{seed}":
                raise self.error
        recorder.save("matrix", m=torch.full((2, 2), float(seed)))
        self.computed.append(f"seed-{seed}")

    def parts(self, settings: Settings, options: Options) -> list[Part]:
        return [Computation(f"seed-{seed}", partial(self.compute, settings, seed)) for seed in settings.seeds]

    def experiment(self) -> Experiment[Settings]:
        return Experiment(Settings(), Settings((0, 1, 2), 10), self.parts, (largest, per_seed), figure)


def largest(results: Results[Settings]) -> Claim:
    value = max(r["value"] for r in results.records("value"))
    return Claim("largest", "3", f"{value:g}", value == 3)


def per_seed(results: Results[Settings]) -> list[Claim]:
    values = [float(results.artefact(f"seed-{seed}", "matrix")["m"].sum()) for seed in results.settings.seeds]
    return [Claim("sum", "0", f"{value:g}", None if value else True, "not seed 0" if value else "") for value in values]


def figure(results: Results[Settings]) -> Any:
    page, axes = panels(1, 1)
    band(axes[0, 0], results.records("value"), "step", "value")
    return page


@dataclass(frozen=True)
class MadeEntry(Entry):
    make: Callable[[], Experiment[Any]] | None = None

    def load(self) -> Experiment[Any]:
        assert self.make is not None
        return self.make()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr(running, "find", lambda name: MadeEntry("made", "[NFA] Fig. 0", "made up", "", made.experiment))
    return made


def run(out: Path, **options: Any) -> Reproduction:
    return reproduce("made", Options(device="cpu"), out=out, **options)


def test_runs_draws_and_judges(made: Made, tmp_path: Path) -> None:
    found = run(tmp_path / "x")
    assert made.computed == ["seed-0", "seed-1"]
    assert [path.suffix for path in found.figures] == [".png", ".pdf"]
    assert all(path.stat().st_size > 1000 for path in found.figures)
    assert [(c.measured, c.holds) for c in found.claims] == [("3", True), ("0", True), ("4", None)]
    stored = RunDirectory.open(tmp_path / "x").records("claim")
    assert [(r["claim"], r["holds"], r["reason"]) for r in stored] == [
        ("largest", True, ""),
        ("sum", True, ""),
        ("sum", None, "not seed 0"),
    ]
    assert RunDirectory.open(tmp_path / "x").status() == "finished"
    assert found.to_dict()["claims"][0]["published"] == "3"


def test_what_is_complete_is_not_run_again(made: Made, tmp_path: Path) -> None:
    run(tmp_path / "x")
    again = run(tmp_path / "x")
    assert made.computed == ["seed-0", "seed-1"]
    assert len(RunDirectory.open(tmp_path / "x").records("claim")) == len(again.claims)  # replaced, not added
    run(tmp_path / "x", force=True)
    assert made.computed == ["seed-0", "seed-1"] * 2


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (KeyboardInterrupt, Interrupted, "seed-1.*the same command continues"),
        (Interrupted, Interrupted, "seed-1.*the same command continues"),
        (RuntimeError, RuntimeError, None),
    ],
)
def test_a_part_that_fails_starts_again_and_the_others_are_kept(
    made: Made, tmp_path: Path, error: type[BaseException], raised: type[Exception], message: str | None
) -> None:
    made.broken, made.error = "seed-1", error
    with pytest.raises(raised, match=message):
        run(tmp_path / "x")
    made.broken = ""
    found = run(tmp_path / "x")
    assert made.computed == ["seed-0", "seed-1"]
    assert len(RunDirectory.open(tmp_path / "x").records("value")) == 6  # no half-written rows are left
    assert found.claims[0].holds


def test_other_settings_are_refused(made: Made, tmp_path: Path) -> None:
    assert_refused("steps = 0: must be at least 1", run, tmp_path / "x", values={"steps": 0})
    assert not (tmp_path / "x").exists()
    run(tmp_path / "x", values={"steps": 2})
    assert_refused(r"steps = 2, not 3.*--force", run, tmp_path / "x")
    paper = Options("paper", device="cpu")
    assert_refused("scale = quick, not paper", reproduce, "made", paper, out=tmp_path / "x")


@pytest.mark.parametrize("name", SMALL)
def test_every_experiment_runs_draws_and_judges(name: str, done: Callable[[str], Reproduction]) -> None:
    found = done(name)
    assert all(path.stat().st_size > 5000 for path in found.figures)
    assert found.claims
    assert all(claim.measured and "nan" not in claim.measured for claim in found.claims)


def test_the_records_are_enough_to_judge(done: Callable[[str], Reproduction]) -> None:
    found = done("vcl-fig2")
    before = (found.path / "sgd-two-layer-digits").stat().st_mtime_ns
    assert reproduce("vcl-fig2", found.options, values=SMALL["vcl-fig2"], out=found.path).claims == found.claims
    assert (found.path / "sgd-two-layer-digits").stat().st_mtime_ns == before  # nothing was trained again


# -- parts and claims ---------------------------------------------------------------------------------------------
def test_training_part(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {
            "data": {"name": "digits", "samples": 64, "test_samples": 32},
            "model": {"name": "mlp", "hidden": [4]},
            "method": {"name": "sgd"},
            "seeds": [0, 1],
            "epochs": 1,
            "device": "cpu",
        }
    )
    seen: list[list[str]] = []

    def after(trained: Trained, recorder: Recorder) -> None:
        if not seen:
            seen.append([])
            raise KeyboardInterrupt
        seen.append(list(trained.members))
        recorder.record("norm", value=1.0)

    root = RunDirectory.create(tmp_path / "x", {})
    part = Training("sgd", config, after)
    with pytest.raises(KeyboardInterrupt):
        part.run(root, Reporter())
    assert not part.complete(root)  # trained, but not measured
    part.run(root, Reporter())
    assert part.complete(root)
    assert seen == [[], ["seed-0", "seed-1"]]
    results = Results("x", None, Options(), root)
    assert len(results.records("evaluation", part="sgd", epoch=1.0)) == 2
    assert results.records("norm", part="sgd.after")[0]["run"] == "sgd.after"
    assert not results.records("norm", part="sgd")


def test_an_open_claim_needs_a_reason() -> None:
    assert_refused("undecided without a reason", Claim, "x", "1", "2", None)
    assert Claim("x", "1", "2", torch.tensor(True)).holds is True  # type: ignore[arg-type]
