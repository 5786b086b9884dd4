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

#: where the slope of a module changes; the two numbers of Hardtanh are read from the module
_BREAKS: dict[type[nn.Module], tuple[float, ...]] = {
    nn.ReLU: (0.0,),
    nn.LeakyReLU: (0.0,),
    nn.PReLU: (0.0,),
    nn.RReLU: (0.0,),
    nn.ReLU6: (0.0, 6.0),
    nn.Hardtanh: (),
}

Preactivations = Callable[[Tensor], list[Tensor]]


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
    network: nn.Module | Preactivations,
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
        network: a module whose activations are ReLU-like modules (it is run in eval mode, without gradients, and left as
            it was), or a function that returns the pre-activations ``[m, ...]`` of its ReLU units for inputs ``[m, ...]``.
        X: samples ``[n, ...]``.
        pairs: number of random pairs; all n² ordered pairs by default.
        points: places on each segment, both ends included.
        generator: source of the pairs, needed with ``pairs``.

    >>> region_crossings(lambda x: [x], torch.tensor([[-1.0], [1.0], [2.0]])).per_segment
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
def _state_reader(network: nn.Module | Preactivations) -> Iterator[Callable[[Tensor], list[Tensor]]]:
    """A function from inputs to the integer state of every unit; a module's hooks and mode are restored afterwards."""
    if not isinstance(network, nn.Module):
        yield lambda x: [_state(z, (0.0,)) for z in _preactivations(network(x), x)]
        return
    states: list[Tensor] = []

    def record(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        breaks = (module.min_val, module.max_val) if type(module) is nn.Hardtanh else _BREAKS[type(module)]
        states.append(_state(arguments[0], breaks))

    handles = [m.register_forward_pre_hook(record) for m in network.modules() if type(m) in _BREAKS]
    if not handles:
        names = sorted({type(m).__name__ for m in network.modules()})
        raise LayerError(
            f"no ReLU-like module in the network (it has {', '.join(names)}); pass a function that returns its "
            "pre-activations instead"
        )

    def read(x: Tensor) -> list[Tensor]:
        states.clear()
        call_model(network, x)
        if not states:
            raise LayerError(
                "the network ran, but none of its ReLU-like modules did; pass a function that returns its "
                "pre-activations instead"
            )
        if not all(_fits(state, x) for state in states):
            raise InputError(
                "an activation of the network has another number of rows than its input; pass a function that "
                "returns the pre-activations [m, ...] instead"
            )
        return list(states)

    try:
        with in_eval_mode(network):
            yield read
    finally:
        for handle in handles:
            handle.remove()


def _preactivations(returned: object, x: Tensor) -> list[Tensor]:
    """What a user's function returned, checked to be tensors with a row for each input."""
    values = (
        [returned] if isinstance(returned, Tensor) else list(returned) if isinstance(returned, list | tuple) else []
    )
    tensors = [z for z in values if isinstance(z, Tensor) and _fits(z, x)]
    if not tensors or len(tensors) < len(values):
        shapes = [tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__ for z in values or [returned]]
        raise InputError(
            f"the function must return the pre-activations [m, ...] of its units, tensors with {len(x)} rows for inputs "
            f"{tuple(x.shape)}; it returned {shapes}"
        )
    return tensors


def _fits(z: Tensor, x: Tensor) -> bool:
    """Whether ``z`` has a row for each row of ``x``."""
    return z.dim() > 0 and len(z) == len(x)


def _state(z: Tensor, breaks: tuple[float, ...]) -> Tensor:
    return torch.stack([z > value for value in breaks]).sum(0, dtype=torch.int8)
