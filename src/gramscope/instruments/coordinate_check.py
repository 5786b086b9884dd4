"""``gs.coordinate_check``: does the size of activations depend on the width, at initialisation and after some steps?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, checks_names
from gramscope.layers.batches import Unpack, batches, to_device
from gramscope.layers.kinds import Layer
from gramscope.layers.labels import LabelReader
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import OutputSelector, call_model, model_device, model_dtype, own_loss, select_output
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.layers.tape import Observer, in_backward
from gramscope.measures.table import format_value
from gramscope.text_table import text_table


@dataclass(frozen=True)
class CoordinateCheck:
    """Mean absolute activation of each layer by width and step, averaged over seeds.

    Args:
        widths: in increasing order.
        layers: names, in order of execution.
        sizes: ``sizes[step][layer]``, one number per width; step 0 is initialisation.
    """

    widths: tuple[int, ...]
    layers: tuple[str, ...]
    sizes: tuple[dict[str, tuple[float, ...]], ...]

    def slopes(self, step: int = -1) -> dict[str, float]:
        """``d log size / d log width`` of each layer by least squares; NaN where a size is zero or not finite.

        About 0 where the parametrisation keeps activations at their size; positive where they blow up with the width.
        """
        return {layer: _slope(self.widths, self.sizes[step][layer]) for layer in self.layers}

    def __str__(self) -> str:
        cells = [["step", "layer", *map(str, self.widths), "slope"]]
        for step, sizes in enumerate(self.sizes):
            slopes = self.slopes(step)
            cells += [
                [str(step), name, *map(format_value, sizes[name]), f"{slopes[name]:+.2f}"] for name in self.layers
            ]
        return "\n".join(text_table(cells, left=2))

    __repr__ = __str__


@checks_names
def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    data: Any,
    loss: Loss | None,
    optimizer: Callable[[nn.Module, int], torch.optim.Optimizer],
    *,
    steps: int = 3,
    seeds: int = 3,
    layers: LayerSelector = None,
    output: OutputSelector = None,
    unpack: Unpack | None = None,
) -> CoordinateCheck:
    """The coordinate check of the maximal update parametrisation (Yang and Hu 2021; Yang et al. 2022).

    For each width and seed a new model takes some steps on one batch; the mean absolute value of every layer's output ``z`` is
    kept before the first step and after each. Under µP no hidden size grows with the width; in the standard
    parametrisation with one learning rate sizes grow after few steps. The readout's output may fall at step 0 under µP.

    Args:
        make_model: ``width -> model``; it is called with the random generator seeded, and must use the same layer names
            for every width.
        widths: at least two.
        data: a batch ``(x, y)``, or a loader, whose first batch is used.
        loss: function of ``(output, target)`` that returns one number; ``None`` takes the loss that the model returns.
        optimizer: ``(model, width) -> optimizer``, with the learning rates that belong to the width.
        steps: steps to take.
        seeds: models per width, whose sizes are averaged.
        layers: names, globs or types of linear-like layers; ``None`` for all.
        output: key, index or function that finds the output tensor in what the model returns.
        unpack: ``batch -> (inputs, target)`` for other batches.

    >>> data = (torch.randn(16, 8), torch.randn(16, 1))
    >>> def make(width: int) -> nn.Module:
    ...     return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
    >>> sgd = lambda model, width: torch.optim.SGD(model.parameters(), lr=0.1)
    >>> check = coordinate_check(make, [16, 32], data, nn.MSELoss(), sgd, steps=1)
    >>> check.layers, len(check.sizes), sorted(check.slopes())
    (('0', '2'), 2, ['0', '2'])
    """
    chosen = _check_counts(widths, steps, seeds)
    runs = {
        width: [
            _sizes(make_model, width, seed, data, loss, optimizer, steps, layers, output, unpack)
            for seed in range(seeds)
        ]
        for width in chosen
    }
    names = list(runs[chosen[0]][0][0])
    for width, by_seed in runs.items():
        if set(by_seed[0][0]) != set(names):
            raise InputError(
                f"the layers of width {width} are {sorted(by_seed[0][0])}, those of width {chosen[0]} {sorted(names)}; "
                "make_model must give layers the same names for every width"
            )
    sizes = tuple(
        {name: tuple(sum(run[step][name] for run in runs[width]) / seeds for width in chosen) for name in names}
        for step in range(steps + 1)
    )
    return CoordinateCheck(chosen, tuple(names), sizes)


def _sizes(
    make_model: Callable[[int], nn.Module],
    width: int,
    seed: int,
    data: Any,
    loss: Loss | None,
    optimizer: Callable[[nn.Module, int], torch.optim.Optimizer],
    steps: int,
    layers: LayerSelector,
    output: OutputSelector,
    unpack: Unpack | None,
) -> list[dict[str, float]]:
    """Mean absolute outputs of a new model's layers before each step and after the last."""
    with torch.random.fork_rng(), torch.enable_grad():
        torch.random.manual_seed(seed)
        model = make_model(width)
        device = model_device(model)
        batch = (to_device(value, device) for value in next(batches(data, unpack, model_dtype(model))))
        read = LabelReader(model).read(*batch)
        rule = optimizer(model, width)
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}

        def add(layer: Layer, x: Tensor, z: Tensor) -> None:
            if not in_backward():  # checkpoints compute the layer again there
                size = z.detach().abs().sum(dtype=torch.float64 if z.device.type != "mps" else torch.float32)
                sums[layer.name] = sums.get(layer.name, 0) + size
                counts[layer.name] = counts.get(layer.name, 0) + z.numel()

        by_step = []
        with Observer(select_layers(model, layers), add).attached():
            for step in range(steps + 1):
                sums.clear()
                counts.clear()
                result = call_model(model, read.inputs)
                by_step.append({name: float(total) / counts[name] for name, total in sums.items()})
                if step < steps:
                    rule.zero_grad()
                    value = own_loss(result) if loss is None else loss(select_output(result, output), read.target)
                    if value is None or value.numel() != 1:
                        problem = (
                            "the model returns no loss" if value is None else f"the loss has shape {tuple(value.shape)}"
                        )
                        raise InputError(f"{problem}; give a loss= that returns one number")
                    value.backward()  # type: ignore[no-untyped-call]
                    rule.step()
    if not by_step[0]:
        raise InputError(f"no linear-like layer of {type(model).__name__} ran; choose others with layers=")
    return by_step


def _check_counts(widths: Sequence[int], steps: int, seeds: int) -> tuple[int, ...]:
    for name, value in (("steps", steps), ("seeds", seeds)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r}: give a positive whole number")
    chosen = tuple(sorted(set(widths)))
    if len(chosen) < 2 or any(not isinstance(width, int) or width < 1 for width in chosen):
        raise InputError(f"widths={list(widths)!r}: give at least two different positive whole numbers")
    return chosen


def _slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return math.nan
    x, y = ([math.log(v) for v in values] for values in (widths, sizes))
    center = sum(x) / len(x)
    return sum((a - center) * b for a, b in zip(x, y, strict=True)) / sum((a - center) ** 2 for a in x)
