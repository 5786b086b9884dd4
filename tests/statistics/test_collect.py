from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramscope as gs
from cases import BY_NAME, CASES, Case, sample_losses
from comparing import assert_same
from gramscope.errors import InputError, LayerError, NumericalError
from gramscope.linalg.moments import ClassMoments, Moments
from gramscope.notes import joined
from two_processes import answers

USABLE = [case for case in CASES if case.name != "checkpoint-reentrant"]


def loader(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("case", USABLE, ids=lambda c: c.name)
def test_results_do_not_depend_on_the_batch_size(case: Case) -> None:
    model, x, y = case.make()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.9)
    options = {"reference": reference, "residuals": True, "gram": True}
    whole = gs.collect(model, (x, y), sample_losses, **options)
    for size in (1, 4):
        assert_same(whole, gs.collect(model, loader(x, y, size), sample_losses, **options))


@pytest.mark.parametrize("case", USABLE, ids=lambda c: c.name)
def test_sums_equal_dense_autograd(case: Case) -> None:
    model, x, y = case.make()
    stats = gs.collect(model, loader(x, y, 4), sample_losses, jacobians=True)
    with gs.capture(model) as tape:
        losses = sample_losses(model(x), y)
        tape.backward(losses)
    assert stats.n == 6
    assert stats.network.loss == pytest.approx(losses.mean().item())
    for record in tape:
        layer = stats[record.name]
        torch.testing.assert_close(layer.D, torch.einsum("...bsk,...bsd->...kd", record.delta, record.h))
        torch.testing.assert_close(layer.Sigma, torch.einsum("...bsk,...bsl->...kl", record.delta, record.delta))
        torch.testing.assert_close(layer.weight, record.weight)
        rows = record.h.mean(-2)
        rows = rows.movedim(0, 1).flatten(1) if rows.dim() == 3 else rows
        joint = layer.features.joint
        onehot = F.one_hot(y).double()
        torch.testing.assert_close(joint.HtH, rows.T @ rows)
        torch.testing.assert_close(joint.HtY, rows.T @ onehot)
        torch.testing.assert_close(joint.C_hy, rows.T @ (onehot - onehot.mean(0)))


@given(st.permutations(range(12)), st.lists(st.integers(1, 11), min_size=0, max_size=3), st.booleans())
def test_merge_is_one_pass_under_any_split_and_order(order: list[int], cuts: list[int], labels: bool) -> None:
    model, _, _ = BY_NAME["mlp"].make()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64) + 10
    y = torch.arange(12) % 3 if labels else torch.randn(12, 3, generator=generator, dtype=torch.float64)
    loss: Callable[..., Tensor] = F.cross_entropy if labels else F.mse_loss
    whole = gs.collect(model, (x, y), loss, jacobians=True, residuals=True)
    edges = [0, *sorted(set(cuts)), 12]
    parts = [
        gs.collect(model, (x[order[a:b]], y[order[a:b]]), loss, jacobians=True, residuals=True)
        for a, b in pairwise(edges)
    ]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert_same(whole, merged)


def test_merge_refuses_other_layers_options_and_weights() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), F.cross_entropy)
    with pytest.raises(InputError, match="different layers"):
        stats.merge(gs.collect(model, (x, y), F.cross_entropy, layers="0"))
    with pytest.raises(InputError, match="collected with different options"):
        stats.merge(gs.collect(model, (x, y)))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(InputError, match="different weights"):
        stats.merge(gs.collect(model, (x, y), F.cross_entropy))


def test_all_reduce_over_two_processes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert answers("all_reduce_rank.py", tmp_path) == [["same"], ["same"]]


def test_all_reduce_without_a_group_changes_nothing() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), F.cross_entropy)
    assert stats.all_reduce() is stats


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        F.cross_entropy,
        lambda f, y: F.cross_entropy(f, y, reduction="none"),
    ],
)
def test_every_reduction_gives_the_same(loss: Callable[..., Tensor]) -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = gs.collect(model, (x, y), sample_losses)
    assert_same(expected, gs.collect(model, loader(x, y, 2), loss))


def test_stated_reductions() -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = gs.collect(model, (x, y), sample_losses)

    def mean(f: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(f, target)

    with pytest.raises(InputError, match="mean returns one number for 6 samples; state how"):
        gs.collect(model, (x, y), mean)
    assert_same(expected, gs.collect(model, loader(x, y, 2), mean, reduction="mean"))
    assert_same(expected, gs.collect(model, loader(x, y, 2), mean, reduction=2))
    with pytest.raises(InputError, match="reduction='average'"):
        gs.collect(model, (x, y), mean, reduction="average")


def test_class_weights_ignored_positions_and_mean_squared_error() -> None:
    model, x, y = BY_NAME["mlp"].make()
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    weighted = gs.collect(model, loader(x, y, 2), nn.CrossEntropyLoss(weight=weight))
    expected = gs.collect(model, (x, y), lambda f, t: weight[t] * F.cross_entropy(f, t, reduction="none"))
    assert_same(expected, weighted)
    # mean squared error: only the average over the batch is undone
    target = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mse = gs.collect(model, loader(x, target, 2), nn.MSELoss())
    assert_same(gs.collect(model, (x, target), lambda f, t: (f - t).square().mean(1)), mse)
    # token labels: ignored positions count neither in the loss nor as feature rows
    tokens, sequences, _ = BY_NAME["tokens"].make()
    labels = torch.arange(24).reshape(6, 4) % 3
    labels[0, 1] = labels[2, 3] = -100
    swapped = nn.Sequential(tokens, Transposed())
    stats = gs.collect(swapped, loader(sequences, labels, 2), nn.CrossEntropyLoss())
    assert stats["0.0"].features.n == 22
    masked = gs.collect(
        swapped, (sequences, labels), lambda f, t: F.cross_entropy(f, t, reduction="none", ignore_index=-100).sum(1)
    )
    assert_same(masked, stats)


class Transposed(nn.Module):
    """[n, t, c] -> [n, c, t], as cross-entropy over positions wants it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [("mean", 6), ("flatten", 6), ("each", 24), (0, 6), (-1, 6), (lambda inputs, target: inputs[..., 0] > 0, None)],
)
def test_token_selection(tokens: object, rows: int | None) -> None:
    model, x, y = BY_NAME["tokens"].make()
    stats = gs.collect(model, (x, y), tokens=tokens)  # type: ignore[arg-type]
    part = stats["0"].features
    assert part.n == (int((x[..., 0] > 0).sum()) if rows is None else rows)
    if tokens == 0:
        torch.testing.assert_close(part.joint.mean_h, x[:, 0].mean(0))


def test_token_selection_errors() -> None:
    model, x, y = BY_NAME["tokens"].make()
    with pytest.raises(InputError, match="tokens=9: layer '0' has 4 sites"):
        gs.collect(model, (x, y), tokens=9)
    with pytest.raises(InputError, match="tokens='cls'"):
        gs.collect(model, (x, y), tokens="cls")
    with pytest.raises(InputError, match=r"mask has shape \(6,\)"):
        gs.collect(model, (x, y), tokens=lambda inputs, target: target > 0)


def test_module_outputs_and_named_outputs() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, pixels: Tensor) -> dict[str, Tensor]:
            return {"scores": self.inner(pixels), "extra": pixels}

    inner, x, y = BY_NAME["encoder"].make()
    model = Wrapped(inner)
    batches = [{"pixels": x[:3], "labels": y[:3]}, {"pixels": x[3:], "labels": y[3:]}]
    with pytest.raises(InputError, match=r"keys \['scores', 'extra'\]; name one with output="):
        gs.collect(model, batches, sample_losses)
    stats = gs.collect(model, batches, sample_losses, output="scores", outputs="inner.0", tokens=0)
    assert stats.outputs["inner.0"].n == 6
    torch.testing.assert_close(stats.outputs["inner.0"].joint.mean_h, inner[0](x)[:, 0].mean(0).detach())
    with pytest.raises(InputError, match="output='logits' is not in what the model returned"):
        gs.collect(model, batches, sample_losses, output="logits")


def test_float32_sums_and_gram_choice() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model.float(), (x.float(), y), F.cross_entropy, dtype=torch.float32, gram=False)
    assert stats["0"].D.dtype == torch.float32
    assert stats["0"].features.classes.within is None
    with pytest.raises(InputError, match="dtype=torch.bfloat16"):
        gs.collect(model, (x, y), dtype=torch.bfloat16)


def test_real_targets_of_the_users_choice() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), targets=lambda inputs, target: inputs[:, :2])
    torch.testing.assert_close(stats["2"].features.joint.mean_y, x[:, :2].mean(0))
    assert isinstance(stats["0"].features.moments, Moments)
    assert isinstance(gs.collect(model, (x, y))["0"].features.classes, ClassMoments)


def test_dropout_is_off_and_everything_is_given_back() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 3
    model[1].eval()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = gs.collect(model, (x, y), F.cross_entropy)
    assert_same(first, gs.collect(model, loader(x, y, 2), F.cross_entropy))
    assert torch.equal(rng, torch.get_rng_state())
    assert [m.training for m in model] == [True, False, True, True]
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(LayerError, match="BatchNorm1d '2' is in train mode"):
        gs.collect(model, (x, y), F.cross_entropy, eval_mode=False)


def test_a_layer_whose_rows_are_not_samples_is_noted() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            n, t, d = x.shape
            return self.head(self.inner(x.reshape(n * t, d)).reshape(n, t, -1).mean(1))

    model = Folded().double()
    x = torch.randn(6, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stats = gs.collect(model, (x, torch.arange(6) % 3), F.cross_entropy)
    assert stats["inner"].features is None
    assert "12 rows for 6 samples" in joined(stats.notes["inner"]).text
    assert stats["inner"].D.shape == (4, 5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "yielded no batch"),
        ([(torch.zeros(0, 5), torch.zeros(0))], "batch 0 of the loader is empty"),
        ([(torch.ones(2, 5), torch.ones(2), torch.ones(2))], "a tuple of 3 items; pass unpack="),
        ([(torch.ones(2, 5), torch.zeros(3, dtype=torch.long))], "2 inputs but 3 targets"),
        ([torch.ones(2, 5)], "has no target for the loss"),
        (["text"], "the loader yields str"),
        (3, "loader is a int"),
    ],
)
def test_odd_loaders(data: object, message: str) -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    with pytest.raises(InputError, match=message):
        gs.collect(model, data, F.cross_entropy)


def test_not_finite_inputs_weights_and_losses() -> None:
    model, x, y = BY_NAME["mlp"].make()
    bad = x.clone()
    bad[2, 1] = float("nan")
    with pytest.raises(NumericalError, match="output is NaN or infinite in batch 1"):
        gs.collect(model, loader(bad, y, 2), F.cross_entropy)
    with pytest.raises(NumericalError, match="the loss is -?inf in batch 0"):
        gs.collect(model, (x, y), lambda f, t: f.sum(1) * float("inf"))


def test_a_loss_that_does_not_reach_a_layer() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    x, y = torch.ones(4, 5), torch.arange(4) % 3
    with pytest.raises(LayerError, match="the loss does not reach it; leave it out of layers="):
        gs.collect(TwoHeads(), (x, y), F.cross_entropy, output=0, layers=["a", "b"])
    stats = gs.collect(TwoHeads(), (x, y), F.cross_entropy, output=0, jacobians=True)
    assert stats["b"].D is None
    assert "the loss does not reach it" in joined(stats.notes["b"]).text
    assert gs.collect(TwoHeads(), (x, y), F.cross_entropy, output=0, layers="a")["a"].D.shape == (3, 5)


def test_a_data_loader_and_integer_targets_of_other_shapes() -> None:
    model, x, y = BY_NAME["mlp"].make()
    data = DataLoader(TensorDataset(x, y), batch_size=4)
    assert_same(gs.collect(model, (x, y), F.cross_entropy), gs.collect(model, data, F.cross_entropy))
    stats = gs.collect(model, (x, torch.ones(6, 2, dtype=torch.long)))
    assert stats["0"].features is None
    assert "integer targets of shape (6, 2) do not give one label to each of 6 rows" in joined(stats.notes["0"]).text
    with pytest.raises(InputError, match="loss='mse' is not callable"):
        gs.collect(model, (x, y), "mse")  # type: ignore[arg-type]


def test_reference_of_another_shape() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    other = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)).double()
    with pytest.raises(LayerError, match="the reference network has no layer '0' of the same shape"):
        gs.collect(model, x, reference=other)


def test_not_collected_says_what_to_ask_for() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), features=False)
    with pytest.raises(InputError, match="layer '0': this was not collected; collect with jacobians=True"):
        _ = stats["0"].K
    with pytest.raises(LayerError, match="no statistics of layer '9'; there are: 0, 2, 4"):
        _ = stats["9"]


class Backbone(nn.Module):
    """Registered in another order than it runs, with a part that has no gradient graph."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.frozen = nn.Linear(4, 3), nn.Linear(5, 4), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.head(torch.tanh(self.body(x)))


def test_execution_order_and_parts_without_a_graph() -> None:
    model = Backbone().double()
    x = torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    kept = x.clone().requires_grad_()
    stats = gs.collect(model, (kept, y), F.cross_entropy, jacobians=True)
    assert list(stats.layers) == ["frozen", "body", "head"]
    assert kept.grad is None
    assert stats["frozen"].D is None
    assert "no_grad" in joined(stats.notes["frozen"]).text
    table = gs.measure(model, (x, y), F.cross_entropy, measures=["nc3", "nfa", "gradient_norm"])
    assert table["head"]["nc3"] is not None
    assert table["body"]["nc3"] is None
    assert table["frozen"]["gradient_norm"] is None


def test_samples_that_are_not_the_first_axis_of_the_output() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    twin = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False).double()
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first = gs.collect(layer, x, jacobians=True)
    second = gs.collect(twin, x.transpose(0, 1), jacobians=True, batch_dim=1)
    for name in first.layers:
        torch.testing.assert_close(first[name].K, second[name].K)
    flat = nn.Sequential(nn.Linear(4, 2), nn.Flatten(0, 1)).double()
    with pytest.raises(InputError, match=r"the output has shape \(15, 2\) for 3 samples; bring it to"):
        gs.collect(flat, x, jacobians=True)


def test_an_unbatched_input_is_one_sample() -> None:
    linear = nn.Linear(3, 2, bias=False).double()
    x = torch.rand(3, dtype=torch.float64)
    W = linear.weight.detach()
    torch.testing.assert_close(gs.agop(linear, x)["(model)"], W.T @ W)
    assert gs.collect(linear, [x]).n == 1


def test_labels_that_mark_nothing_and_labels_that_are_too_large() -> None:
    model, x, y = BY_NAME["mlp"].make()
    marked = y.clone()
    marked[0] = -100
    assert gs.collect(model, (x, marked))["0"].features.n == 5
    with pytest.raises(InputError, match="labels reach 2000000002"):
        gs.collect(model, (x, y + 2_000_000_000))
    with pytest.raises(NumericalError, match="the targets are NaN"):
        gs.collect(model, (x, torch.full((6, 1), float("nan"), dtype=torch.float64)))
    with (
        pytest.warns(UserWarning, match="target size"),
        pytest.raises(InputError, match="broadcast against each other"),
    ):
        gs.collect(nn.Linear(5, 1).double(), (x, x[:, 0]), nn.MSELoss())


def test_accuracy_needs_to_know_the_class_axis() -> None:
    conv = nn.Conv1d(2, 5, 1).double()
    x = torch.randn(4, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(28).reshape(4, 7) % 5
    stats = gs.collect(conv, (x, y), F.cross_entropy, features=False)
    assert stats.network.accuracy == pytest.approx(float((conv(x).argmax(1) == y).double().mean()))
    assert gs.collect(conv, (x[..., :5], y[:, :5]), F.cross_entropy, features=False).network.accuracy is None
