"""The log of a monitor: a function, or a TensorBoard writer that gets every record and pictures of the network.

singular_values   of W                             [min(k, d)]
diagonal_nfm      diagonal of WᵀW                  [height, width] or [channels, height, width]
diagonal_agop     diagonal of the AGOP WᵀKW        the same
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.instruments.agop import tangent_kernel
from gramscope.layers.batches import Unpack, batches, first_tensor, to_device
from gramscope.layers.kinds import Layer, LinearLayer
from gramscope.layers.model_call import OutputSelector, model_device
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.linalg.arrays import to_double
from gramscope.measures.spectrum import weight_spectrum


@runtime_checkable
class ScalarWriter(Protocol):
    """The part of TensorBoard's ``SummaryWriter`` that every record needs."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""


@runtime_checkable
class PictureWriter(Protocol):
    """The part of TensorBoard's ``SummaryWriter`` for histograms and images."""

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> None:
        """Write a distribution."""

    def add_image(self, tag: str, img_tensor: Tensor, global_step: int) -> None:
        """Write an image ``[channels, height, width]`` with values in [0, 1]."""


#: entries of a record's network that say how much was measured; no curve is wanted of them
SIZES = ("samples", "positions")

#: called with ``(step, record)``, or a TensorBoard writer
Log: TypeAlias = Callable[[int, dict[str, Any]], object] | ScalarWriter


def check_log(log: Log | None) -> Log | None:
    """The log, or an error unless it is ``None``, a function or a writer."""
    if log is None or callable(log) or isinstance(log, ScalarWriter):
        return log
    raise InputError(
        f"log={log!r} is a {type(log).__name__}; give a function of (step, record) or a writer with add_scalar, such as "
        "torch.utils.tensorboard.SummaryWriter"
    )


def tag(measure: str, layer: str | None = None) -> str:
    """The name of a number in a log: ``gramscope/measure/layer``, or ``gramscope/measure`` for one of the whole network.

    >>> tag("target_linearity", "fc1"), tag("loss")
    ('gramscope/target_linearity/fc1', 'gramscope/loss')
    """
    return "/".join(["gramscope", measure] + ([] if layer is None else [layer]))


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by their :func:`tag`: one for each measure and layer, and the network's loss and accuracy.

    >>> scalars({"step": 5, "layers": {"fc1": {"nc1": 0.5, "nfa": None}}, "network": {"samples": 9, "loss": 2.0}})
    {'gramscope/loss': 2.0, 'gramscope/nc1/fc1': 0.5}
    """
    found = {tag(name): value for name, value in record["network"].items() if name not in SIZES}
    for layer, row in record["layers"].items():
        found |= {tag(name, layer): value for name, value in row.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def write_record(log: Log, record: dict[str, Any]) -> None:
    """Hand a record to a function, or its :func:`scalars` to a writer."""
    if not isinstance(log, ScalarWriter):
        log(record["step"], record)
        return
    for name, value in scalars(record).items():
        log.add_scalar(name, value, record["step"])


def write_pictures(
    log: PictureWriter, step: int, spectra: dict[str, Tensor], diagonals: dict[str, dict[str, Tensor]]
) -> None:
    """Histograms of singular values, and images of the diagonals of the NFM and the AGOP."""
    for layer, values in spectra.items():
        log.add_histogram(tag("singular_values", layer), values.cpu(), step)
    for layer, quantities in diagonals.items():
        for name, image in quantities.items():
            log.add_image(tag(f"diagonal_{name}", layer), as_picture(image).cpu(), step)


def as_picture(image: Tensor) -> Tensor:
    """An image of 1 or 3 channels with values from 0 to 1; other numbers of channels are summed.

    >>> import torch
    >>> as_picture(torch.tensor([[1.0, 3.0]]))
    tensor([[[0., 1.]]])
    """
    image = image if image.dim() == 3 else image[None]
    if image.shape[0] not in (1, 3):
        image = image.sum(0, keepdim=True)
    low, high = image.amin(), image.amax()
    return (image - low) / (high - low if high > low else 1)


def layer_spectra(model: nn.Module, layers: LayerSelector = None) -> dict[str, Tensor]:
    """Singular values of every layer's weight, descending, float64.

    >>> {name: tuple(values.shape) for name, values in layer_spectra(nn.Sequential(nn.Linear(3, 4))).items()}
    {'0': (3,)}
    """
    return {layer.name: weight_spectrum(layer.weight()).values for layer in select_layers(model, layers)}


def input_diagonals(
    model: nn.Module,
    data: Any,
    layers: LayerSelector = None,
    *,
    agop: bool = True,
    output: OutputSelector = None,
    unpack: Unpack | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Diagonals of WᵀW and of the AGOP at the layer that reads the images, ``{layer: {"nfm": …, "agop": …}}``.

    That layer is the first fully connected one as wide as an image has pixels. Empty unless there is one and inputs are
    images ``[n, height, width]`` or ``[n, channels, height, width]``.

    Args:
        model: any module.
        data: inputs, pairs ``(x, y)`` or a loader.
        layers: where to look.
        agop: also the AGOP's diagonal, which needs the Jacobian of every sample.
        output, unpack: as for :func:`gramscope.collect`.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> images = input_diagonals(net, torch.rand(5, 1, 4, 4))
    >>> {name: tuple(image.shape) for name, image in images["1"].items()}
    {'nfm': (1, 4, 4), 'agop': (1, 4, 4)}
    """
    held = list(batches(data, unpack))
    shape = _image_shape(held[0][0])
    layer = None if shape is None else _reader(model, layers, math.prod(shape))
    if shape is None or layer is None:
        return {}
    W = to_double(layer.weight())
    diagonals = {"nfm": W.square().sum(0).reshape(shape)}
    if agop:
        device = model_device(model)
        inputs = [(to_device(x, device), None) for x, _ in held]
        K = tangent_kernel(model, inputs, layer.name, output=output, process_group=False)[layer.name].to(W)
        diagonals["agop"] = ((K @ W) * W).sum(0).reshape(shape)
    return {layer.name: diagonals}


def _image_shape(inputs: Any) -> tuple[int, ...] | None:
    first = first_tensor(inputs)
    if first is None or not first.is_floating_point() or first.dim() not in (3, 4):
        return None
    return tuple(first.shape[1:])


def _reader(model: nn.Module, layers: LayerSelector, pixels: int) -> Layer | None:
    for layer in select_layers(model, layers):
        if isinstance(layer, LinearLayer) and layer.weight().shape[-1] == pixels:
            return layer
    return None
