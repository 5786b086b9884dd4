"""Plain networks used by the experiments: nothing in them knows of gramscope, any model of yours works as well."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gramscope.errors import InputError, no_such
from gramscope_lab.nets.cnn import CNN
from gramscope_lab.nets.mlp import MLP
from gramscope_lab.nets.resnet import ResNet
from gramscope_lab.nets.transformer import Transformer
from gramscope_lab.nets.vae import VAE, VAEOutput, vae_loss

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "VAE",
    "ResNet",
    "Transformer",
    "VAEOutput",
    "build",
    "vae_loss",
]

MODELS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet": ResNet,
    "vae": VAE,
    "transformer": Transformer,
}


def build(
    name: str,
    input_shape: int | Sequence[int],
    outputs: int,
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> nn.Module:
    """A new model, initialised from the generator alone.

    Args:
        name: mlp, cnn, resnet, vae or transformer.
        input_shape: shape of one input, without the sample axis.
        outputs: number of outputs.
        generator: source of the initial weights, which are made on its device; a new one with seed 0 when ``None``.
        options: those of the model's class, for example ``hidden=(256, 256), activation="relu"`` for an MLP.

    >>> build("mlp", (1, 8, 8), 10, hidden=(32,), activation="relu", bias=False)
    MLP(
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (hidden1): Linear(in_features=64, out_features=32, bias=False)
      (activation1): ReLU()
      (readout): Linear(in_features=32, out_features=10, bias=False)
    )
    """
    if name not in MODELS:
        raise InputError(no_such("model", name, MODELS))
    known = [o for o in inspect.signature(MODELS[name]).parameters if o not in ("input_shape", "outputs", "generator")]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise InputError(f"model {name!r} has no option {', '.join(unknown)}; it has: {', '.join(known)}")
    return MODELS[name](input_shape, outputs, generator=generator, **options)
