"""Case × column: models, losses and data whose numbers were once wrong or missing, against single samples in float64.

Each case says how it is measured, in batches of several sizes, and writes out its mean loss on all data. The rest follows from
plain autograd: ``python -m pytest tests/instruments/test_case_by_column.py -k "PINN and vcs"`` runs a part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import Around, normal, split
from comparing import collected
from gramscope.statistics.matrix_sums import Covariance, Kernel
from gramscope.statistics.sums import Plan
from quantised_layers import FORMATS
from single_samples import GAMMA, RIDGE, Oracle, zeros_added

pytestmark = pytest.mark.filterwarnings("ignore")
OF_LOSS = ("gradient_norm", "vcs_cosine", "vcs_residual", "fact", "crh_outputs_gw")
OF_JACOBIANS = ("nfa", "agop_trace")
OF_FEATURES = ("target_linearity", "surrogate", "feature_rank", "nc1")
WITH_TARGETS = ("target_linearity", "surrogate", "nc1")
OF_WEIGHTS = ("weight_norm", "effective_rank", "weight_change")
COLUMNS = ("loss", *OF_LOSS, *OF_JACOBIANS, *OF_FEATURES, *OF_WEIGHTS)
FOLDER = TemporaryDirectory()
N = 24
X, LABELS = normal(N, 5), torch.arange(N) * 7 % 4


@dataclass
class Case:
    """How a model is measured, and what the oracle needs.

    Args:
        model: as it is measured.
        data: what ``gs.measure`` gets, the same samples in different batches.
        total: from ``exact`` to the mean loss on all data; ``None`` for no loss.
        loss: what ``gs.measure`` gets.
        labels: of the samples, or of the rows of features; else ``targets``, centred where they stand for classes.
        samples: batches of one.
        output: from ``exact`` and a sample to the outputs of that sample.
        exact: the same model with ordinary layers in float64; ``None`` for ``model`` itself.
        reference: of both.
        prefix: what the measured model adds to the names of ``exact``.
        missing: columns that have no number, ``"layer.column"`` or ``"column"``, with words of the note.
        said: words of the notes, by key.
        limit: relative error.
    """

    model: nn.Module
    data: Sequence[Any]
    total: Callable[[nn.Module], Tensor] | None
    loss: Any = None
    labels: Tensor | None = None
    targets: Tensor | None = None
    samples: Sequence[Any] = ()
    output: Callable[[nn.Module, Any], Tensor] = lambda model, x: model(x)
    exact: nn.Module | None = None
    reference: tuple[nn.Module, nn.Module] | None = None
    prefix: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    limit: float = 1e-9


CASES: dict[str, Callable[[], Case]] = {}


def case(name: str) -> Callable[[Callable[[], Case]], None]:
    return lambda build: CASES.update({name: build})


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        return build().double()


def net(outputs: int = 4, last: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, outputs), last()))


def usual(
    model: nn.Module, loss: Any, y: Tensor = LABELS, x: Tensor = X, sizes: Sequence[int] = (N, 7), **more: Any
) -> Case:
    """Pairs (x, y) under a criterion, whose value on all data is the loss."""
    settings: dict[str, Any] = {
        "data": [split(x, y, size) for size in sizes], "total": lambda exact: loss(exact(x), y), "loss": loss,
        "samples": x.split(1), "labels": y if not y.is_floating_point() and y.dim() == 1 else None,
    }  # fmt: skip
    return Case(model, **settings | more)


# --- models and losses that differentiate ------------------------------------------------------------------------------

DIFFERENTIATES = "differentiates through this layer"


def potential(m: Any, x: Tensor, with_energy: bool) -> Tensor:
    """Forces −∂e/∂x, or (e, ∂e/∂x), plus a head that nothing differentiates."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.c(m.b(m.a(x).tanh()).tanh())
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    found = torch.cat([energy, slope], 1) if with_energy else -slope
    return found + m.plain(x.detach()).tanh()


def differentiating(with_energy: bool) -> Case:
    outputs = 5 + with_energy
    parts = {"a": nn.Linear(5, 7), "b": nn.Linear(7, 6), "c": nn.Linear(6, 1), "plain": nn.Linear(5, outputs)}
    model = seeded(lambda: Around(lambda m, x: potential(m, x, with_energy), **parts))
    y = normal(N, outputs, seed=2)
    missing = {f"{layer}.{column}": DIFFERENTIATES for layer in "abc" for column in OF_LOSS}
    if not with_energy:  # forces do not depend on what c returns
        missing |= {f"c.{column}": "the output does not depend on it" for column in OF_JACOBIANS}
    return usual(model, nn.MSELoss(), y, targets=y, missing=missing | {"nc1": "class labels"})


CASES["force field"] = lambda: differentiating(False)
CASES["PINN"] = lambda: differentiating(True)


@case("gradient penalty")
def _() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.x = x.detach().requires_grad_()  # of the last forward, which must be that of the batch
        return m.b(m.a(m.x).tanh())

    model = seeded(lambda: Around(forward, a=nn.Linear(5, 7), b=nn.Linear(7, 4)))

    def loss(returned: Any, batch: Any) -> Tensor:
        (slope,) = torch.autograd.grad(returned.logsumexp(1).sum(), model.x, create_graph=True)
        return F.cross_entropy(returned, batch[1], reduction="none") + slope.square().sum(1)

    missing = dict.fromkeys(OF_LOSS, DIFFERENTIATES)
    return usual(model, loss, total=lambda exact: loss(exact(X), (X, LABELS)).mean(), missing=missing)


@case("jvp in forward")
def _() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        h, tangent = torch.func.jvp(lambda v: m.inside(v).tanh(), (x,), (torch.ones_like(x),))
        return m.outside(h + tangent)

    model = seeded(lambda: Around(forward, inside=nn.Linear(5, 3), outside=nn.Linear(3, 4)))
    plain = seeded(
        lambda: Around(lambda m, x: m.outside(derived(m.inside, x)), inside=nn.Linear(5, 3), outside=nn.Linear(3, 4))
    )
    plain.load_state_dict(model.state_dict())
    del plain._modules["inside"]  # the oracle has the layers that are measured
    plain.inside = lambda v: F.linear(v, model.inside.weight, model.inside.bias)
    return usual(model, nn.CrossEntropyLoss(), exact=plain, said={"inside": "torch.func"})


def derived(layer: Any, x: Tensor) -> Tensor:
    """tanh and its derivative along (1, …, 1), written out."""
    h = layer(x).tanh()
    return h + (1 - h.square()) * (layer(torch.ones_like(x)) - layer(torch.zeros_like(x)))


# --- weights whose gradient is not Σ δhᵀ ----------------------------------------------------------------------------------

ANOTHER_WAY = {f"a.{column}": "the weight gets gradients another way" for column in OF_LOSS}


class Doubled(torch.autograd.Function):
    """The identity, whose backward doubles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class DoublesItsGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Doubled.apply(self.weight), self.bias)


def recomputed(m: Any, x: Tensor) -> Tensor:
    """A layer whose inputs are twice as large when its activations are computed again."""
    inside = lambda x: m.a(x * (2 if torch._C._current_graph_task_id() >= 0 else 1))  # noqa: E731
    return m.b(torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False).tanh())


def another_way(forward: Callable[[Any, Tensor], Tensor], kind: type[nn.Linear] = nn.Linear, **more: Any) -> Case:
    model = seeded(lambda: Around(forward, a=kind(5, 7), b=nn.Linear(7, 4)))
    return usual(model, more.pop("loss", nn.CrossEntropyLoss()), missing=ANOTHER_WAY, **more)


CASES["second use"] = lambda: another_way(lambda m, x: m.b(m.a(x).tanh() + F.linear(x, m.a.weight)))
CASES["own backward"] = lambda: another_way(lambda m, x: m.b(m.a(x).tanh()), DoublesItsGradient)
CASES["recomputed with other values"] = lambda: another_way(recomputed)


@case("penalty on a weight")
def _() -> Case:
    def loss(returned: Any, batch: Any) -> Tensor:
        return F.cross_entropy(returned, batch[1], reduction="none") + 0.01 * own.model.a.weight.square().sum()

    own = another_way(
        lambda m, x: m.b(m.a(x).tanh()), loss=loss, total=lambda exact: loss(exact(X), (X, LABELS)).mean()
    )
    return own


@case("hook on a weight")
def _() -> Case:
    own = another_way(lambda m, x: m.b(m.a(x).tanh()))
    own.model.a.weight.register_hook(lambda gradient: gradient.clamp(max=0))
    return own


def test_the_first_batch_with_gradients_is_compared_and_the_model_stays_as_it_was() -> None:
    model = CASES["second use"]().model
    model.b.weight.requires_grad_(False)
    data = [(X, torch.full_like(LABELS, -100)), (X, LABELS)]
    table = gs.measure(model, data, nn.CrossEntropyLoss(), measures=["gradient_norm"], progress=False)
    assert table["a"]["gradient_norm"] is None
    assert table["b"]["gradient_norm"] is not None
    assert [(p.grad, bool(p._backward_hooks), p.requires_grad) for p in model.parameters()] == [
        (None, False, name != "b.weight") for name, _ in model.named_parameters()
    ]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_gradient_of_rounding_errors_is_not_taken_for_another(autocast: bool) -> None:
    x, y = normal(4096, 5), normal(4096, 3, seed=1)
    model = nn.Linear(5, 3, bias=False, dtype=torch.float32)
    model.weight.data = torch.linalg.lstsq(x, y).solution.T.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        table = gs.measure(model, (x.float(), y.float()), nn.MSELoss(), measures=["gradient_norm"], progress=False)
    assert table["(model)"]["gradient_norm"] is not None


# --- losses -------------------------------------------------------------------------------------------------------------


@case("float labels")
def _() -> Case:
    y = (LABELS > 1).double()[:, None]
    return usual(net(1), nn.BCEWithLogitsLoss(), y, targets=y - y.mean(), missing={"nc1": "class labels"})


@case("soft labels")
def _() -> Case:
    y = normal(N, 4, seed=3).softmax(1)
    return usual(net(), nn.CrossEntropyLoss(), y, targets=y - y.mean(0), missing={"nc1": "class labels"})


@case("class weights")
def _() -> Case:
    return usual(net(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 3.0, 1.0, 0.05], dtype=torch.float64)))


@case("ignored pixels under an own loss")
def _() -> Case:
    y = torch.arange(3 * N).reshape(N, 3) * 5 % 4
    y[:9] = y[13, 1:] = 255
    model = net(12, lambda: nn.Unflatten(1, (4, 3)))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none", ignore_index=255)

    def total(exact: nn.Module) -> Tensor:
        return loss(exact(X), y).sum() / (y != 255).sum()

    missing = dict.fromkeys(WITH_TARGETS, "one label to each")
    return usual(model, loss, y, total=total, options={"ignore_index": 255}, missing=missing)


COUPLED = {"(loss)": "depends on the other samples of its batch"}


def coupled(model: nn.Module, loss: Any, size: int, reduction: str = "none", y: Tensor = LABELS, **more: Any) -> Case:
    """A loss over the samples of a batch: the gradients are those of the batches as they came."""

    def total(exact: nn.Module) -> Tensor:
        parts = [loss(exact(x), target) for x, target in split(X, y, size)]
        weights = [len(x) for x in X.split(size)] if reduction == "mean" else [1] * len(parts)
        return torch.stack([part.sum() * n for part, n in zip(parts, weights, strict=True)]).sum() / N

    return usual(model, loss, y, sizes=[size], total=total, options={"reduction": reduction}, said=COUPLED, **more)


@case("SimCLR")
def _() -> Case:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        scores = F.normalize(output, dim=1) @ F.normalize(output, dim=1).mT
        return F.cross_entropy(scores / 0.5, torch.arange(len(output)).roll(1), reduction="none")

    return coupled(net(), loss, 7)


@case("dice over the batch")
def _() -> Case:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        p, hot = output.softmax(1), F.one_hot(target, 4)
        return 1 - (2 * (p * hot).sum(0) / (p + hot).sum(0)).mean()

    return coupled(net(), loss, 8, "mean")


@case("CLIP")
def _() -> Case:
    texts = normal(N, 3, seed=4)

    def forward(m: Any, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return m.images(image).tanh(), m.texts(text).tanh()

    model = seeded(lambda: Around(forward, images=nn.Linear(5, 4), texts=nn.Linear(3, 4)))

    def loss(returned: Any, batch: Any) -> Tensor:
        scores, places = returned[0] @ returned[1].mT, torch.arange(len(returned[0]))
        return F.cross_entropy(scores, places) + F.cross_entropy(scores.mT, places)

    pairs = list(zip(X.split(8), texts.split(8), strict=True))
    return Case(
        model, [[(pair, y) for pair, y in zip(pairs, LABELS.split(8), strict=True)]],
        lambda exact: torch.stack([loss(exact(*pair), None) for pair in pairs]).mean(), loss, LABELS,
        samples=list(zip(X.split(1), texts.split(1), strict=True)), output=lambda exact, pair: exact(*pair)[0],
        options={"output": 0, "reduction": "mean"}, said=COUPLED,
        missing={f"texts.{column}": "the output does not depend on it" for column in OF_JACOBIANS},
    )  # fmt: skip


@case("CTC")
def _() -> Case:
    y = torch.arange(2 * N).reshape(N, 2) * 5 % 3 + 1
    model = net(24, lambda: nn.Unflatten(1, (6, 4)))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        steps = output.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(steps, target, torch.full((len(output),), 6), torch.full((len(output),), 2))

    total = lambda exact: loss(exact(X), y)  # noqa: E731
    missing = dict.fromkeys(WITH_TARGETS, "one label to each")
    return usual(model, loss, y, total=total, options={"reduction": "mean"}, missing=missing)


@case("CTC, summed by the model")
def _() -> Case:
    y = torch.arange(2 * N).reshape(N, 2) * 5 % 3 + 1

    def forward(m: Any, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = m.b(m.a(x).tanh()).unflatten(1, (6, 4))
        if labels is None:
            return {"logits": logits}
        lengths = torch.full((len(x),), 6), torch.full((len(x),), 2)
        steps = logits.log_softmax(-1).transpose(0, 1)
        return {"logits": logits, "loss": F.ctc_loss(steps, labels, *lengths, reduction="sum")}

    class Model(Around):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return forward(self, x, labels)

    model = seeded(lambda: Model(forward, a=nn.Linear(5, 7), b=nn.Linear(7, 24)))
    data = [[{"x": x, "labels": labels} for x, labels in split(X, y, size)] for size in (N, 7, 1)]
    return Case(
        model, data, lambda exact: exact(X, y)["loss"] / N, samples=X.split(1), output=lambda exact, x: exact(x)["logits"],
        missing=dict.fromkeys(WITH_TARGETS, "one label to each"), said={"(loss)": "the model itself returns"},
    )  # fmt: skip


def several(by_name: bool) -> Case:
    def forward(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        outputs = h, m.second(h.tanh())
        return dict(zip("ab", outputs, strict=True)) if by_name else outputs

    def loss(returned: Any, batch: Any) -> Tensor:
        first, second = returned.values() if by_name else returned
        return F.cross_entropy(first, batch[1], reduction="none") + second.square().sum(1)

    model = seeded(lambda: Around(forward, first=nn.Linear(5, 4), second=nn.Linear(4, 2)))
    return usual(
        model, loss, total=lambda exact: loss(exact(X), (X, LABELS)).mean(), output=lambda exact, x: torch.zeros(1),
        missing=dict.fromkeys(OF_JACOBIANS, "output="), said={"(output)": "output="},
    )  # fmt: skip


CASES["tuple outputs"] = lambda: several(False)
CASES["dictionary outputs"] = lambda: several(True)


@case("ViTMAE")
def _() -> Case:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    decoder = {f"decoder_{key}": value for key, value in sizes.items()}
    config = transformers.ViTMAEConfig(**sizes, **decoder, image_size=4, patch_size=2, num_channels=2)
    model = seeded(lambda: transformers.ViTMAEForPreTraining(config)).eval()
    for parameter in model.parameters():  # gradients of queries and keys vanish at the beginning
        parameter.data += 0.3 * normal(*parameter.shape)
    pixels, noise = normal(8, 2, 4, 4), normal(8, 4, seed=1)
    batches = [{"pixel_values": x, "noise": e} for x, e in zip(pixels.split(4), noise.split(4), strict=True)]

    def total(exact: nn.Module) -> Tensor:
        return torch.stack([exact(**batch).loss for batch in batches]).mean()

    singles = [{"pixel_values": x, "noise": e} for x, e in zip(pixels.split(1), noise.split(1), strict=True)]
    missing = dict.fromkeys(OF_FEATURES[:2], "the loader gave no targets") | {"nc1": "class labels"}
    return Case(
        model, [batches], total, samples=singles, output=lambda exact, x: exact(**x).logits, missing=missing,
        said={"(loss)": "the model itself returns"},
    )  # fmt: skip


# --- data and layers ----------------------------------------------------------------------------------------------------


@case("few samples")
def _() -> Case:
    x = X.clone()
    x[:7, 0] = 9  # the first batch alone

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        return m.last(m.gated(h).tanh() if x[0, 0] > 5 else h)

    model = seeded(lambda: Around(forward, first=nn.Linear(5, 7), gated=nn.Linear(7, 7), last=nn.Linear(7, 4)))

    def total(exact: nn.Module) -> Tensor:
        return F.cross_entropy(torch.cat([exact(x[:7]), exact(x[7:])]), LABELS)

    said = {"gated": "7 of 24 samples reach it", "gated.target_linearity": "doubtful"}
    return usual(model, nn.CrossEntropyLoss(), x=x, sizes=[7], total=total, said=said)


@case("1,100 labels")
def _() -> Case:
    x, labels = normal(1300, 5), torch.arange(1300) * 7 % 1100
    return Case(
        net(), [[(a, b) for a, b in split(x, labels, size)] for size in (130, 471)], None, None, labels,
        samples=x.split(1), missing={"nc1": "too many for a mean each"},
    )  # fmt: skip


@case("positions before samples")
def _() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.hidden(m.words(x.T)).tanh().mean(0))

    parts = {"words": nn.Embedding(7, 5), "hidden": nn.Linear(5, 6), "head": nn.Linear(6, 4)}
    missing = {f"words.{column}": "cannot be paired" for column in OF_FEATURES}
    x = torch.arange(3 * N).reshape(N, 3) * 5 % 7
    return usual(seeded(lambda: Around(forward, **parts)), nn.CrossEntropyLoss(), x=x, missing=missing)


@case("layers= a part")
def _() -> Case:
    return usual(net(), nn.CrossEntropyLoss(), options={"layers": ["2"]}, exact=net())


# --- weights ------------------------------------------------------------------------------------------------------------


def quantised(name: str) -> Case:
    convert, read, said, limit = FORMATS[name]
    plain = seeded(
        lambda: nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    ).float()
    model, exact = copy.deepcopy(plain).eval(), plain.double()
    model[2] = convert(model[2])
    exact[2].weight.data = read(model[2], plain[2].weight.data)
    with torch.no_grad():
        model(X.float())  # inference first: bitsandbytes packs its weights again
    return usual(
        model, nn.CrossEntropyLoss(), x=X.float(), total=lambda exact: F.cross_entropy(exact(X), LABELS),
        samples=X.split(1), exact=exact, said={"2": said}, limit=limit,
    )  # fmt: skip


for _name in FORMATS:
    CASES[_name] = lambda name=_name: quantised(name)  # type: ignore[misc]


def words(vocabulary: int = 7) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Embedding(vocabulary, 5), nn.Flatten(), nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 4))
    )


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["2"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        return peft.get_peft_model(model, config).double().eval()


def elsewhere(way: str, lora: bool = False) -> Case:
    """A model whose weights accelerate brings when they are used."""
    accelerate = pytest.importorskip("accelerate")
    exact, reference, folder = words(), words(6), f"{FOLDER.name}/{way} {lora}"
    model = adapted(copy.deepcopy(exact)) if lora else copy.deepcopy(exact)
    if lora:
        layer = model.base_model.model[2]
        delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        exact[2].weight.data += delta.detach()
    if way == "cpu":
        model = accelerate.cpu_offload(model, execution_device="cpu")
    elif way == "disk":
        model = accelerate.disk_offload(model, folder, execution_device="cpu")
    elif way == "dispatched":
        leaves = [name for name, module in model.named_modules() if module._parameters]
        places = {name: "disk" if i % 2 else "cpu" for i, name in enumerate(leaves)}
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)
    x = torch.arange(2 * N).reshape(N, 2) * 5 % 7
    return usual(
        model, nn.CrossEntropyLoss(), x=x, exact=exact, reference=(reference, reference), prefix="base_model.model." * lora,
    )  # fmt: skip


for _way in ("here", "cpu", "disk", "dispatched"):
    CASES[f"reference with fewer words, {_way}"] = lambda way=_way: elsewhere(way)  # type: ignore[misc]
    CASES[f"LoRA, {_way}"] = lambda way=_way: elsewhere(way, True)  # type: ignore[misc]


# --- the table ----------------------------------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}


def matrix(module: Any) -> Tensor:
    return module.weight.detach().double().T if isinstance(module, nn.Embedding) else module.weight.detach().double()


def oracle_of(own: Case) -> Oracle:
    exact = own.exact or own.model
    modules = layers_of(exact)
    oracle = Oracle({name: matrix(module) for name, module in modules.items()}, own.targets, own.labels)
    if own.total is not None:
        with zeros_added(modules) as zeros:
            oracle.add_loss(own.total(exact), zeros)
    for i, sample in enumerate(own.samples):
        with zeros_added(modules) as zeros:
            outputs = own.output(exact, sample)
        oracle.add_outputs(outputs if own.total is not None else outputs[:, :0], zeros)
        oracle.add_rows(zeros, [], i)
    return oracle


def of_weights(own: Case, name: str) -> dict[str, float]:
    W = matrix(layers_of(own.exact or own.model)[name])
    p = torch.linalg.svdvals(W)
    p = p / p.sum()
    found = {"weight_norm": float(W.norm()), "effective_rank": math.exp(-float(torch.special.xlogy(p, p).sum()))}
    if own.reference is not None:
        W0 = matrix(layers_of(own.reference[1])[name])
        common = W[: W0.shape[0], : W0.shape[1]]
        found["weight_change"] = float((common - W0).norm() / W0.norm())
    return found


@cache
def measured(name: str) -> tuple[Case, list[gs.Table], dict[str, dict[str, float]]]:
    own = CASES[name]()
    names = [*(OF_LOSS + OF_JACOBIANS if own.total is not None else ()), *OF_FEATURES, *OF_WEIGHTS[:2]]
    options: dict[str, Any] = {"ridge": RIDGE, "gamma": GAMMA, "progress": False} | own.options
    if own.reference is not None:
        names.append("weight_change")
        options["reference"] = own.reference[0]
    places = [p.is_meta for p in own.model.parameters()]
    tables = [gs.measure(own.model, data, own.loss, measures=names, **options) for data in own.data]
    assert [p.is_meta for p in own.model.parameters()] == places
    oracle = oracle_of(own)
    rows = {layer: oracle.measures(layer) | of_weights(own, layer) for layer in oracle.weights}
    rows["(loss)"] = {"loss": oracle.loss}
    return own, tables, rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sketches_are_summed_in_the_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    model, plan = seeded(lambda: nn.Linear(96, 96)).float(), Plan(sums=(Kernel, Covariance), estimates=True)
    data, options = split(normal(N, 96).float(), LABELS, 5), {"dtype": dtype, "memory": 2**16, "sketch": 4}
    statistics = collected(model, data, nn.CrossEntropyLoss(), plan, **options)
    for kind in (Kernel, Covariance):
        assert statistics["(model)"].sums[kind].products.dtype == dtype


CELLS = [(name, column) for name in CASES for column in COLUMNS]


@pytest.mark.parametrize(("name", "column"), CELLS, ids=[f"{name}-{column}" for name, column in CELLS])
def test_a_column_of_a_case(name: str, column: str) -> None:
    own, tables, rows = measured(name)
    chosen = own.options.get("layers")
    for table in tables:
        for key, words in own.said.items():
            assert words in str(table.notes[key])
        for layer, expected in rows.items():
            if layer == "(loss)" or (chosen is not None and layer not in chosen):
                continue
            row = own.prefix + layer
            why = own.missing.get(f"{layer}.{column}", own.missing.get(column))
            if why is not None:
                assert table[row][column] is None
                assert why in str([note for key, note in table.notes.items() if key in (row, f"{row}.{column}")])
            elif column in expected and column in table.columns:
                value = table[row][column]
                error = 5 * table.errors.get(row, {}).get(column, 0)  # of an estimate, which no batches change
                assert value == pytest.approx(expected[column], rel=own.limit, abs=max(error, 1e-12)), layer
                assert value == pytest.approx(tables[0][row][column], rel=own.limit, abs=1e-12), layer
        if column == "loss" and own.total is not None:
            assert table.network["loss"] == pytest.approx(rows["(loss)"]["loss"], rel=own.limit)
