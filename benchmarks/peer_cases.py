"""What each peer computes, and the same with gramscope; the shapes are those of small published experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.instruments.agop import tangent_kernel
from gramscope.instruments.egop import egop
from gramscope.measures.collapse import neural_collapse_from_rows
from gramscope.measures.linearity import target_linearity
from gramscope.statistics.collect import collect
from gramscope.statistics.result import Statistics
from gramscope_lab.nets import build

#: largest difference that float32 arithmetic explains
SINGLE = 1e-3


@dataclass(frozen=True)
class PeerCase:
    """One computation, done twice.

    Args:
        case: what is computed.
        peer: who else computes it.
        ours: with gramscope.
        theirs: with the peer.
        difference: relative difference of the two results.
        package: the peer's name for pip; empty where the peer is written out here.
    """

    case: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    difference: Callable[[Any, Any], float]
    package: str = ""


#: makes the cases of one peer
CaseMaker = Callable[[torch.Generator, float], Iterator[PeerCase]]


def linearity_inverse(generator: torch.Generator, scale: float) -> Iterator[PeerCase]:
    """Target linearity against ``(HᵀH + λI)⁻¹`` formed in float32."""

    def inverse(H: Tensor, labels: Tensor) -> float:
        Y = _centred(labels).float()
        beta = torch.linalg.inv(H.mT @ H + torch.eye(H.shape[1])) @ (H.mT @ Y)
        return float(1 - (Y - H @ beta).square().sum() / Y.square().sum())

    for H, labels in _features(generator, scale, (20_000, 256), (2_000, 3_072)):
        ours, theirs = partial(target_linearity, H, labels, ridge=1.0), partial(inverse, H, labels)
        yield PeerCase(f"target linearity {_size(H)}", "float32 inverse", ours, theirs, _difference)


def linearity_sklearn(generator: torch.Generator, scale: float) -> Iterator[PeerCase]:
    """Target linearity against scikit-learn's Ridge, both of float64 features."""
    Ridge = import_module("sklearn.linear_model").Ridge

    def ridge(H: Tensor, Y: Tensor) -> float:
        x, y = H.numpy(), Y.numpy()
        residual = y - Ridge(alpha=1.0, fit_intercept=False).fit(x, y).predict(x)
        return float(1 - (residual**2).sum() / (y**2).sum())

    for single, labels in _features(generator, scale, (20_000, 256), (2_000, 3_072)):
        H, Y = single.double(), _centred(labels)
        ours, theirs = partial(target_linearity, H, Y, ridge=1.0), partial(ridge, H, Y)
        yield PeerCase(f"target linearity {_size(H)}", "Ridge, float64", ours, theirs, _difference, "scikit-learn")


def collapse_plain(generator: torch.Generator, scale: float) -> Iterator[PeerCase]:
    """NC1 to NC3 of given features against a plain float32 program."""

    def plain(H: Tensor, labels: Tensor, W: Tensor) -> float:
        means = torch.stack([H[labels == c].mean(0) for c in range(10)])
        within = torch.zeros(H.shape[1], H.shape[1])
        for c in range(10):
            centred = H[labels == c] - means[c]
            within += centred.mT @ centred / H.shape[0]
        M = means - H.mean(0)
        nc1 = float((within @ torch.linalg.pinv(M.mT @ M / 10, rtol=1e-4)).trace() / 10)
        norms = M.norm(dim=1)
        cosines = (M @ M.mT / torch.outer(norms, norms))[~torch.eye(10, dtype=torch.bool)]
        _ = norms.std(correction=0) / norms.mean(), cosines.std(correction=0), (cosines + 1 / 9).abs().mean()
        _ = (W / W.norm() - M / M.norm()).square().sum()
        distance = (H[:, None, :16] - means[:, :16]).square().sum(2)  # a part of the features stands for all
        _ = (distance.argmin(1) == (H @ W.mT).argmax(1)).float().mean()
        return nc1

    def collapse(H: Tensor, labels: Tensor, W: Tensor) -> float:
        return neural_collapse_from_rows(H, labels, W).nc1

    for H, labels in _features(generator, scale, (20_000, 256), (10_000, 1_024)):
        given = H, labels, torch.randn(10, H.shape[1], generator=generator)
        ours, theirs = partial(collapse, *given), partial(plain, *given)
        yield PeerCase(f"neural collapse {_size(H)}", "plain float32 program", ours, theirs, _difference)


def factors_curvlinops(generator: torch.Generator, scale: float) -> Iterator[PeerCase]:
    """``gs.collect`` of D, Σ, HᵀH and HᵀY against the Kronecker factors HᵀH and Σ of curvlinops."""
    curvlinops, loss = import_module("curvlinops"), nn.CrossEntropyLoss(reduction="sum")

    def factors(model: nn.Module, batches: list[Any], n: int) -> Tensor:
        kfac = curvlinops.KFACLinearOperator(
            model,
            loss,
            [p for p in model.parameters() if p.requires_grad],
            batches,
            fisher_type="empirical",
            check_deterministic=False,
            num_data=n,
            num_per_example_loss_terms=1,
        )
        kfac.compute_kronecker_factors()
        found: Tensor = kfac._input_covariances["hidden1"]
        return found

    def difference(found: Statistics, factor: Tensor) -> float:
        m = found["hidden1"].features
        return math.nan if m is None else _difference(m.joint.HtH / m.n, factor)

    for inputs, hidden in ((784, (512, 512)), (3_072, (256,))):
        d, n = int(inputs * scale), int(4_096 * scale)
        model = build("mlp", (d,), 10, generator=generator, hidden=hidden, bias=False).eval()
        x, y = torch.randn(n, d, generator=generator), torch.randint(10, (n,), generator=generator)
        batches = list(zip(torch.split(x, 128), torch.split(y, 128), strict=True))
        case = f"collect(gram=True), MLP {'→'.join(map(str, (d, *hidden, 10)))}"
        ours = partial(collect, model, batches, loss, gram=True, progress=False)
        theirs = partial(factors, model, batches, n)
        yield PeerCase(case, "KFAC factors", ours, theirs, difference, "curvlinops-for-pytorch")


def kernels_plain(generator: torch.Generator, scale: float) -> Iterator[PeerCase]:
    """K of all layers against one backward for every output, with hooks that add ``gᵀg`` as curvlinops does."""
    images = (3, int(32 * scale) // 4 * 4, int(32 * scale) // 4 * 4)
    nets = {
        "CNN": build("cnn", images, 10, generator=generator),
        "ResNet": build("resnet", images, 10, generator=generator, widths=(16, 32), blocks=2, norm="batch"),
        "transformer": build("transformer", images, 10, generator=generator, width=64, depth=2),
    }
    for name, net in nets.items():
        x = torch.randn(int(128 * scale), *images, generator=generator)
        ours, theirs = partial(tangent_kernel, net.eval(), x), partial(_kernels_by_hooks, net, x)
        yield PeerCase(f"K of a {name}, {x.shape[0]} images", "a backward for each output", ours, theirs, _largest)


def _kernels_by_hooks(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    kernels: dict[str, Tensor] = {}

    def watch(name: str, convolution: bool) -> Callable[[nn.Module, Any, Tensor], None]:
        def add(gradient: Tensor) -> None:
            rows = (gradient.movedim(1, -1) if convolution else gradient).flatten(0, -2)
            kernels[name] = kernels.get(name, 0) + rows.mT @ rows

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(add)  # type: ignore[no-untyped-call]

        return hook

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    handles = [m.register_forward_hook(watch(name, isinstance(m, nn.Conv2d))) for name, m in layers.items()]
    outputs = model(x)
    first = next(p for p in model.parameters() if p.requires_grad)
    for column in outputs.sum(0):
        torch.autograd.grad(column, first, retain_graph=True)
    for handle in handles:
        handle.remove()
    return {name: total / x.shape[0] for name, total in kernels.items()}


def egop_xrfm(generator: torch.Generator, scale: float) -> Iterator[PeerCase]:
    """``gs.egop`` of a Laplace kernel machine against xrfm's formula for its gradient, both in float64."""
    kernel = import_module("xrfm.rfm_src.kernels").LaplaceKernel(bandwidth=10.0, exponent=1.0)

    def agop(centres: Tensor, points: Tensor, alpha: Tensor) -> Tensor:
        found: Tensor = kernel.get_agop(centres, points, alpha.mT) / points.shape[0]
        return found

    def of_machine(centres: Tensor, points: Tensor, alpha: Tensor) -> Tensor:
        return egop(lambda z: torch.exp(torch.cdist(z, centres) / -10.0) @ alpha, points)

    for n, d, c in ((2_000, 64, 1), (2_000, 64, 4)):
        shapes = (int(n * scale), d), (int(n * scale), d), (int(n * scale), c)
        given = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
        case = f"EGOP of a kernel machine, {c} outputs"
        yield PeerCase(case, "xrfm, float64", partial(of_machine, *given), partial(agop, *given), _difference, "xrfm")


#: peer's package (empty for programs written out here) and its cases
CASES: list[tuple[str, CaseMaker]] = [
    ("", linearity_inverse),
    ("scikit-learn", linearity_sklearn),
    ("curvlinops-for-pytorch", factors_curvlinops),
    ("", kernels_plain),
    ("", collapse_plain),
    ("xrfm", egop_xrfm),
]


def _features(generator: torch.Generator, scale: float, *sizes: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """For every size features ``[n, d]`` of a layer of ReLUs, and labels of ten classes that depend on them."""
    for n, d in ((int(n * scale), int(d * scale)) for n, d in sizes):
        x, W = torch.randn(n, 32, generator=generator), torch.randn(32, d, generator=generator) / 32**0.5
        H = torch.relu(x @ W + 0.5 * torch.randn(n, d, generator=generator))
        yield H, (x[:, :10] + torch.randn(n, 10, generator=generator)).argmax(1)


def _centred(labels: Tensor) -> Tensor:
    Y = F.one_hot(labels).double()
    return Y - Y.mean(0)


def _size(H: Tensor) -> str:
    return f"{H.shape[0]:,}×{H.shape[1]:,}"


def _difference(ours: Any, theirs: Any) -> float:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    return float((a - b).norm() / b.norm())


def _largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(_difference(K, theirs[name]) for name, K in ours.items() if name in theirs)
