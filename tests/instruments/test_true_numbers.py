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


def test_real_targets_of_a_loss_of_classification_are_centred_as_labels_are() -> None:
    x = draw(60, 5)
    y = (draw(60, seed=4) < 0.8).long()
    model = mlp(1)
    names = ["target_linearity", "surrogate"]
    found = measure(model, x, y[:, None].double(), 13, nn.BCEWithLogitsLoss(), names)
    classes = gs.measure_features({"0": x}, y, measures="target_linearity")
    assert found["0"]["target_linearity"] == pytest.approx(classes["0"]["target_linearity"], rel=1e-10)
    soft = draw(60, CLASSES, seed=3).softmax(1)
    centred = soft - soft.mean(0)
    residual = centred - x @ torch.linalg.lstsq(x, centred).solution
    found = measure(mlp(), x, soft, 13, nn.CrossEntropyLoss(), names)
    assert found["0"]["target_linearity"] == pytest.approx(1 - float(residual.square().sum() / centred.square().sum()))
    assert found["0"]["surrogate"] == pytest.approx(float((x.mT @ centred).square().sum()))
    far = measure(mlp(), x, soft + 5, 13, nn.MSELoss(), names)
    assert far["0"]["target_linearity"] < 0
    assert "intercept=True" in str(far.notes["0.target_linearity"])


class Gate(nn.Module):
    """A layer that runs for batches with a large first number alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gated, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(self.gated(h).tanh() if x[0, 0] > 5 else h)


@pytest.mark.parametrize(("batches", "doubtful"), [(1, True), (20, False)])
def test_a_layer_that_few_samples_reach_says_so(batches: int, doubtful: bool) -> None:
    x, y = draw(400, 5), labels(400)
    x[: 10 * batches : 10, 0] = 9
    table = measure(Gate().double(), x, y, 10, nn.CrossEntropyLoss(), ["target_linearity", "nfa"])
    assert f"{10 * batches} of 400 samples reach it" in str(table.notes["gated"])
    assert "first" not in table.notes
    note = table.notes.get("gated.target_linearity")
    assert (note is not None and note.kind == "doubtful") == doubtful
    line = next(line for line in str(table).splitlines() if line.startswith("gated"))
    assert ("*" in line.split()[1]) == doubtful


class Several(nn.Module):
    """A model that returns two outputs, by name or by place."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.by_name = nn.Linear(5, CLASSES), nn.Linear(CLASSES, 2), by_name

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        outputs = h, self.second(h.tanh())
        return dict(zip("ab", outputs, strict=True)) if self.by_name else outputs


@pytest.mark.parametrize("by_name", [True, False])
def test_columns_of_gradients_need_no_output(by_name: bool) -> None:
    model, x, y = Several(by_name).double(), draw(N, 5), labels(N)

    def loss(returned: Any, batch: Any) -> Tensor:
        first, second = returned.values() if by_name else returned
        return F.cross_entropy(first, batch[1], reduction="none") + second.square().sum(1)

    table = measure(model, x, y, 6, loss, None)
    value = loss(model(x), (x, y)).mean()
    assert table.network["loss"] == pytest.approx(value.item(), rel=1e-12)
    assert table["first"]["gradient_norm"] == pytest.approx(own_gradient(model, value, "first.weight"), rel=1e-10)
    assert table["first"]["nfa"] is None
    assert "output=" in str(table.notes["(output)"])
    with pytest.raises(InputError, match="output="):
        measure(model, x, y, 6, nn.CrossEntropyLoss(), None)


class OwnLoss(nn.Module):
    """An autoencoder that returns its own loss and takes no labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(5, 3), nn.Linear(3, 5)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        decoded = self.decoder(self.encoder(pixels).tanh())
        return {"loss": (decoded - pixels).square().mean(), "logits": decoded}


def test_a_model_that_returns_its_loss_without_labels_has_gradients() -> None:
    model, x = OwnLoss().double(), draw(24, 5)
    table = gs.measure(model, [{"pixels": part} for part in x.split(6)], progress=False)
    value = model(x)["loss"]
    assert table.network["loss"] == pytest.approx(value.item(), rel=1e-12)
    expected = own_gradient(model, value, "encoder.weight")
    assert table["encoder"]["gradient_norm"] == pytest.approx(expected, rel=1e-10)
    assert "gradient_norm" not in gs.measure(mlp(), draw(24, 5), progress=False).columns


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Each sample against all others of the batch."""
    scores = F.normalize(output, dim=1) @ F.normalize(output, dim=1).mT
    return F.cross_entropy(scores / 0.5, torch.arange(len(output)).roll(1), reduction="none")


@pytest.mark.parametrize(
    ("loss", "options", "coupled"),
    [
        (contrastive, {}, True),
        (lambda o, t: contrastive(o, t).mean(), {"reduction": "mean"}, True),
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), {}, False),
        (lambda o, t: F.cross_entropy(o, t), {"reduction": "mean"}, False),
        (lambda returned, batch: F.cross_entropy(returned, batch[1], reduction="none"), {}, False),
        (lambda o, t: F.cross_entropy(o + torch.randn_like(o), t, reduction="none"), {}, False),
    ],
)
def test_losses_that_couple_samples_are_noted(loss: Any, options: dict[str, Any], coupled: bool) -> None:
    table = measure(mlp(), draw(N, 5), labels(N), N, loss, None, **options)
    assert ("other samples of its batch" in str(table.notes.get("(loss)"))) == coupled


class Inside(nn.Module):
    """A layer inside torch.func.jvp, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(5, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, tangent = torch.func.jvp(lambda v: self.inside(v).tanh(), (x,), (torch.ones_like(x),))
        return self.outside(h + tangent)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch loads its rules of forward mode with it
def test_a_forward_that_differentiates_by_torch_func_ends_no_table() -> None:
    model, x, y = Inside().double(), draw(N, 5), labels(N)
    table = measure(model, x, y, 6, nn.CrossEntropyLoss(), None)
    value = F.cross_entropy(model(x), y)
    assert table["outside"]["gradient_norm"] == pytest.approx(own_gradient(model, value, "outside.weight"), rel=1e-10)
    assert "torch.func" in str(table.notes["inside"])


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
