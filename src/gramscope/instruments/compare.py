"""``gs.compare``: what separates two models of one architecture, layer by layer: base and fine-tuned, or two seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, Note
from gramscope.instruments.cka import cka
from gramscope.instruments.measure import measure
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import may_compute_loss
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector, matched_layers, select_layers
from gramscope.linalg.arrays import common_part, to_double
from gramscope.linalg.gram import Factor, Factored, cosine
from gramscope.linalg.measured import Measured
from gramscope.measures.spectrum import summarise
from gramscope.measures.table import Table
from gramscope.names import match_names
from gramscope.statistics.collect import collect

#: leading singular directions whose subspaces are compared
DIRECTIONS = 16
#: share of ‖ΔW‖² that a rank must keep
SHARE = 0.9


@dataclass(frozen=True)
class Comparison(Table):
    """The table of :func:`compare`, with the spectra of the changes.

    Args:
        spectra: singular values of ``ΔW = W_b − W_a`` by layer, descending, float64.
    """

    spectra: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def rank_pattern(
        self, share: float = SHARE, layers: str | Iterable[str] = "*", most: int | None = None
    ) -> dict[str, int]:
        """Ranks for LoRA that keep this share of ``‖ΔW‖²`` of each layer, as ``peft.LoraConfig(rank_pattern=…)`` takes them.

        Args:
            share: of the squared Frobenius norm.
            layers: names or globs of the layers that LoRA trains.
            most: an upper limit of the ranks.
        """
        globs = [layers] if isinstance(layers, str) else list(layers)
        chosen = {n: s for n, s in self.spectra.items() if any(fnmatchcase(n, glob) for glob in globs)}
        if not chosen:
            raise InputError(f"layers={layers!r} names no layer; there are: {', '.join(self.spectra)}")
        return rank_pattern(chosen, share, most)


def rank_pattern(spectra: Mapping[str, Tensor], share: float = SHARE, most: int | None = None) -> dict[str, int]:
    """How many of the leading singular values of each layer hold ``share`` of their squares, at least 1.

    >>> import torch
    >>> rank_pattern({"q": torch.tensor([4.0, 1.0, 0.1]), "k": torch.tensor([1.0, 1.0, 1.0])})
    {'q': 1, 'k': 3}
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share}: give a number above 0 and at most 1")
    ranks = {}
    for name, values in spectra.items():
        squares = to_double(values).square().cumsum(0)
        rank = int((squares < share * squares[-1] * (1 - 1e-12)).sum()) + 1
        ranks[name] = rank if most is None else min(rank, most)
    return ranks


def compare(
    a: nn.Module,
    b: nn.Module,
    batches: Any = None,
    loss: Loss | None = None,
    *,
    layers: LayerSelector = None,
    directions: int = DIRECTIONS,
    measuring: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare two models layer by layer. Layers are those of ``a`` that ``b`` has too, under whatever wrapper.

    Args:
        a: the model that is compared with, such as the base model.
        b: the other, such as the fine-tuned one; LoRA's adapters count as parts of the weights that they change.
        batches: data as for :func:`gramscope.measure`; without them weights alone are compared.
        loss: as for :func:`gramscope.measure`; without one, nothing that needs gradients of a loss is compared.
        layers: names, globs or types of layers of ``a``.
        directions: leading singular directions whose subspaces are compared.
        measuring: further arguments of :func:`gramscope.measure`, such as ``{"tokens": 0}``.

    Returns:
        A table with these columns, Δ from ``a`` to ``b``:

        change            ``‖ΔW‖ / ‖W_a‖``
        change_rank       effective rank of ΔW; change_stable_rank its stable rank; rank_90 directions with 90 % of ``‖ΔW‖²``
        overlap_in        mean squared cosine of the principal angles between the leading right singular subspaces of both
        overlap_out       the same on the left; overlap_in_null and overlap_out_null of random subspaces
        cka               debiased linear CKA of the layer's inputs in both models
        agop_cosine       cosine of the AGOPs at the layer's input
        linearity_change  target linearity of b minus that of a
        nfa_change        the same of the neural feature ansatz
        virtual_share     ρ² (0 if ρ < 0), ρ the cosine of ``W_bᵀW_b − W_aᵀW_a`` and a's virtual covariance shift

    >>> import torch, gramscope as gs
    >>> a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    >>> _ = b.load_state_dict({"weight": a.weight + torch.tensor([[1.0, 0, 0], [0, 0, 0]]), "bias": a.bias})
    >>> gs.compare(torch.nn.Sequential(a), torch.nn.Sequential(b))["0"]["rank_90"]
    1
    """
    pairs = _pairs(a, b, layers)
    rows: dict[str, dict[str, float | None]] = {}
    notes: dict[str, Note] = {}
    spectra: dict[str, Tensor] = {}
    weights: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (first, second) in pairs.items():
        if first.shape != second.shape:
            text = f"weights of shapes {tuple(first.shape)} and {tuple(second.shape)}"
            common = common_part(first, second)
            if common is None:
                notes[name] = Note("undefined", f"{text} cannot be compared")
                continue
            first, second = first[common], second[common]
            notes[name] = Note("remark", f"{text}: the first {' × '.join(map(str, first.shape))} entries are compared")
        weights[name] = first, second
        rows[name], spectra[name] = _weights_compared(first, second, directions)
    found = Comparison(rows, {}, notes, spectra=spectra)
    if batches is not None:
        _add_data(found, a, b, batches, loss, layers, weights, dict(measuring or {}))
    return found


def _pairs(a: nn.Module, b: nn.Module, layers: LayerSelector) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights of the layers that both models have, in float64, by the names of ``a``."""
    pairs = matched_layers(a, b, layers)
    return {name: (to_double(one.weight()), to_double(other.weight())) for name, (one, other) in pairs.items()}


def _weights_compared(A: Tensor, B: Tensor, directions: int) -> tuple[dict[str, float | None], Tensor]:
    """The columns that need weights alone, and the singular values of the change; groups are blocks of one matrix."""
    values = torch.linalg.svdvals(B.to(A.device) - A).flatten().sort(descending=True).values
    norm = float(values.norm())
    spectrum = summarise(values, 0.0)
    row: dict[str, float | None] = {
        "change": norm / float(A.norm()) if A.any() else None,
        "change_rank": spectrum.effective_rank if norm else 0.0,
        "change_stable_rank": spectrum.stable_rank if norm else 0.0,
        "rank_90": rank_pattern({"": values})[""] if norm else 0,
    }
    sides = zip(("in", "out"), _subspaces(A, directions), _subspaces(B.to(A.device), directions), strict=True)
    for side, one, two in sides:
        size, r = one.shape[-2:]
        overlap = (one.mT @ two).square().sum((-2, -1)) / r
        row[f"overlap_{side}"], row[f"overlap_{side}_null"] = float(overlap.mean()), r / size
    return row, values.cpu()


def _subspaces(W: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """Leading right and left singular vectors, ``[..., d, r]`` and ``[..., k, r]``."""
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    r = min(directions, max(1, min(W.shape[-2:]) // 2))
    return Vh.mT[..., :r], U[..., :r]


def _add_data(
    found: Comparison,
    a: nn.Module,
    b: nn.Module,
    batches: Any,
    loss: Loss | None,
    layers: LayerSelector,
    weights: Mapping[str, tuple[Tensor, Tensor]],
    settings: dict[str, Any],
) -> None:
    """Fill the columns that need data; what one of them cannot have becomes a note."""
    others = match_names(weights, [layer.name for layer in select_layers(unwrap(b))])
    names = ["target_linearity", "nfa"]
    tables = [
        measure(model, batches, loss, measures=names, layers=chosen, **{"progress": False, **settings})
        for model, chosen in ((a, layers), (b, None))
    ]
    shared = {name: settings[name] for name in ("output", "unpack") if name in settings}
    alike = cka(a, batches, b, unpack=settings.get("unpack"))
    sums = [
        collect(model, batches, loss, layers=chosen, features=False, jacobians="auto", progress=False, **shared)
        for model, chosen in ((a, layers), (b, None))
    ]
    has_loss = loss is not None or may_compute_loss(unwrap(a))
    for name, other in others.items():
        if name not in tables[0].rows or other not in tables[1].rows:
            found.notes[name] = Note("remark", "only its weights are compared: it was not measured in both models")
            continue
        A, B = (Factor(W) for W in weights[name])

        def agop_cosine(name: str = name, other: str = other, A: Factor = A, B: Factor = B) -> Measured:
            return cosine(Factored.of(A, K=sums[0][name].K[None]), Factored.of(B, K=sums[1][other].K[None]))

        def virtual_share(name: str = name, A: Factor = A, B: Factor = B) -> float:
            D = Factor(to_double(sums[0][name].gradient))
            shift = (Factored.of(A, D) + Factored.of(D, A)) * -1.0
            rho = float(cosine(Factored.of(B) - Factored.of(A), shift))
            return max(rho, 0.0) ** 2

        def difference(column: str, name: str = name, other: str = other) -> float | None:
            one, two = tables[0].rows[name].get(column), tables[1].rows[other].get(column)
            return None if one is None or two is None else two - one

        columns: dict[str, Callable[[], float | None]] = {
            "cka": lambda name=name, other=other: alike[name, other],  # type: ignore[misc]
            "agop_cosine": agop_cosine,
            "linearity_change": lambda: difference("target_linearity"),
            "nfa_change": lambda: difference("nfa"),
        }
        if has_loss:
            columns["virtual_share"] = virtual_share
        for column, value_of in columns.items():
            try:
                value = value_of()
            except (InputError, LayerError, KeyError) as reason:
                found.notes[f"{name}.{column}"] = Note("undefined", str(reason))
                value = None
            found.rows[name][column] = value
    for name, table in (("a", tables[0]), ("b", tables[1])):
        found.network.update({f"{key} of {name}": value for key, value in table.network.items() if key != "samples"})
