"""Plain networks used by the experiments: nothing in them knows of gramscope, any model of yours works as well."""

from __future__ import annotations

from gramscope_lab.nets.by_name import MODELS, build
from gramscope_lab.nets.cnn import CNN
from gramscope_lab.nets.mlp import MLP, Logistic
from gramscope_lab.nets.resnet import ResNet
from gramscope_lab.nets.transformer import Transformer
from gramscope_lab.nets.vae import VAE, VAEOutput, vae_loss

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
