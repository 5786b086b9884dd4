"""Jacobians of the outputs with respect to pre-activations, ``J_i = ∂f(x_i)/∂z_i ∈ R^{c×k}`` at every site.

The average gradient outer product at a layer's input is ``Wᵀ K W`` with ``K = (1/n) Σ_i J_iᵀJ_i``, so ``k``-sized Jacobians
suffice where the naive way needs ``d``-sized ones. Where a layer has fewer inputs than outputs and alone reads them, the
smaller ``J W`` is what the backward pass gives there anyway.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gramscope.errors import InputError, LayerError, Note
from gramscope.layers.kinds import LinearLayer
from gramscope.layers.record import Application
from gramscope.layers.tape import Tape, batch_dependence
from gramscope.linalg.arrays import row_gram
from gramscope.linalg.budget import MEMORY, Budget
from gramscope.linalg.psd import psd_power


def at_own_inputs(tape: Tape, output: Tensor, budget: Budget) -> dict[str, Application]:
    """Linear layers with fewer inputs than outputs, whose gradient at the inputs is the one that passes through them, ``Wᵀδ``.

    It is that where the input goes nowhere else. Layers whose sums do not fit the budget are left out.
    """
    uses, nodes = Counter[tuple[Node, int]](), set[Node]()
    waiting = [get_gradient_edge(output).node] if output.requires_grad else []
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            edges = [(before, number) for before, number in node.next_functions if before is not None]
            uses.update(edges)
            waiting += [before for before, _ in edges]
    found = {}
    for a in [record.applications[0] for record in tape if len(record.applications) == 1]:
        linear = isinstance(a.layer, LinearLayer) and a.layer.parameter is not None
        if linear and a.edge and a.x_edge and uses[a.x_edge.node, a.x_edge.output_nr] == 1:
            k, d = a.z_shape[-1], a.x.shape[-1]
            if k > d and not budget.is_large((k, d)):
                found[a.layer.name] = a
    return found


@dataclass(frozen=True)
class Readout:
    """The linear layer ``f = W h + b`` whose output is the network's own: its Jacobians are the identity.

    Random signs of all outputs pull back to h with covariance ``WᵀW``. So do as many signs as inputs, times its square root.

    Args:
        application: of the layer.
        root: the square root of ``WᵀW [d, d]``, in float64.
    """

    application: Application
    root: Tensor

    @classmethod
    def find(cls, found: Mapping[str, Application], output: Tensor, roots: dict[str, Tensor]) -> Readout | None:
        """The readout, if it is one of the layers that :func:`at_own_inputs` found; ``roots`` are those that are known."""
        for name, a in found.items():
            if a.edge == get_gradient_edge(output):
                if name not in roots:
                    roots[name] = psd_power(row_gram(a.layer.weight()), 0.5)
                return cls(a, roots[name])
        return None

    def jacobians(self) -> Tensor:
        """Rows ``[1, 1, d, d]`` with the Gram matrix of ``J W`` over all samples and sites."""
        rows = self.application.z_shape[:-1].numel()
        return math.sqrt(rows) * self.root[None, None]


def jacobian_chunks(
    tape: Tape,
    output: Tensor,
    *,
    sketch: int | None = None,
    memory: int = MEMORY,
    generator: torch.Generator | None = None,
    readout: Readout | None = None,
    at_inputs: Collection[str] = (),
) -> Iterator[dict[str, Tensor]]:
    """Yield ``{layer: J [m, batch, sites, k]}`` for chunks of m outputs, until all c outputs are covered.

    Args:
        tape: a capture that has seen exactly one forward of the model.
        output: the model's output of that forward, ``[batch, …]``; all its entries of one sample count as outputs.
        sketch: instead of all c outputs, this many random combinations ``r_pᵀ J_i / √sketch`` with independent signs
            ``r_p``, for which ``E[Σ_p …ᵀ…] = J_iᵀJ_i``: unbiased for everything quadratic in J.
        memory: bytes a chunk may take: directions at the output, gradients on the way and Jacobians of all layers. At
            least one output is taken at a time; if that is too much, give smaller batches. On the CPU chunks take 4 MiB at
            most, unless a single output takes more.
        generator: source of the signs (required with ``sketch``).
        readout: the layer that gives the output, which is left out; random combinations of its inputs take the place of
            those of the outputs.
        at_inputs: layers of which ``J W [m, batch, sites, d]`` is wanted, among those of :func:`at_own_inputs`.

    Grouped layers have a leading axis more, ``[m, groups, batch, sites, k]``.
    """
    applications = [a for a in _seen_by_autograd(tape) if readout is None or a is not readout.application]
    if not applications:
        return
    if not output.requires_grad:
        raise LayerError("the output does not depend on any captured layer")
    output = _samples_first(tape, output)
    n, count = output.shape[0], output[0].numel()
    if sketch is not None and (sketch < 1 or generator is None):
        raise InputError(f"sketch={sketch} with generator={generator}: give a positive number and a torch.Generator")
    total = count if sketch is None else sketch
    root: Tensor | GradientEdge | None = output
    start_of_way, elsewhere = output, set[str]()
    if readout is not None:
        root, start_of_way = readout.application.x_edge, readout.application.x
        elsewhere = {readout.application.layer.name}
    assert root is not None
    edges = {id(a): a.x_edge if a.layer.name in at_inputs else a.edge for a in applications}
    chunk = _chunk_size(applications, start_of_way, total, memory)
    batched = True
    with tape.paused():
        for start in range(0, total, chunk):
            m = min(chunk, total - start)
            if sketch is None or generator is None:
                directions = torch.zeros(m, n, count, dtype=output.dtype, device=output.device)
                directions.diagonal(start, 0, 2).fill_(1)  # [n, m], the entries [i, :, start + i]
            else:
                directions = torch.randint(
                    2, (m, *start_of_way.shape), generator=generator, device=generator.device, dtype=start_of_way.dtype
                )
                directions = directions.mul_(2).sub_(1).div_(total**0.5).to(output.device)
                if readout is not None:
                    directions = directions @ readout.root.to(directions.dtype)
            directions = directions.reshape(m, *start_of_way.shape)
            gradients, batched = _pull_back(root, [edge for edge in edges.values() if edge], directions, batched)
            del directions
            jacobians = _by_layer(tape, applications, gradients, m, elsewhere, at_inputs)
            del gradients
            yield jacobians
            del jacobians  # a caller that drops the chunk too frees it before the next one is made


def _seen_by_autograd(tape: Tape) -> list[Application]:
    """The applications of layers with a gradient graph; the others are noted, or raise if they were asked for."""
    across = tape.calls[-1].across_samples if tape.calls else {}
    if across:
        raise InputError(f"no Jacobians of single samples: {next(iter(across.values()))}")
    blind = sorted(r.name for r in tape if all(a.edge is None for a in r.applications))
    reason = (
        "it ran without a gradient graph: under no_grad, or inside a re-entrant checkpoint (use_reentrant=False helps)"
    )
    if blind and (tape.explicit or len(blind) == len(tape)):
        raise LayerError(f"no Jacobians at {', '.join(blind)}: {reason}; choose other layers=")
    tape.unsupported |= dict.fromkeys(blind, Note("no Jacobians", f"no Jacobians: {reason}"))
    applications = [a for a in tape.applications() if a.layer.name not in blind]
    if not applications:
        raise LayerError("the output does not depend on any captured layer")
    return applications


def check_samples_are_independent(model: nn.Module) -> None:
    """Raise if a sample's output depends on its batch: batch normalisation in train mode."""
    problem = batch_dependence(model)
    if problem is not None:
        raise LayerError(problem)


def layers_with_shared_rows(tape: Tape, output: Tensor) -> frozenset[str]:
    """Names of layers of which one row of inputs serves several samples: learned queries, a table of relative positions.

    No sample has a gradient of its own there. The outputs of either half of the samples are pulled back, with random weights;
    a row serves samples of both halves where both arrive.

    Args:
        tape: a capture that has seen exactly one forward of the model, in which no sample influences another's output.
        output: the model's output of that forward.
    """
    output = _samples_first(tape, output)
    watched = [a for a in tape.applications() if a.edge is not None]
    half = output.shape[0] // 2
    if half == 0 or not watched or not output.requires_grad:
        return frozenset()
    generator = torch.Generator(device="cpu").manual_seed(0)
    weights = torch.randn(output.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(output)
    edges = [a.edge for a in watched if a.edge]
    with tape.paused():
        first, second = (
            torch.autograd.grad(rows, edges, weights.expand_as(rows), retain_graph=True, allow_unused=True)
            for rows in (output[:half], output[half:])
        )
    return frozenset(
        a.layer.name
        for a, one, other in zip(watched, first, second, strict=True)
        if one is not None and other is not None and bool(((one != 0) & (other != 0)).any())
    )


def _samples_first(tape: Tape, output: Tensor) -> Tensor:
    """The output as ``[samples, …]``; an output whose rows are not the samples of the forward is refused.

    Two axes are ``[samples, outputs]`` if that fits, whatever ``batch_dim``: sequence-first models that pool return them.
    """
    n = tape.calls[-1].samples if tape.calls else output.shape[0]
    if n == 1 and (output.dim() == 0 or output.shape[0] != 1):
        return output.unsqueeze(0)  # one sample, given without a batch axis
    fits = output.dim() == 2 and output.shape[0] == n
    if output.dim() > tape.batch_dim > 0 and output.shape[tape.batch_dim] == n and not fits:
        return output.movedim(tape.batch_dim, 0)
    if output.dim() == 0 or output.shape[0] != n:
        raise InputError(
            f"the output has shape {tuple(output.shape)} for {n} samples; bring it to [samples, …] with output="
        )
    return output


def _chunk_size(applications: Sequence[Application], output: Tensor, total: int, memory: int) -> int:
    """How many outputs fit the budget.

    For each of them there are its direction and its gradient just below the output, the gradients of all layers, and
    copies of the largest one: on its way back, and as the rows of its Gram matrix.
    """
    sizes = [a.z_bytes for a in applications]
    per_output = 2 * output.numel() * output.element_size() + sum(sizes) + 2 * max(sizes)
    return min(total, Budget(memory).outputs_at_once(per_output, output.device.type == "cpu"))


def _pull_back(
    output: Tensor | GradientEdge, edges: Sequence[GradientEdge], directions: Tensor, batched: bool
) -> tuple[list[Tensor | None], bool]:
    """Vector-Jacobian products of all directions at once, or one by one where an operation cannot be batched."""
    gradients_of = partial(torch.autograd.grad, output, edges, retain_graph=True, allow_unused=True)
    if batched and len(directions) > 1:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="There is a performance drop")
                return list(gradients_of(directions, is_grads_batched=True)), True
        except (RuntimeError, UserWarning):
            pass  # some operation has no batching rule; the loop below is exact for every operation
    by_direction = [gradients_of(direction) for direction in directions]
    stacked: list[Tensor | None] = []
    for rows in zip(*by_direction, strict=True):
        reached = [row for row in rows if row is not None]
        if len(reached) == 1:
            stacked.append(reached[0].unsqueeze(0))  # no copy
        else:
            stacked.append(torch.stack(reached) if reached else None)
    return stacked, batched and len(directions) == 1


def _by_layer(
    tape: Tape,
    applications: Sequence[Application],
    gradients: Sequence[Tensor | None],
    m: int,
    elsewhere: set[str],
    at_inputs: Collection[str],
) -> dict[str, Tensor]:
    """Normal form ``[m, …, batch, sites, k]``; applications of one layer are joined along the sites.

    Those that the output does not depend on are zero, and layers of which that holds for all are left out, with a note unless
    they are in ``elsewhere``.
    """
    by_name: dict[str, list[Tensor]] = {}
    watched = [a for a in applications if a.edge is not None]
    known = {id(a): g for a, g in zip(watched, gradients, strict=True) if g is not None}
    reached = {a.layer.name for a in watched if id(a) in known}
    tape.note_reached("no Jacobians", reached | elsewhere, "the output does not depend on it")
    for a in applications:
        if a.layer.name not in reached:
            continue
        gradient = known[id(a)] if id(a) in known else a.zero().expand(m, *a.z_shape)
        rows_of = a.layer.inputs if a.layer.name in at_inputs else a.layer.outputs
        rows = torch.vmap(partial(rows_of, batch_dim=tape.batch_dim))(gradient)  # a view
        by_name.setdefault(a.layer.name, []).append(rows)
    return {name: torch.cat(values, dim=-2) if len(values) > 1 else values[0] for name, values in by_name.items()}
