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

from reference import scatter_ratio, target_linearity

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
    """Sums over samples, and the columns that follow from them by their dense formulas.

    Args:
        weights: by layer, ``[k, d]`` or ``[groups, k, d]``.
        targets: of the rows of features, centred where they stand for classes; one-hot labels if ``labels`` are given.
        labels: of the rows.
    """

    def __init__(self, weights: dict[str, Tensor], targets: Tensor | None = None, labels: Tensor | None = None) -> None:
        self.weights = {name: (W if W.dim() == 3 else W[None]).detach() for name, W in weights.items()}
        self.D = {name: torch.zeros_like(W) for name, W in self.weights.items()}
        self.Sigma = {name: W.new_zeros(W.shape[0], W.shape[1], W.shape[1]) for name, W in self.weights.items()}
        self.JtJ = {name: part.clone() for name, part in self.Sigma.items()}
        self.rows: dict[str, list[Tensor]] = {name: [] for name in self.weights}
        self.places: dict[str, list[int]] = {name: [] for name in self.weights}
        self.unlabelled: dict[str, list[Tensor]] = {name: [] for name in self.weights}
        self.every_site = False
        self.n, self.terms, self.correct, self.loss, self.labels = 0, 1, 0, 0.0, labels
        if labels is not None:
            targets = (labels[:, None] == labels.unique()).double()
            targets = targets - targets.mean(0)
        self.targets = targets

    def add_loss(self, loss: Tensor, zeros: Zeros) -> None:
        """D and Σ of a loss that is summed."""
        self.loss += float(loss.detach())
        for name, group, h, delta in self._gradients(loss, zeros):
            self.D[name][group] += delta.T @ h
            self.Sigma[name][group] += delta.T @ delta

    def add_outputs(self, outputs: Tensor, zeros: Zeros) -> None:
        """JᵀJ of one sample."""
        self.n += 1
        for f in outputs.flatten():
            for name, group, _, delta in self._gradients(f, zeros):
                self.JtJ[name][group] += delta.T @ delta

    def add_rows(self, zeros: Zeros, places: Sequence[int], first: int, positions: int = 0) -> None:
        """The features of one sample: their mean, or those at ``places`` of as many positions as labels."""
        for name in self.weights:
            parts = [h for seen, _, h, _, _ in zeros.seen if seen == name]
            if not parts:
                continue
            groups = self.weights[name].shape[0]
            # groups are joined, further applications are further sites; the features of an embedding are its outputs
            h = torch.cat(parts, 1) if groups > 1 else torch.cat(parts)
            h = zeros.outputs.get(name, h)
            self.unlabelled[name].append(h if self.every_site else h.mean(0, keepdim=True))
            if not positions or len(h) == positions:
                self.rows[name] += [h[place] for place in places] if positions else [h.mean(0)]
                self.places[name] += range(first, first + max(len(places), 1))

    def _gradients(self, f: Tensor, zeros: Zeros) -> Iterator[tuple[str, int, Tensor, Tensor]]:
        if not f.requires_grad:
            return
        added = [zero for _, _, _, zero, _ in zeros.seen]
        gradients = torch.autograd.grad(f, added, retain_graph=True, allow_unused=True)
        for (name, group, h, _, rows), gradient in zip(zeros.seen, gradients, strict=True):
            if gradient is not None:
                yield name, group, h, rows(gradient)

    def measures(self, name: str) -> dict[str, float]:
        """The columns of one layer; groups are diagonal blocks."""
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
        if not self.places[name] and self.unlabelled[name]:
            found |= {"feature_rank": _rank(torch.cat(self.unlabelled[name]))}
        elif self.places[name]:
            found |= self._of_features(torch.stack(self.rows[name]), torch.tensor(self.places[name]))
        return {key: float(value) for key, value in found.items()}

    def _of_features(self, H: Tensor, places: Tensor) -> dict[str, Any]:
        if float((H - H.mean(0)).norm()) <= 1e-12 * float(H.norm()):  # constant: types of tokens
            return {}
        found = {"feature_rank": _rank(H)}
        if self.targets is not None:
            Y = self.targets[places]
            Y = Y if self.labels is None else Y - Y.mean(0)
            found |= {"target_linearity": target_linearity(H, Y, RIDGE, False), "surrogate": (H.T @ Y).square().sum()}
        return found if self.labels is None else found | {"nc1": scatter_ratio(H, self.labels[places])[0]}


def of_single_samples(
    run: Callable[[Any], tuple[Tensor, Zeros]],
    samples: Sequence[Any],
    labels: Sequence[Sequence[tuple[int, int]]],
    weights: dict[str, Tensor],
    every_site: bool = False,
) -> Oracle:
    """The sums under cross-entropy, from a sample to its scores ``[positions, classes]`` or ``[classes]``.

    Args:
        run: adds zeros to the layers of one sample, without padding, as a batch of one.
        samples: of the data.
        labels: ``(position, label)`` of every sample, position −1 for the whole.
        weights: by layer.
        every_site: of layers without labels at their positions take every row, and not the mean of a sample.
    """
    oracle = Oracle(weights, labels=torch.tensor([label for sample in labels for _, label in sample]))
    oracle.terms, oracle.every_site, first = sum(map(len, labels)), every_site, 0
    for sample, labelled in zip(samples, labels, strict=True):
        scores, zeros = run(sample)
        loss = torch.zeros((), dtype=scores.dtype)
        for position, label in labelled:
            row = scores if position == WHOLE else scores[position]
            loss = loss - row.log_softmax(0)[label]
            oracle.correct += int(row.argmax() == label)
        oracle.add_loss(loss, zeros)
        oracle.add_outputs(scores, zeros)
        positions = [position for position, _ in labelled]
        oracle.add_rows(zeros, positions, first, 0 if positions[0] == WHOLE else len(scores))
        first += len(labelled)
    for places in oracle.places.values():
        if len(places) < first:  # an encoder may have as many positions as some labels by chance
            places.clear()
    return oracle


def _rank(H: Tensor) -> Tensor:
    s = torch.linalg.svdvals(H - H.mean(0))
    p = s[s > 1e-10 * s[0]] / s.sum()
    return torch.exp(-(p * p.log()).sum())


def _cosine(A: Tensor, B: Tensor) -> Tensor:
    return (A * B).sum() / A.norm() / B.norm()
