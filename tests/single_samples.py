"""An oracle for whole models: one sample at a time, without padding, one plain gradient for every output, in float64.

Every application of a weight is written as ``z + 0``, and the gradient of the added zero is that of the pre-activation. Modules
that compute ``z = W h`` get their zero from a hook; what no module hook sees is written out by the models of the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import target_linearity

RIDGE, GAMMA = 0.5, 0.05
#: the label of a whole sample stands here in place of a position
WHOLE = -1


@dataclass
class Zeros:
    """The applications of one forward: name, group, inputs ``[sites, d]``, the added zero and its form ``[sites, k]``."""

    seen: list[tuple[str, int, Tensor, Tensor, Callable[[Tensor], Tensor]]] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, h: Tensor, z: Tensor, rows: Callable[[Tensor], Tensor], group: int = 0) -> Tensor:
        """``z`` with a zero added."""
        zero = torch.zeros_like(z, requires_grad=True)
        self.seen.append((name, group, h.detach(), zero, rows))
        return z + zero

    def hook(self, name: str, module: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        """The same for a module with a batch of one sample."""
        if isinstance(module, nn.Embedding):
            hot = F.one_hot(x.flatten(), module.num_embeddings).to(z.dtype)
            self.outputs[name] = z.detach().flatten(0, -2)
            return self.add(name, hot, z, lambda g: g.flatten(0, -2))
        if isinstance(module, nn.ConvTranspose2d):  # without overlap: a patch of outputs for every input
            size = module.kernel_size
            return self.add(name, x[0].flatten(1).T, z, lambda g: F.unfold(g, size, stride=size)[0].T)
        if isinstance(module, nn.Conv2d):
            h = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)[0].T  # type: ignore[arg-type]
            return self.add(name, h, z, lambda g: g[0].flatten(1).T)
        return self.add(name, x.flatten(0, -2), z, lambda g: g.flatten(0, -2))


@contextmanager
def zeros_added(modules: dict[str, nn.Module]) -> Iterator[Zeros]:
    """Add zeros to the outputs of modules."""
    zeros = Zeros()

    def hooked(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        return lambda module, args, z: zeros.hook(name, module, args[0], z)

    handles = [module.register_forward_hook(hooked(name)) for name, module in modules.items()]
    try:
        yield zeros
    finally:
        for handle in handles:
            handle.remove()


class Oracle:
    """Sums over samples, and the measures that follow from them.

    Args:
        run: from a sample to its scores ``[positions, classes]`` or ``[classes]``, with zeros added to its layers.
        samples: without padding, each as a batch of one.
        labels: ``(position, label)`` of every sample, position −1 for the whole.
        weights: by layer, ``[k, d]`` or ``[groups, k, d]``.
    """

    def __init__(
        self,
        run: Callable[[Any], tuple[Tensor, Zeros]],
        samples: Sequence[Any],
        labels: Sequence[Sequence[tuple[int, int]]],
        weights: dict[str, Tensor],
    ) -> None:
        self.n, self.terms, self.correct, self.loss = len(samples), sum(map(len, labels)), 0, 0.0
        self.weights = {name: (W if W.dim() == 3 else W[None]).detach() for name, W in weights.items()}
        self.D = {name: torch.zeros_like(W) for name, W in self.weights.items()}
        self.Sigma = {name: W.new_zeros(W.shape[0], W.shape[1], W.shape[1]) for name, W in self.weights.items()}
        self.JtJ = {name: part.clone() for name, part in self.Sigma.items()}
        self.rows: dict[str, list[Tensor]] = {name: [] for name in self.weights}
        self.labels = torch.tensor([label for sample in labels for _, label in sample])
        for sample, labelled in zip(samples, labels, strict=True):
            self._add(*run(sample), labelled)

    def _add(self, scores: Tensor, zeros: Zeros, labelled: Sequence[tuple[int, int]]) -> None:
        loss = torch.zeros((), dtype=scores.dtype)
        for position, label in labelled:
            row = scores if position == WHOLE else scores[position]
            loss = loss - row.log_softmax(0)[label]
            self.correct += int(row.argmax() == label)
        self.loss += float(loss.detach())
        added = [zero for _, _, _, zero, _ in zeros.seen]
        for f in (loss, *scores.flatten()):
            gradients = torch.autograd.grad(f, added, retain_graph=True, allow_unused=True)
            for (name, group, h, _, rows), gradient in zip(zeros.seen, gradients, strict=True):
                if gradient is None:
                    continue
                delta = rows(gradient)
                if f is loss:
                    self.D[name][group] += delta.T @ h
                    self.Sigma[name][group] += delta.T @ delta
                else:
                    self.JtJ[name][group] += delta.T @ delta
        self._add_rows(len(scores) if scores.dim() > 1 else 0, zeros, labelled)

    def _add_rows(self, positions: int, zeros: Zeros, labelled: Sequence[tuple[int, int]]) -> None:
        for name in self.weights:
            parts = [h for seen, _, h, _, _ in zeros.seen if seen == name]
            groups = self.weights[name].shape[0]
            # groups are joined, further applications are further sites; the features of an embedding are its outputs
            h = torch.cat(parts, 1) if groups > 1 else torch.cat(parts)
            h = zeros.outputs.get(name, h)
            if labelled[0][0] == WHOLE:
                self.rows[name].append(h.mean(0))
            elif len(h) == positions:
                self.rows[name] += [h[position] for position, _ in labelled]

    def measures(self, name: str) -> dict[str, float]:
        """The columns of one layer, by their dense formulas; groups are diagonal blocks."""
        W, D, Sigma, K = (torch.block_diag(*x[name]) for x in (self.weights, self.D, self.Sigma, self.JtJ))
        G, F_, step = W.T @ (K / self.n) @ W, W.T @ W, GAMMA / self.terms
        actual = (W - step * D).T @ (W - step * D) - F_
        M = -step * D + step**2 / 2 * Sigma @ W
        found = {
            "gradient_norm": D.norm() / self.terms,
            "vcs_cosine": _cosine(W.T @ M + M.T @ W, actual),
            "vcs_residual": step**2 * (D.T @ D - W.T @ Sigma @ W).norm() / actual.norm(),
            "nfa": _cosine(F_, G),
            "agop_trace": torch.trace(G),
            "fact": _cosine(F_, -W.T @ D),
            "crh_outputs_gw": _cosine(Sigma, W @ W.T),
        }
        if len(self.rows[name]) == len(self.labels):
            found |= self._of_features(torch.stack(self.rows[name]))
        return {key: float(value) for key, value in found.items()}

    def _of_features(self, H: Tensor) -> dict[str, Any]:
        if float((H - H.mean(0)).norm()) <= 1e-12 * float(H.norm()):  # constant: types of tokens
            return {}
        classes = self.labels.unique()
        Y = (self.labels[:, None] == classes).double()
        Y = Y - Y.mean(0)
        s = torch.linalg.svdvals(H - H.mean(0))
        p = s[s > 1e-10 * s[0]] / s.sum()
        means = torch.stack([H[self.labels == c].mean(0) for c in classes])
        inside = H - means[torch.searchsorted(classes, self.labels)]
        between = (means - H.mean(0)).T @ (means - H.mean(0)) / len(classes)
        within = inside.T @ inside / len(H)
        pinv = torch.linalg.pinv(between, rtol=1e-9, hermitian=True)
        return {
            "target_linearity": target_linearity(H, Y, RIDGE, False),
            "surrogate": (H.T @ Y).square().sum(),
            "feature_rank": torch.exp(-(p * p.log()).sum()),
            "nc1": torch.trace(within @ pinv) / len(classes),
        }


def _cosine(A: Tensor, B: Tensor) -> Tensor:
    return (A * B).sum() / A.norm() / B.norm()
