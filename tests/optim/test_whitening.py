"""What a whitened step does to the weights: Gram of the proposal, nearest to before, for every kind of layer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
import reference
from gramscope.errors import InputError, LayerError, NumericalError, ResultWarning
from gramscope.layers.kinds import Layer
from gramscope.layers.select import LayerSelector, select_layers


def gram(W: Tensor) -> Tensor:
    return W.double().mT @ W.double()


def fill(model: nn.Module, seed: int = 0, size: float = 1.0) -> None:
    """Random parameters and gradients, without touching the global random state."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0
        p.data = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)
        p.grad = (size * scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


class Everything(nn.Module):
    """One of each kind of weight matrix, some equal in shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4)
        self.depthwise = nn.Conv1d(6, 6, 3, groups=6)
        self.attention = nn.MultiheadAttention(8, 2)
        self.wide, self.tall, self.same = nn.Linear(20, 8), nn.Linear(6, 16), nn.Linear(20, 8)
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(3, 4))
        self.readout = nn.Linear(8, 3)


def matrices(model: nn.Module) -> dict[str, Tensor]:
    return {layer.name: layer.weight().clone() for layer in layers_of(model)}


def layers_of(model: nn.Module) -> list[Layer]:
    """All layers but the lookup tables, which are not whitened."""
    return [layer for layer in select_layers(model) if not isinstance(layer.module, nn.Embedding)]


@pytest.mark.parametrize("method", ["auto", "svd"])
@pytest.mark.parametrize("lr", [1e-4, 1e-2, 0.5])
@pytest.mark.parametrize("kind", [gs.GramWhitened, gs.GramFixed])
def test_every_layer_gets_the_gram_and_the_nearest_weights(kind: type, lr: float, method: str) -> None:
    model, plain = Everything(), Everything()
    fill(model), fill(plain)
    before = matrices(model)
    torch.optim.SGD(plain.parameters(), lr=lr).step()
    proposal = matrices(plain)
    kind(torch.optim.SGD(model.parameters(), lr=lr), model, method=method).step()
    for name, W in matrices(model).items():
        old, new = (before[name], proposal[name]) if kind is gs.GramWhitened else (proposal[name], before[name])
        stacks = [x.reshape(-1, *x.shape[-2:]) for x in (W, old, new)]
        for w, o, n in zip(*stacks, strict=True):
            assert (gram(w) - gram(n)).norm() < 2e-7 * gram(n).norm(), name
            least = (reference.nearest_with_gram(o, n) - o).norm()
            assert (w.double() - o).norm() <= (1.02 if method == "auto" else 1) * least + 1e-6 * n.norm(), name
    whitened = {id(layer.parameter) for layer in layers_of(model)}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if id(p) not in whitened:
            assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("shape", "kind", "decades"),
    [
        ((24, 24), gs.GramWhitened, 0),
        ((12, 12), gs.GramWhitened, 5),
        ((40, 8), gs.GramWhitened, 3),
        ((8, 40), gs.GramFixed, 2),
    ],
)
def test_zero_gradient_leaves_the_weights_as_they_are(shape: tuple[int, int], kind: type, decades: int) -> None:
    generator = torch.Generator().manual_seed(0)
    U, _, Vh = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    W = ((U * torch.logspace(0, -decades, min(shape))) @ Vh).requires_grad_()
    W.grad = torch.zeros_like(W)
    start = W.detach().clone()
    optimizer = kind(torch.optim.SGD([W], lr=0.1, momentum=0.9))
    for _ in range(1000):
        optimizer.step()
    assert (W - start).norm() < 1e-6 * start.norm()


def test_gram_fixed_never_changes_the_gram() -> None:
    model = nn.Linear(12, 9)
    fill(model, size=3.0)
    start = gram(model.weight.detach())
    optimizer = gs.GramFixed(torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), model)
    weight = model.weight.detach().clone()
    for _ in range(200):
        optimizer.step()
    assert (gram(model.weight.detach()) - start).norm() < 3e-6 * start.norm()
    assert (model.weight - weight).norm() > 0.1 * weight.norm()


def test_parameters_without_gradient_are_not_touched() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    fill(model)
    model[0].weight.grad = None
    before = model[0].weight.detach().clone()
    for kind in (gs.GramWhitened, gs.GramFixed):
        optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1), model)
        optimizer.step()
        assert torch.equal(model[0].weight, before)


class Unusual(torch.optim.SGD):
    """Writes past autograd, which counts no change then, or drops the gradients in its step."""

    def __init__(self, parameters: object, how: str) -> None:
        super().__init__(parameters, lr=0.1)  # type: ignore[arg-type]
        self.how = how

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if self.how == "past autograd":
                p.data.sub_(0.1 * p.grad)
            else:
                with torch.no_grad():
                    p.sub_(0.1 * p.grad)
                p.grad = None


@pytest.mark.parametrize("how", ["past autograd", "no gradients left"])
def test_what_any_optimizer_changes_is_corrected(how: str) -> None:
    models = [nn.Linear(20, 8), nn.Linear(20, 8)]
    for model, inner in zip(models, (torch.optim.SGD(models[0].parameters(), lr=0.1), None), strict=True):
        fill(model)
        gs.GramWhitened(inner or Unusual(model.parameters(), how), model).step()
    torch.testing.assert_close(*(model.weight for model in models))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)).to(dtype)
    plain = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)).to(dtype)
    fill(model), fill(plain)
    before = matrices(model)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model).step()
    for name, W in matrices(model).items():
        assert W.dtype == dtype
        proposal, rounding = matrices(plain)[name], 2 * torch.finfo(dtype).eps * W.double().norm() + 1e-14
        assert (gram(W) - gram(proposal)).norm() < 2 * rounding * W.double().norm()
        least = (reference.nearest_with_gram(before[name], proposal) - before[name]).norm()
        assert (W.double() - before[name]).norm() < (1.02 if dtype != torch.float64 else 1) * least + rounding


def test_step_inside_autocast_keeps_full_precision() -> None:
    model = nn.Linear(16, 8)
    for lr in (1e-3, 0.1):
        fill(model)
        plain = model.weight.detach() - lr * model.weight.grad
        optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=lr), model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
        assert (gram(model.weight.detach()) - gram(plain)).norm() < 2e-7 * gram(plain).norm()


def test_channels_last_and_transposed_memory() -> None:
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    other = nn.Conv2d(4, 6, 3)
    fill(model), fill(other)
    model = model.to(memory_format=torch.channels_last)
    for m in (model, other):
        gs.GramWhitened(torch.optim.SGD(m.parameters(), lr=0.1), m).step()
    torch.testing.assert_close(model.weight, other.weight)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [gs.GramWhitened, gs.GramFixed])
def test_a_step_that_fails_names_the_parameter_and_changes_nothing(kind: type) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    fill(model)
    optimizer.step()
    kept = [
        p.detach().clone() for p in (*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values()))
    ]
    model[1].weight.grad[0, 0] = float("nan")
    with pytest.raises(
        NumericalError, match=r"the gradient of 1\.weight has NaN or infinite values; nothing was changed"
    ):
        optimizer.step()
    now = [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    model[1].weight.grad = torch.full((4, 4), 3e38)
    optimizer.param_groups[0]["lr"] = 1e9
    with pytest.raises(
        NumericalError, match=r"SGD left NaN or infinite values in 1\.weight; all parameters have their old"
    ):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=False))
    model[1].weight.grad = torch.zeros(4, 4)
    model[0].bias.grad[0] = float("inf")
    with pytest.raises(NumericalError, match=r"the gradient of 0\.bias has NaN"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=False))


@pytest.mark.parametrize("kind", [gs.GramWhitened, gs.GramFixed])
def test_a_closure_that_fails_changes_nothing_and_the_next_one_counts(kind: type) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    kept = [p.detach().clone() for p in model.parameters()]

    def closure(value: float) -> float:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        model[1].weight.grad[0, 0] = value
        return 0.0

    with pytest.raises(NumericalError, match=r"the gradient of 1\.weight has NaN"):
        optimizer.step(lambda: closure(math.nan))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=True))
    assert not optimizer.state  # momentum has not seen it
    optimizer.step(lambda: closure(1.0))  # gradients from before it do not count
    assert not torch.equal(model[0].weight, kept[0])


def test_an_optimizer_that_raises_half_way_leaves_no_parameter_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the data are gone")
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer = gs.GramWhitened(torch.optim.LBFGS(model.parameters(), max_iter=5), model)
    kept = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OSError, match="the data are gone"):
        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("kind", [gs.GramWhitened, gs.GramFixed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (64, 3), (3, 64)])
def test_steps_near_the_largest_number_end_finite_or_are_refused(
    kind: type, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    for first in (torch.zeros(shape), torch.ones(shape), torch.randn(shape)):
        for size in (0.5, 1.0):
            weight = nn.Parameter(first.to(dtype))
            weight.grad = torch.full(shape, size * torch.finfo(dtype).max, dtype=dtype)
            optimizer = kind(torch.optim.SGD([weight], lr=1.0))
            try:
                optimizer.step()
            except NumericalError as error:
                assert "parameter 0" in str(error) and "old values" in str(error)  # noqa: PT017, PT018
                assert torch.equal(weight, first.to(dtype))
            assert bool(weight.isfinite().all())


@pytest.mark.parametrize("kind", [gs.GramWhitened, gs.GramFixed])
@pytest.mark.parametrize("factor", [2.0, 2.5, 1.0])
def test_steps_that_overshoot(kind: type, factor: float) -> None:
    """``W₂ = (1 − factor) W₁``: W₁W₂ᵀ is negative definite, or zero."""
    model = nn.Linear(12, 9)
    fill(model)
    W = model.weight.detach().clone()
    model.weight.grad = factor * W
    kind(torch.optim.SGD(model.parameters(), lr=1.0), model).step()
    expected = W if kind is gs.GramFixed else abs(1 - factor) * W
    assert (gram(model.weight.detach()) - gram(expected)).norm() < 2e-7 * gram(W).norm()


def test_two_thousand_steps_keep_to_the_gram_of_float64() -> None:
    """A net in real training beside a replay in float64 that whitens exactly the same proposals' Grams."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=g)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] * x[:, 2] > 0).long()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = gs.GramWhitened(plain, model)
    names = ["0.weight", "2.weight", "4.weight"]
    proposed: dict[str, Tensor] = {}
    plain.register_step_post_hook(lambda *_: proposed.update({n: gram(model.get_parameter(n).detach()) for n in names}))
    total = {name: torch.zeros(()).double() for name in names}
    for _ in range(2000):
        rows = torch.randint(256, (32,), generator=g)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        for name in names:  # what every step adds to the Gram beyond its proposal, summed with its sign
            total[name] = total[name] + gram(model.get_parameter(name).detach()) - proposed[name]
    for name in names:
        assert total[name].norm() < 2e-6 * gram(model.get_parameter(name).detach()).norm(), name


# --- which parameters --------------------------------------------------------------------------------------------------


def test_summary_says_everything() -> None:
    model = Everything()
    table = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model).summary()
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in table.splitlines()}
    assert lines["conv.weight"] == "conv.weight 8 × 27 whitened"
    assert lines["grouped.weight"] == "grouped.weight 4 of 3 × 18 whitened"
    assert lines["attention.in_proj_weight[k_proj]"].endswith("8 × 8 whitened")
    assert "lookup table" in lines["embedding.weight"]
    assert "1-dimensional" in lines["norm.weight"]
    assert "not whitened" in lines["scale"]
    assert len(lines) == 2 + sum(1 for _ in model.parameters()) + 2  # three projections share one parameter


def test_readout_can_be_left_to_the_optimizer() -> None:
    model, plain = Everything(), Everything()
    fill(model), fill(plain)
    optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model, readout=False)
    assert "readout.weight" in optimizer.summary()
    assert "left out by readout=False" in optimizer.summary()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(model.readout.weight, plain.readout.weight)
    assert not torch.equal(model.wide.weight, plain.wide.weight)


@pytest.mark.parametrize("layers", ["0", ["0"], "[01]", nn.Conv2d])
def test_layers_by_name_glob_and_type(layers: LayerSelector) -> None:
    model, plain = (nn.Sequential(nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), nn.Linear(5, 4)) for _ in range(2))
    fill(model), fill(plain)
    optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model, layers=layers)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(model[2].weight, plain[2].weight)
    assert not torch.equal(model[0].weight, plain[0].weight)
    assert "2.weight                not whitened: not among layers=" in optimizer.summary()


def test_equal_names_are_told_apart() -> None:
    """Of two modules, say; nothing is dropped."""
    a, b = nn.Linear(150, 150, bias=False), nn.Linear(140, 140, bias=False)
    groups = [{"params": list(module.named_parameters())} for module in (a, b)]
    optimizer = gs.GramWhitened(torch.optim.SGD(groups, lr=0.01))
    summary = optimizer.summary()
    assert summary.count("whitened") == 2
    assert "weight (2)" in summary
    for _ in range(2):
        (a(torch.ones(8, 150)).square().mean() + b(torch.ones(8, 140)).square().mean()).backward()
        optimizer.step()


def test_without_a_model_every_matrix_is_taken_and_groups_are_mentioned() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Linear(6, 5))
    fill(model)
    with pytest.warns(ResultWarning, match="group 0, parameter 0: taken as one matrix"):
        optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "6 × 36" in optimizer.summary()
    optimizer = gs.GramWhitened(torch.optim.SGD(model[1].named_parameters(), lr=0.1))
    assert optimizer.summary().splitlines()[2].split() == ["weight", "5", "×", "6", "whitened"]


def test_shared_and_computed_weights_are_explained() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[1].weight = model[0].weight
    nn.utils.parametrizations.weight_norm(model[2])
    summary = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model).summary()
    assert "not whitened: the same tensor as 0.weight" in summary
    assert "not whitened: computed by a parametrisation" in summary


def test_layers_outside_the_optimizer_are_explained() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    optimizer = gs.GramWhitened(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    assert "not whitened: is not in the optimizer" in optimizer.summary()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_frozen_and_empty_weights_are_explained() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 0))
    model[0].weight.requires_grad_(False)
    optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert "whitened, but frozen now" in optimizer.summary().splitlines()[2]
    assert any(line.startswith("2.weight") and "is empty" in line for line in optimizer.summary().splitlines())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def test_bad_arguments() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="not type"):
        gs.GramWhitened(torch.optim.SGD)
    with pytest.raises(InputError, match="'exact'; choose one of"):
        gs.GramWhitened(sgd, model, method="exact")
    with pytest.raises(InputError, match="readout=False need model="):
        gs.GramWhitened(sgd, readout=False)
    with pytest.raises(InputError, match="layers= and .* need model="):
        gs.GramWhitened(sgd, layers="0")
    with pytest.raises(LayerError, match="nope"):
        gs.GramWhitened(sgd, model, layers=["nope"])
    with pytest.raises(InputError, match="no weight matrix"):
        gs.GramWhitened(torch.optim.SGD([model[0].bias], lr=0.1))
    with pytest.raises(InputError, match="differentiable"):
        gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True), model)


class Model(nn.Module):
    """A language model with a head of its own, or one that is tied to the embedding."""

    def __init__(self, head: nn.Linear, words: int = 12, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(words, 6), nn.Linear(6, 6), head
        if tied:
            self.embed.weight = self.head.weight


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Model(nn.Linear(6, 12), 12, tied=True), "its weight is that of the embedding embed"),
        (Model(nn.Linear(6, 12)), "12 outputs of 6 inputs, a vocabulary rather than classes"),
        (Model(nn.Linear(6, 48)), "48 outputs of 6 inputs"),
        (Model(nn.Linear(6, 3)), ""),
        (nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 10)), ""),
    ],
)
def test_readout_auto_leaves_vocabularies_to_the_optimizer(model: nn.Module, why: str) -> None:
    last = "head.weight" if isinstance(model, Model) else "1.weight"
    optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    (line,) = [line for line in optimizer.summary().splitlines() if last in line or ("embed.weight" in line and why)][
        -1:
    ]
    assert ("left out by readout='auto'" in line and why in line) if why else line.endswith("whitened")
    taken = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model, readout=True).summary()
    assert "left out by readout" not in taken
    with pytest.raises(InputError, match="readout='always': give 'auto', True or False"):
        gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model, readout="always")
