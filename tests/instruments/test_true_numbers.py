"""Numbers of a table against plain autograd in float64, for losses and models of all kinds, however data are batched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import Around
from gramscope.errors import InputError

N, CLASSES = 23, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape: int, classes: int = CLASSES, seed: int = 1) -> Tensor:
    """Random labels."""
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def mlp(outputs: int = CLASSES, last: Callable[[], nn.Module] = nn.Identity, inputs: int = 5) -> nn.Module:
    """A net of two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs), last()).double()


def measure(model: nn.Module, x: Any, y: Any, size: int, loss: Any, measures: Any, **options: Any) -> gs.Table:
    """The table of data in batches of a size."""
    batches = [(a, b) for a, b in zip(x.split(size), y.split(size), strict=True)]
    return gs.measure(model, batches, loss, measures=measures, progress=False, **options)


def own_gradient(model: nn.Module, value: Tensor, parameter: str = "0.weight") -> float:
    """The norm of the gradient of a parameter."""
    return float(torch.autograd.grad(value, model.get_parameter(parameter))[0].norm())


W = torch.tensor([0.2, 3.0, 1.0, 0.05], dtype=torch.float64)
SOFT = draw(N, CLASSES, seed=3).softmax(1)
CRITERIA: dict[str, tuple[Any, Tensor, nn.Module]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), labels(N), mlp()),
    "weighted cross-entropy": (nn.CrossEntropyLoss(weight=W), labels(N), mlp()),
    "weighted, ignored": (nn.CrossEntropyLoss(weight=W, ignore_index=2), labels(N), mlp()),
    "weighted, smoothed": (nn.CrossEntropyLoss(weight=W, label_smoothing=0.2), labels(N), mlp()),
    "weighted function": (functools.partial(F.cross_entropy, weight=W, ignore_index=1), labels(N), mlp()),
    "soft labels": (nn.CrossEntropyLoss(), SOFT, mlp()),
    "weighted soft labels": (nn.CrossEntropyLoss(weight=W), SOFT, mlp()),
    "pixels": (nn.CrossEntropyLoss(weight=W, ignore_index=3), labels(N, 3), mlp(12, lambda: nn.Unflatten(1, (4, 3)))),
    "soft pixels": (
        nn.CrossEntropyLoss(), draw(N, 4, 3, seed=5).softmax(1), mlp(12, lambda: nn.Unflatten(1, (4, 3))),
    ),
    "negative log-likelihood": (nn.NLLLoss(weight=W), labels(N), mlp(last=lambda: nn.LogSoftmax(1))),
    "mean squared error": (nn.MSELoss(), draw(N, CLASSES), mlp()),
    "absolute error": (nn.L1Loss(), draw(N, CLASSES), mlp()),
    "Huber": (nn.HuberLoss(), draw(N, CLASSES), mlp()),
    "smooth absolute error": (nn.SmoothL1Loss(), draw(N, CLASSES), mlp()),
    "Poisson": (nn.PoissonNLLLoss(), draw(N, CLASSES).abs(), mlp()),
    "divergence": (nn.KLDivLoss(), SOFT, mlp(last=lambda: nn.LogSoftmax(1))),
    "divergence of batches": (nn.KLDivLoss(reduction="batchmean"), SOFT, mlp(last=lambda: nn.LogSoftmax(1))),
    "binary cross-entropy": (nn.BCELoss(weight=W), labels(N, 4, classes=2).double(), mlp(last=nn.Sigmoid)),
    "binary logits": (nn.BCEWithLogitsLoss(weight=W, pos_weight=W), labels(N, 4, classes=2).double(), mlp()),
    "hinge": (nn.HingeEmbeddingLoss(), 2.0 * labels(N, 4, classes=2).double() - 1, mlp()),
    "soft margin": (nn.SoftMarginLoss(), 2.0 * labels(N, 4, classes=2).double() - 1, mlp()),
    "multi margin": (nn.MultiMarginLoss(weight=W), labels(N), mlp()),
    "multi-label margin": (nn.MultiLabelSoftMarginLoss(weight=W), labels(N, 4, classes=2).double(), mlp()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", CRITERIA)
def test_the_loss_is_the_criterion_on_all_data_however_they_are_batched(name: str) -> None:
    criterion, y, model = CRITERIA[name]
    x = draw(N, 5)
    value = criterion(model(x), y)
    for size in (23, 5):
        table = measure(model, x, y, size, criterion, "gradient_norm")
        assert table.network["loss"] == pytest.approx(value.item(), rel=1e-12)
    assert table["0"]["gradient_norm"] == pytest.approx(own_gradient(model, value), rel=1e-10)
    assert ("positions" in table.network) == ("pixels" in name)
    assert ("(positions)" in table.notes) == ("pixels" in name)


def test_every_criterion_of_an_output_and_a_target_is_tested() -> None:
    taken = {type(criterion) for criterion, *_ in CRITERIA.values()}
    of_three = {nn.CosineEmbeddingLoss, nn.CTCLoss, nn.GaussianNLLLoss, nn.MarginRankingLoss, nn.TripletMarginLoss,
                nn.TripletMarginWithDistanceLoss, nn.AdaptiveLogSoftmaxWithLoss}  # fmt: skip
    found = {name for name in dir(nn) if name.endswith("Loss")} - {kind.__name__ for kind in (*taken, *of_three)}
    assert found <= {"MultiLabelMarginLoss", "NLLLoss2d", "LinearCrossEntropyLoss"}


def test_order_and_readout_come_from_all_layers_that_ran() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    x, y = draw(N, 5), labels(N)
    names = ["nc1", "nc3", "nc4", "nfa_depth", "target_linearity"]
    whole = measure(model, x, y, 6, nn.CrossEntropyLoss(), names)
    for chosen in (["0", "2"], ["4"], ["2"]):
        some = measure(model, x, y, 6, nn.CrossEntropyLoss(), names, layers=chosen)
        assert list(some) == chosen
        for layer in chosen:
            assert dict(some[layer]) == pytest.approx(dict(whole[layer]), nan_ok=True)


def test_a_negative_linearity_asks_for_an_intercept() -> None:
    table = measure(mlp(), draw(N, 5), draw(N, CLASSES, seed=3) + 5, 13, nn.MSELoss(), "target_linearity")
    assert table["0"]["target_linearity"] < 0
    assert "intercept=True" in str(table.notes["0.target_linearity"])


def test_a_tenth_of_the_samples_and_four_rows_for_each_feature_are_enough() -> None:
    def gate(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        return m.last(m.gated(h).tanh() if x[0, 0] > 5 else h)

    layers = {
        "first": nn.Linear(5, 7),
        "gated": nn.Linear(7, 7),
        "last": nn.Linear(7, CLASSES),
        "unused": nn.Linear(2, 3),
    }
    model = Around(gate, **layers)
    x = draw(400, 5)
    x[:200:10, 0] = 9
    table = measure(model, x, labels(400), 10, nn.CrossEntropyLoss(), "target_linearity")
    assert "200 of 400 samples reach it" in str(table.notes["gated"])
    assert table.notes.keys().isdisjoint({"first", "gated.target_linearity"})
    assert "the forward did not call it" in str(table.notes["unused"])


def test_a_criterion_needs_one_output_and_gradients_a_loss() -> None:
    several = Around(lambda m, x: (m.layer(x), x), layer=nn.Linear(5, CLASSES))
    with pytest.raises(InputError, match="output="):
        measure(several, draw(N, 5), labels(N), 6, nn.CrossEntropyLoss(), None)
    assert "gradient_norm" not in gs.measure(mlp(), draw(24, 5), progress=False).columns


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), {}),
        (lambda o, t: F.cross_entropy(o, t), {"reduction": "mean"}),
        (lambda returned, batch: F.cross_entropy(returned, batch[1], reduction="none"), {}),
        (lambda o, t: F.cross_entropy(o + torch.randn_like(o), t, reduction="none"), {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_of_single_samples_are_not_called_coupled(
    loss: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    table = measure(mlp().to(dtype), draw(N, 5).to(dtype), labels(N), N, loss, "gradient_norm", **options)
    assert "(loss)" not in table.notes


def test_estimates_show_their_errors_wherever_a_table_is_shown() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 300))
    table = gs.measure(model, (draw(N, 5).float(), labels(N)), nn.CrossEntropyLoss(), measures="nfa", sketch=8)
    error = table.errors["0"]["nfa"]
    shown = f"± {error:.1g}"
    trivial = str(table.notes["2.nfa"])
    assert "trivial" in trivial
    for text in (str(table), table._repr_html_(), str(table.by_block())):
        assert shown in text
        assert "*" in text
        assert "trivial" in text
    frame = table.to_pandas()
    assert frame.loc["0", "nfa ±"] == error
    assert frame.attrs["notes"]["2.nfa"] == trivial
