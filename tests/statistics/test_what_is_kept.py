"""Only what is asked for is formed, within the budget of memory, and what is asked for wrongly is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME
from gramscope.bench.timing import peak_extra_bytes
from gramscope.errors import InputError
from gramscope.notes import joined

MEBIBYTE = 2**20


def wide() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3000)).double()
    return model, torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.arange(6) % 3


def test_only_what_the_measures_need_is_formed() -> None:
    model, x, y = wide()
    D = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model[2].weight)[0]
    table: list[gs.Table] = []
    extra = peak_extra_bytes(
        lambda: table.append(gs.measure(model, (x, y), F.cross_entropy, measures=["gradient_norm"])), "cpu"
    )
    assert extra < 8 * MEBIBYTE  # Σ alone has 3000² · 8 bytes = 69 MiB
    assert table[0]["2"]["gradient_norm"] == pytest.approx(float(D.norm()) / 6)
    assert not table[0].notes
    bare = gs.collect(model, (x, y), F.cross_entropy)
    assert bare["2"].Sigma is not None
    assert gs.collect(model, (x, y), F.cross_entropy, covariance=False)["2"].Sigma is None


def test_matrices_beyond_the_budget_are_left_out_with_a_note() -> None:
    model, x, y = wide()
    options: dict[str, Any] = {
        "jacobians": True,
        "sketch": 4,
        "generator": torch.Generator().manual_seed(0),
        "memory": 16 * MEBIBYTE,
    }
    results: list[Any] = []
    extra = peak_extra_bytes(lambda: results.append(gs.collect(model, (x, y), F.cross_entropy, **options)), "cpu")
    assert extra < 32 * MEBIBYTE
    (stats,) = results
    assert stats["2"].Sigma is None
    assert stats["2"].JtJ is None
    assert stats["2"].D is not None
    assert stats["0"].Sigma.shape == (8, 8)
    assert stats["0"].JtJ.shape == (8, 8)
    message = "3000 × 3000 numbers take 137 MiB, more than the 16 MiB of memory="
    assert stats.notes == {"2": (("left out", f"no Σ: {message}"), ("left out", f"no K: {message}"))}
    table = gs.measure(model, (x, y), F.cross_entropy, measures=["vcs_cosine", "gradient_norm"], memory=16 * MEBIBYTE)
    assert table["2"]["vcs_cosine"] is None
    assert table.notes["2.vcs_cosine"].text == f"no Σ: {message}"
    assert table["0"]["vcs_cosine"] is not None
    # with room for it in one part only, the whole has none
    roomy = gs.collect(model, (x, y), F.cross_entropy, **options | {"memory": 2**30})
    assert roomy["2"].Sigma is not None
    for merged in (roomy.merge(stats), stats.merge(roomy)):
        assert merged["2"].Sigma is None
        assert "no Σ" in joined(merged.notes["2"]).text


def test_square_layers_are_kept_whatever_the_budget() -> None:
    model, x, y = BY_NAME["mlp"].make()  # 5 → 7 → 4 → 3
    stats = gs.collect(model, (x, y), F.cross_entropy, jacobians=True, memory=1)
    kept = {layer.name: layer.Sigma is not None and layer.JtJ is not None for layer in stats}
    assert kept == {layer.name: layer.weight.shape[0] <= layer.weight.shape[1] for layer in stats}
    assert set(kept.values()) == {True, False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gram": "yes"}, "gram='yes': give True, False or 'auto'"),
        ({"jacobians": "yes"}, "jacobians='yes': give True, False or 'auto'"),
        ({"features": "auto"}, "features='auto': give True or False"),
        ({"covariance": 1}, "covariance=1: give True or False"),
        ({"memory": "1GB"}, "memory='1GB': give a positive whole number of bytes"),
        ({"memory": 0}, "memory=0"),
    ],
)
def test_flags_that_are_none(options: dict[str, Any], message: str) -> None:
    model, x, y = BY_NAME["mlp"].make()
    with pytest.raises(InputError, match=message):
        gs.collect(model, (x, y), **options)


class Pooled(nn.Module):
    """A classifier of sequences: some layers see tokens, the readout and the output do not."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.r = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.r(torch.tanh(self.e(x)).mean(1))


def test_tokens_of_a_sequence_classifier() -> None:
    model = Pooled().double()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 7, 5, generator=generator, dtype=torch.float64), torch.arange(40) % 3
    Y = F.one_hot(y).double()
    Y = Y - Y.mean(0)
    marked = torch.rand(40, 7, generator=generator) > 0.4
    counts, residual = marked.sum(1), torch.cat([Y[i].expand(int(marked[i].sum()), 3) for i in range(40)])
    residual = residual - residual.mean(0)
    table = gs.measure(
        model, (x, y), nn.CrossEntropyLoss(), measures=["surrogate", "gradient_norm"], tokens=lambda i, t: marked
    )
    assert int(counts.sum()) == residual.shape[0]
    assert table["e"]["surrogate"] == pytest.approx(float((x[marked].T @ residual).square().sum()))
    assert table["r"]["surrogate"] is None
    assert "the token mask has shape (40, 7); layer 'r' has 40 × 1 sites" in table.notes["r"].text
    assert "(output)" not in table.notes
    third = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures=["surrogate"], tokens=3)
    assert third["e"]["surrogate"] == pytest.approx(float((x[:, 3].T @ Y).square().sum()))
    assert "tokens=3: layer 'r' has 1 sites" in third.notes["r"].text
    with pytest.raises(InputError, match=r"tokens= returned a list; give a function"):
        gs.collect(model, (x, y), tokens=lambda i, t: [[True] * 7] * 40)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("loss", [nn.MSELoss(), F.l1_loss, nn.HuberLoss(reduction="sum")])
@pytest.mark.parametrize("columns", [(), (1,)])
def test_integers_under_a_loss_of_regression_are_numbers(loss: Any, columns: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)) if columns == () else nn.Linear(5, 1)
    model = model.double()
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.randint(-50, 50, (40, *columns), generator=torch.Generator().manual_seed(1))
    stats = gs.collect(model, (x, y), loss)
    (layer,) = stats
    torch.testing.assert_close(layer.features.joint.HtY, x.T @ y.double().reshape(40, 1))
    assert "numbers to regress on" in joined(stats.notes["(targets)"]).text
    assert stats.network.accuracy is None
    held = gs.measure(model, (x[:30], y[:30]), loss, held_out=(x[30:], y[30:]), measures="target_linearity_held_out")
    beta = torch.linalg.lstsq(x[:30], y[:30].double().reshape(-1, 1)).solution
    Y = y[30:].double().reshape(-1, 1)
    expected = 1 - (Y - x[30:] @ beta).square().sum() / (Y - Y.mean()).square().sum()
    assert held[layer.name]["target_linearity_held_out"] == pytest.approx(float(expected))
    classes = gs.collect(model, (x, y.abs() % 3), loss, targets=lambda i, t: t)
    assert next(iter(classes)).features.classes is not None
    assert "(targets)" not in classes.notes
