"""Plain networks used by the experiments: nothing in them knows of gramscope, any model of yours works as well."""

from __future__ import annotations

from gramscope.models.by_name import MODELS, build
from gramscope.models.cnn import CNN
from gramscope.models.mlp import MLP, Logistic
from gramscope.models.resnet import ResNet
from gramscope.models.transformer import Transformer
from gramscope.models.vae import VAE, VAEOutput, vae_loss

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "VAE",
    "Logistic",
    "ResNet",
    "Transformer",
    "VAEOutput",
    "build",
    "vae_loss",
]
