"""A fully connected variational autoencoder ([Gram] Fig. 10) and its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError
from gramscope_lab.nets.mlp import MLP
from gramscope_lab.nets.seeded_layers import activation_module, default_generator, linear, shape_of


class VAEOutput(NamedTuple):
    """Reconstruction logits ``[n, *input_shape]``, mean and log-variance of the code ``[n, latent]``, and the net's β."""

    logits: Tensor
    mean: Tensor
    log_variance: Tensor
    beta: float = 1.0


class VAE(nn.Module):
    """Encoder and decoder with the same hidden widths; pixels in [0, 1] are modelled as Bernoulli probabilities.

    Args:
        input_shape: shape of one input.
        outputs: not used (a VAE reconstructs its input); accepted so that every model is built alike.
        hidden: widths of the encoder; the decoder has them in reverse.
        latent: dimension of the code.
        activation: as for :class:`~gramscope_lab.nets.mlp.MLP`.
        beta: weight of the divergence in :func:`vae_loss`.
        sampling: draw the noise of the code in training mode, from torch's global generator as dropout does.
        generator: source of the initial weights; a new one with seed 0 when ``None``.
    """

    def __init__(
        self,
        input_shape: int | Sequence[int],
        outputs: int | None = None,
        hidden: int | Sequence[int] = (512, 512),
        *,
        latent: int = 32,
        activation: str = "gelu",
        beta: float = 1.0,
        sampling: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        hidden = (hidden,) if isinstance(hidden, int) else tuple(hidden)
        if not hidden or latent < 1:
            raise InputError(f"hidden={hidden}, latent={latent}: a VAE needs a hidden layer and a code")
        if not beta >= 0:
            raise InputError(f"beta={beta}: the weight of the divergence must be at least 0")
        generator = default_generator(generator)
        self.beta = float(beta)
        self.sampling = bool(sampling)
        self.input_shape = shape_of(input_shape)
        pixels = math.prod(self.input_shape)
        self.encoder = MLP(pixels, hidden[-1], hidden[:-1], activation=activation, generator=generator)
        self.activation = activation_module(activation)
        self.mean = linear(hidden[-1], latent, generator)
        self.log_variance = linear(hidden[-1], latent, generator)
        self.decoder = MLP(latent, pixels, hidden[::-1], activation=activation, generator=generator)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the code, ``[n, latent]`` each."""
        features = self.activation(self.encoder(x))
        return self.mean(features), self.log_variance(features)

    def decode(self, z: Tensor) -> Tensor:
        """Reconstruction logits ``[n, *input_shape]``; their sigmoid is the image."""
        return self.decoder(z).unflatten(1, self.input_shape)  # type: ignore[no-any-return]

    @override
    def forward(self, x: Tensor, noise: Tensor | None = None) -> VAEOutput:
        """Encode, sample ``z = μ + σ·noise`` and decode.

        Args:
            x: ``[n, *input_shape]``.
            noise: standard normal ``[n, latent]``, drawn by the caller; ``None`` decodes the mean unless the net draws it.
        """
        mean, log_variance = self.encode(x)
        if noise is None and self.sampling and self.training:
            noise = torch.randn_like(mean)
        z = mean if noise is None else mean + torch.exp(0.5 * log_variance) * noise
        return VAEOutput(self.decode(z), mean, log_variance, self.beta)


def vae_loss(output: VAEOutput, x: Tensor, beta: float | None = None) -> Tensor:
    """Loss of each sample, ``[n]``: binary cross-entropy summed over pixels + β KL(N(μ, σ²) ‖ N(0, I)).

    Args:
        output: what the net returned for ``x``.
        x: the inputs ``[n, *input_shape]``, from 0 to 1.
        beta: β; the net's own when ``None``.
    """
    beta = output.beta if beta is None else beta
    reconstruction = F.binary_cross_entropy_with_logits(output.logits, x, reduction="none").flatten(1).sum(1)
    mean, log_variance = output.mean, output.log_variance
    divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(1)
    return reconstruction + beta * divergence
