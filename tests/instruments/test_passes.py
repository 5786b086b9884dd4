"""Target linearity by passes over the data against the fit of all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.linalg.conjugate_gradients import IterativeFit
from gramscope.statistics import feature_statistics

MEASURES = ["target_linearity"]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 600 inputs count as those of more than 4,096 do."""
    monkeypatch.setattr("gramscope.statistics.feature_statistics.GRAM_LIMIT", 512)
    monkeypatch.setattr("gramscope.statistics.feature_moments.GRAM_LIMIT", 512)
    assert feature_statistics.GRAM_LIMIT == 512


def problem(n: int, labels: int = 10, decay: float = 0.5) -> tuple[nn.Module, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 10)).double()
    x = torch.randn(n, 600, generator=g, dtype=torch.float64) * torch.arange(1, 601.0) ** -decay + 0.1
    y = (x[:, :20].sum(1) + 0.3 * torch.randn(n, generator=g)).argsort().argsort() * labels // n
    return model, x, y


@pytest.mark.parametrize("options", [{}, {"intercept": True}, {"ridge": 3.0}, {"ridge": 3.0, "intercept": True}])
@pytest.mark.parametrize(("n", "labels"), [(1000, 10), (500, 10), (1100, 1100)])
def test_passes_agree_with_the_fit_of_all_rows(n: int, labels: int, options: dict[str, Any]) -> None:
    model, x, y = problem(n, labels)
    loader = torch.utils.data.DataLoader(list(zip(x, y, strict=True)), batch_size=400)
    given: dict[str, Any] = {"measures": MEASURES, "progress": False, **options}
    dense = gs.measure(model, loader, **given, memory=2**30)
    tight = gs.measure(model, loader, **given, memory=2**18)
    for layer in ("0", "2"):
        exact, value, error = dense[layer][MEASURES[0]], tight[layer][MEASURES[0]], tight.errors[layer][MEASURES[0]]
        noise = dense.errors.get(layer, {}).get(MEASURES[0], 0.0)
        assert exact is not None
        assert value is not None
        assert error >= 0.99 * noise
        assert value <= exact + 1e-9 or options.get("ridge")
        assert abs(value - exact) < 5 * (error - noise) + 1e-3, (layer, exact, value, error)
        assert "passes of conjugate gradients" in tight.notes[f"{layer}.target_linearity"].text
        if labels == 10:
            assert dense.errors.get(layer) is None


def test_samples_that_do_not_count_are_left_out() -> None:
    model, x, y = problem(1500)
    y[::3] = -100
    for memory in (2**30, 2**18):
        found, kept = (
            gs.measure(model, [batch], nn.CrossEntropyLoss(), measures=MEASURES, memory=memory)
            for batch in ((x, y), (x[y >= 0], y[y >= 0]))
        )
        for layer in kept:
            assert found[layer] == pytest.approx(kept[layer], abs=1e-9)


def test_a_loader_that_can_be_read_once_is_named() -> None:
    model, x, y = problem(1500)
    table = gs.measure(model, iter([(x, y)]), measures=MEASURES, memory=2**18)
    assert "this loader can be read once" in table.notes["0.target_linearity"].text


def test_a_loader_that_changes_is_named() -> None:
    model, x, y = problem(1500)

    class Changing:
        reads = 0

        def __iter__(self) -> Any:
            Changing.reads += 1
            return iter([(x[: 1500 - Changing.reads], y[: 1500 - Changing.reads])])

    table = gs.measure(model, Changing(), measures=MEASURES, memory=2**18)
    assert "gives the same samples each time" in table.notes["0.target_linearity"].text


def test_fewer_rows_than_probes() -> None:
    g = torch.Generator().manual_seed(1)
    H, Y = (torch.randn(20, d, generator=g, dtype=torch.float64) for d in (300, 3))
    for ridge in (0.0, 30.0):
        fit = IterativeFit(H.mT @ Y, Y.square().sum(0), ridge)
        for _ in range(6):
            fit.step(H.mT @ (H @ fit.direction))
        beta = torch.linalg.solve(H.mT @ H + ridge * torch.eye(300), H.mT @ Y) if ridge else torch.linalg.pinv(H) @ Y
        torch.testing.assert_close(fit.residuals, (Y - H @ beta).square().sum(0), rtol=1e-6, atol=1e-9)
        assert fit.remaining() < 1e-6


@pytest.mark.parametrize("decay", [0.0, 1.0, 3.0])
def test_a_step_never_loses_and_remaining_is_of_the_right_size(decay: float) -> None:
    g = torch.Generator().manual_seed(1)
    H = torch.randn(400, 200, generator=g, dtype=torch.float64) * torch.arange(1, 201.0) ** -decay
    Y = torch.randn(400, 3, generator=g, dtype=torch.float64)
    best = float((Y - H @ torch.linalg.lstsq(H, Y).solution).square().sum())
    fit = IterativeFit(H.mT @ Y, Y.square().sum(0), 0.0)
    before = float(fit.residuals.sum())
    for _ in range(25):
        fit.step(H.mT @ (H @ fit.direction))
        now = float(fit.residuals.sum())
        assert best - 1e-9 < now <= before + 1e-9
        before = now
    gap = (now - best) / float(Y.square().sum())
    assert gap <= 10 * fit.remaining() / float(Y.square().sum()) + 1e-6


@pytest.mark.parametrize("n", [1000, 500])
def test_neural_collapse_by_one_further_reading(n: int) -> None:
    model, x, y = problem(n)
    loader = torch.utils.data.DataLoader(list(zip(x, y, strict=True)), batch_size=400)
    names = ["nc1", "nc2_equinorm", "nc2_equiangular", "nc3"]
    dense, tight = (gs.measure(model, loader, measures=names, memory=memory) for memory in (2**30, 2**18))
    for layer in ("0", "2"):
        for name in names if layer == "2" else names[:3]:
            assert dense[layer][name] is not None
            assert tight[layer][name] == pytest.approx(dense[layer][name], rel=1e-9)
    once = gs.measure(model, iter([(x, y)]), measures=names, memory=2**18)
    assert "this loader can be read once" in once.notes["0.nc1"].text
    assert once["0"]["nc2_equinorm"] == pytest.approx(dense["0"]["nc2_equinorm"])


@pytest.mark.parametrize(
    ("n", "labels", "options"),
    [(1000, 10, {}), (1000, 10, {"intercept": True}), (1000, 10, {"ridge": 30.0}), (500, 10, {}), (1100, 1100, {})],
)
def test_held_out_data_of_a_fit_by_passes(n: int, labels: int, options: dict[str, Any]) -> None:
    model, x, y = problem(2 * n, labels)
    noise = torch.randn(n, 600, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unseen = x[n:], y[n:]
    given: dict[str, Any] = {"measures": "target_linearity_held_out", "progress": False, **options}
    # the second fits as rows; the third has weak directions of its own, so that further steps move it more
    for data, errors in ((unseen, 1), ((x[n:][:40], y[n:][:40]), 1), ((x[n:] + 0.1 * noise, y[n:]), 3)):
        held_out = torch.utils.data.DataLoader(list(zip(*data, strict=True)), batch_size=400)
        dense, tight = (
            gs.measure(model, (x[:n], y[:n]), **given, held_out=held_out, memory=memory) for memory in (2**30, 2**18)
        )
        for layer in ("0", "2"):
            exact, value = dense[layer]["target_linearity_held_out"], tight[layer]["target_linearity_held_out"]
            assert exact is not None
            assert value is not None, tight.notes
            error = tight.errors[layer]["target_linearity_held_out"]
            assert abs(value - exact) < errors * error + 1e-6, (layer, exact, value, error)
            assert error < 0.3 * (1 + abs(exact))
            assert "passes of conjugate gradients" in tight.notes[f"{layer}.target_linearity_held_out"].text


def test_what_further_readings_cannot_tell_is_named() -> None:
    model, x, y = problem(1500)
    table = gs.measure(model, [(x, y)], measures=["feature_rank", "surrogate_normalized"], memory=2**18)
    for name in table.columns:
        assert table["0"][name] is None
        assert "take fewer samples, raise memory=, or ask with gram=True" in table.notes[f"0.{name}"].text
