"""Losses of single samples, and evaluation over a set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.model_call import evaluating
from gramscope_lab.data.dataset import IGNORED
from gramscope_lab.nets.vae import VAE, VAEOutput, vae_loss

#: ``(what the model returned, targets) -> losses [batch]``, unreduced
SampleLoss: TypeAlias = Callable[[Any, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """``−log softmax(f)_y`` of each sample, ``[batch, classes], [batch] → [batch]``."""
    return F.cross_entropy(output, target, reduction="none")


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Squared error averaged over the outputs of each sample; labels become one-hot targets."""
    return (output - _as_targets(output, target)).square().flatten(1).mean(1)


def half_squared(output: Tensor, target: Tensor) -> Tensor:
    """``½‖f − y‖²`` of each sample (the loss of [NFA]); labels become one-hot targets."""
    return (output - _as_targets(output, target)).square().flatten(1).sum(1).mul(0.5)


def reconstruction(output: VAEOutput, target: Tensor) -> Tensor:
    """The loss of a VAE, :func:`~gramscope_lab.nets.vae.vae_loss`; the target is the input. It has no accuracy."""
    return vae_loss(output, target.reshape(output.logits.shape))


def joined(output: VAEOutput) -> Tensor:
    """What a VAE returned as one tensor: logits, mean and log-variance side by side, ``[n, outputs]``."""
    return torch.cat([part.flatten(1) for part in (output.logits, output.mean, output.log_variance)], 1)


def measured_output(model: nn.Module) -> Callable[[VAEOutput], Tensor] | None:
    """What of a net's output measurements take derivatives of; ``None`` lets them find it."""
    return joined if isinstance(model, VAE) else None


def joined_loss(model: nn.Module, loss: SampleLoss) -> SampleLoss:
    """The loss of a net as a function of its :func:`measured_output`."""
    if not isinstance(model, VAE) or loss is not reconstruction:
        return loss
    latent, beta = model.mean.out_features, model.beta

    def of_joined(output: Tensor, target: Tensor) -> Tensor:
        logits, mean, log_variance = output[:, : -2 * latent], output[:, -2 * latent : -latent], output[:, -latent:]
        return reconstruction(VAEOutput(logits, mean, log_variance, beta), target)

    return of_joined


def _as_targets(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return target.reshape(output.shape)
    return F.one_hot(target, output.shape[-1]).to(output.dtype)


def sample_loss(name: str, task: str) -> SampleLoss:
    """The loss by its name in the configuration; ``auto`` is cross-entropy for classes and mean squares otherwise."""
    if name == "auto":
        name = "cross-entropy" if task == "classification" else "mse"
    if name == "cross-entropy" and task != "classification":
        raise InputError(f"loss = 'cross-entropy': the data's task is {task}; use 'mse' or 'half-squared'")
    return {"cross-entropy": cross_entropy, "mse": squared, "half-squared": half_squared}[name]


def correct(output: Any, target: Tensor) -> Tensor | None:
    """Which samples are classified right, ``[batch]``; ``None`` where the targets are no labels."""
    if target.is_floating_point() or not isinstance(output, Tensor):
        return None
    return output.argmax(-1) == target


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, loss: SampleLoss, batch_size: int = 5000) -> dict[str, float]:
    """Mean loss, and accuracy for labels, in evaluation mode; the model's mode is given back."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    right: Tensor | None = torch.zeros((), dtype=torch.float64, device=x.device)
    with evaluating(model):
        for xs, ys in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True):
            output = model(xs)
            total += loss(output, ys).sum()
            hits = correct(output, ys)
            right = None if hits is None or right is None else right + hits.sum()
    result = {"loss": float(total) / len(x)}
    if right is not None:
        result["accuracy"] = float(right) / int((y != IGNORED).sum())
    return result
