"""Only the sums that are asked for are formed, within the memory budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from benchmarks.timing import peak_extra_bytes
from cases import BY_NAME, normal
from gramscope.errors import joined
from gramscope.instruments.agop import dual_tangent_kernel

MEBIBYTE = 2**20


def wide() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3000)).double()
    return model, normal(6, 4), torch.arange(6) % 3


def test_only_what_the_measures_need_is_formed() -> None:
    model, x, y = wide()
    D = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model[2].weight)[0]
    table: list[gs.Table] = []
    gs.measure(nn.Linear(2, 2), (torch.randn(4, 2), torch.arange(4) % 2), F.cross_entropy)  # imports what it needs
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
    options: dict[str, Any] = {"jacobians": True, "sketch": 4, "memory": 16 * MEBIBYTE}
    options["generator"] = torch.Generator().manual_seed(0)
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
    names = ["vcs_cosine", "crh_outputs_gw"]
    table = gs.measure(model, (x, y), F.cross_entropy, measures="vcs_cosine", memory=16 * MEBIBYTE)
    dense = gs.measure(model, (x, y), F.cross_entropy, measures=names)
    for name in ("0", "2"):  # WᵀΣW is small where Σ is not
        assert table[name]["vcs_cosine"] == pytest.approx(dense[name]["vcs_cosine"])
    tight = gs.measure(model, (x, y), F.cross_entropy, measures=names, memory=16 * MEBIBYTE)
    assert tight["2"]["vcs_cosine"] is None
    assert tight.notes["2.vcs_cosine"].text == f"no Σ: {message}"
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


@pytest.mark.parametrize("rows", [(1, 4), (4,), (6,)])
def test_rows_that_serve_all_samples_have_no_gradients_of_single_samples(rows: tuple[int, ...]) -> None:
    """A table of relative positions, as DeBERTa projects it, or learned queries: D is right, Σ and K do not exist.

    Six rows are as many as there are samples, so that their number does not show it.
    """

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(*rows, 3, dtype=torch.float64))
            self.shared, self.own = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            return (self.own(x).unsqueeze(1) * self.shared(self.table)).sum(1)

    torch.manual_seed(0)
    model, x, y = Relative(), torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    stats = gs.collect(model, (x, y), nn.MSELoss(), jacobians=True, autograd=True)
    torch.testing.assert_close(stats["shared"].D, stats["shared"].autograd)
    assert stats["shared"].Sigma is None
    assert stats["shared"].JtJ is None
    assert stats["own"].Sigma is not None
    assert stats["own"].JtJ is not None
    assert "serves several samples" in str(stats.notes["shared"])
    assert set(dual_tangent_kernel(model, x)) == {"own"}
    # batches of one sample have them
    table = gs.measure(model, [(x[i : i + 1], y[i : i + 1]) for i in range(6)], nn.MSELoss(), measures=["agop_trace"])
    W, z = model.shared.weight, model.shared(model.table)
    J = torch.autograd.functional.jacobian(lambda z: (model.own(x).unsqueeze(1) * z).sum(1), z)
    assert table["shared"]["agop_trace"] == pytest.approx((J @ W).square().sum().item() / 6)


def test_positions_as_many_as_samples_serve_all_of_them() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(ids) + self.places(torch.arange(5)))).mean(1)  # type: ignore[no-any-return]

    stats = gs.collect(
        Placed(), (torch.arange(25).reshape(5, 5) % 9, torch.arange(5) % 3), F.cross_entropy, jacobians=True
    )
    assert stats["words"].JtJ is not None
    assert stats["places"].JtJ is None
    assert stats["places"].Sigma is None


def test_choices_of_a_sample_side_by_side() -> None:
    """Three sequences of one sample become three rows, as in multiple choice; each has a gradient of its own."""

    class Choices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(ids.flatten(0, 1))).mean(1)).reshape(ids.shape[:2])  # type: ignore[no-any-return]

    model, ids, y = Choices().double(), torch.arange(60).reshape(5, 3, 4) % 9, torch.arange(5) % 3
    stats = gs.collect(model, (ids, y), F.cross_entropy, jacobians=True)
    alone = gs.collect(model, [(ids[i : i + 1], y[i : i + 1]) for i in range(5)], F.cross_entropy, jacobians=True)
    torch.testing.assert_close(stats["words"].JtJ, alone["words"].JtJ)
    torch.testing.assert_close(stats["words"].Sigma, alone["words"].Sigma)


def test_sketches_are_summed_in_the_precision_of_the_sums() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model.float(), (x.float(), y), F.cross_entropy, jacobians=True, sketch=4)
    assert {layer.JtJ.dtype for layer in stats if layer.JtJ is not None} == {torch.float64}
