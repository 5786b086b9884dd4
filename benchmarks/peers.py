"""gramscope beside other programs that compute the same: time and memory of theirs over ours, in one process and thread.

The shapes are those of small published experiments.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import Row, compare, peak_extra_bytes, ratio_row
from gramscope.errors import InputError, ResultWarning
from gramscope.instruments.egop import egop
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
    """

    case: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    difference: Callable[[Any, Any], float]


#: makes the cases of one peer
CaseMaker = Callable[[torch.Generator, float], Iterator[PeerCase]]


def run(device: str = "cpu", seconds: float = 2.0, scale: float = 1.0) -> Iterator[Row]:
    """All comparisons; peers that are not installed are named with what to install.

    Args:
        device: must be the CPU, where all peers run.
        seconds: time for each comparison.
        scale: factor of all sizes, for tests.
    """
    if torch.device(device).type != "cpu":
        raise InputError(f"device = {device}: peers are compared on the CPU, in one thread")
    generator = torch.Generator().manual_seed(0)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResultWarning)  # n < d explains any target, also in the peers
        for package, maker in CASES:
            try:
                installed = f"{package} {version(package)}, "
            except PackageNotFoundError:
                missing = f"not installed: pip install {package}, or pip install 'gramscope[peers]' for all peers"
                yield Row(maker.__name__.replace("_", " "), package, math.nan, "gramscope", math.nan, note=missing)
                continue
            for case in maker(generator, scale):
                yield from measure(case, seconds, installed)


def measure(case: PeerCase, seconds: float, installed: str = "") -> Iterator[Row]:
    """Time and memory of the peer over ours, the two in alternation: above 1 gramscope is ahead."""
    off = case.difference(case.ours(), case.theirs())
    if not off <= SINGLE:
        raise InputError(f"{case.case}: gramscope and {case.peer} differ by {off:.1e} of the result")
    ways = {"gramscope": case.ours, case.peer: case.theirs}
    times = compare(ways, seconds=seconds, warm_up=1)
    # the smallest peak of three runs: what the C library keeps between allocations varies by megabytes
    memory = {name: max(min(peak_extra_bytes(way) for _ in range(3)), 4096) for name, way in ways.items()}
    note = f"{installed}results agree to {off:.0e}"
    yield ratio_row(case.case, case.peer, times, "gramscope", at_least=1, note=note)
    yield ratio_row(f"memory of {case.case}", case.peer, memory, "gramscope", at_least=1, per_unit=1e-6, unit="MB")


def one_thread() -> AbstractContextManager[object]:
    """NumPy uses one thread within it, where threadpoolctl is installed (it comes with scikit-learn); torch from now on."""
    torch.set_num_threads(1)
    with suppress(ImportError):
        return import_module("threadpoolctl").threadpool_limits(1)  # type: ignore[no-any-return]
    return nullcontext()


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
        yield PeerCase(f"target linearity {_size(H)}", "Ridge, float64", ours, theirs, _difference)


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
        yield PeerCase(case, "KFAC factors", ours, theirs, difference)


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
        yield PeerCase(case, "xrfm, float64", partial(of_machine, *given), partial(agop, *given), _difference)


#: peer's package and its cases
CASES: list[tuple[str, CaseMaker]] = [
    ("scikit-learn", linearity_sklearn),
    ("curvlinops-for-pytorch", factors_curvlinops),
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
