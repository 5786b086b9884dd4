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
