"""Linear regions of piecewise-linear networks crossed by segments between samples ([Gram] Lemma 4), by sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, checks_names
from gramscope.instruments.interpolation import pair_blocks
from gramscope.layers.model_call import call_model
from gramscope.layers.modules import in_eval_mode
from gramscope.linalg.arrays import Array, as_float_tensor

#: where the slope of a module changes
_BREAKS: dict[type[nn.Module], tuple[float, ...]] = {
    nn.ReLU: (0.0,),
    nn.LeakyReLU: (0.0,),
    nn.PReLU: (0.0,),
    nn.ReLU6: (0.0, 6.0),
}


@dataclass(frozen=True)
class RegionCrossings:
    """Boundaries between linear regions crossed by segments.

    Args:
        mean: crossings per segment.
        per_segment: ``[pairs]``, integers.
        per_layer: mean crossings caused by each activation, in the order of the network.
    """

    mean: float
    per_segment: Tensor
    per_layer: list[float]


@checks_names
def region_crossings(
    network: nn.Module,
    X: Array,
    pairs: int | None = None,
    points: int = 65,
    generator: torch.Generator | None = None,
) -> RegionCrossings:
    """Count the linear-region boundaries that segments between samples cross ([Gram] Lemma 4).

    Each segment is sampled at ``points`` places and changes in the state of every unit are counted. A unit that changes
    and changes back between two places is missed: the count is a lower bound, which approaches the true number with more
    ``points``.

    Args:
        network: a module whose activations are ReLU-like modules (ReLU, LeakyReLU, PReLU, ReLU6); it is run in eval mode,
            without gradients, and left as it was.
        X: samples ``[n, ...]``.
        pairs: number of random pairs; all n² ordered pairs by default.
        points: places on each segment, both ends included.
        generator: source of the pairs, needed with ``pairs``.

    >>> region_crossings(nn.ReLU(), torch.tensor([[-1.0], [1.0], [2.0]])).per_segment
    tensor([0, 1, 1, 1, 0, 0, 1, 0, 0])
    """
    samples = as_float_tensor(X, "X")
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise InputError(f"points must be a whole number of at least 2, got {points!r}")
    places = torch.linspace(0.0, 1.0, points, dtype=torch.float64, device="cpu").to(samples.device, samples.dtype)
    counts: list[Tensor] = []
    with _state_reader(network) as states, torch.no_grad():
        for first, second in pair_blocks(samples.shape[0], pairs, generator, points * samples[0].numel()):
            a, b = samples[first.to(samples.device)], samples[second.to(samples.device)]
            t = places.reshape(-1, *[1] * a.dim())
            segment = (1 - t) * a + t * b  # [points, pairs, ...]
            layers = states(segment.flatten(0, 1))
            changes = [state.reshape(points, first.numel(), -1).diff(dim=0).abs().sum((0, 2)) for state in layers]
            counts.append(torch.stack(changes, 1))
    per_layer = torch.cat(counts)
    return RegionCrossings(
        float(per_layer.sum(1).double().mean()), per_layer.sum(1), per_layer.double().mean(0).tolist()
    )


@contextmanager
def _state_reader(network: nn.Module) -> Iterator[Callable[[Tensor], list[Tensor]]]:
    """A function from inputs to the integer state of every unit; the network's hooks and mode are restored afterwards."""
    states: list[Tensor] = []

    def record(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        states.append(_state(arguments[0], _BREAKS[type(module)]))

    handles = [m.register_forward_pre_hook(record) for m in network.modules() if type(m) in _BREAKS]

    def read(x: Tensor) -> list[Tensor]:
        states.clear()
        call_model(network, x)
        if not states:
            names = sorted({type(m).__name__ for m in network.modules()})
            raise LayerError(
                f"no ReLU-like module of the network ran (it has {', '.join(names)}); use nn.ReLU modules in it"
            )
        if not all(state.dim() > 0 and len(state) == len(x) for state in states):
            raise InputError("an activation of the network has another number of rows than its input")
        return list(states)

    try:
        with in_eval_mode(network):
            yield read
    finally:
        for handle in handles:
            handle.remove()


def _state(z: Tensor, breaks: tuple[float, ...]) -> Tensor:
    return torch.stack([z > value for value in breaks]).sum(0, dtype=torch.int8)
