"""Pictures of a network: spectra of its weights, and diagonals at its input in the shape of the image.

spectrum   singular values of W                    [min(k, d)]
nfm        diagonal of WᵀW                         [height, width] or [channels, height, width]
agop       diagonal of the AGOP WᵀKW               the same
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from gramscope.instruments.agop import tangent_kernel
from gramscope.layers.batches import Unpack, batches, first_tensor, to_device
from gramscope.layers.kinds import Layer, LinearLayer
from gramscope.layers.model_call import OutputSelector, model_device
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.linalg.arrays import to_double
from gramscope.measures.spectrum import weight_spectrum


def layer_spectra(model: nn.Module, layers: LayerSelector = None) -> dict[str, Tensor]:
    """Singular values of every layer's weight, descending, float64.

    >>> from torch import nn
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
