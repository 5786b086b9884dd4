"""``gs.FreeMuon``: Muon with built-in step lengths and averaged weights: no rate, schedule or horizon to choose.

A matrix z takes steps along O, the orthogonalised mean of recent gradients, and x is an average of all its values so far. At
step n, with s the scale of :func:`_scale` and ``f = min(1, (8/n)^0.7)``:

    O = orthogonalised Nesterov mean of the gradients at z, β = min(0.95, n/(n + 20))
    u, v = the running means, with the same β, of ⟨gₙ, Oₙ₋₁⟩ and ⟨gₙ₋₁, Oₙ₋₁⟩
    c = 0.7 c  where u < −½ v,  else min(1, 1.1 c);  1 at first
    z = z − c · 0.18 f · (s O + 0.15 (1 − f) z)
    x = x + 9/(n + 8) · (z − x)

- The mean of gradients reaches back over about 1 + n/20 steps, at most 20: early gradients come from weights that are soon far
  away. Orthogonalised steps are those of Muon (Jordan et al. 2024).
- x is the polynomial-decay average of Shamir and Zhang (2013): the weights of its terms grow like n⁸, so that it covers about
  the last ninth of all steps, however many there are. It does what a schedule that falls to 0 would do at a known end.
- c shortens the steps of a weight whose steps go too far: the loss fell along each before and rises along it after, by more
  than half as fast. Means of these slopes tell, since single ones change sign with every batch.
- Weights decay by the share 0.027 c f (1 − f) of a step, so that short runs are not slowed and long ones forget what early
  gradients wrote.

An embedding is the matrix ``[width, entries]`` that multiplies one-hot vectors. These have length 1, where the inputs of other
layers have about √d. So its steps are longer by ``√width/2``: an entry moves by up to 0.09 (root mean square).

All other parameters take steps of Adam with rate 0.02 f, and are averaged too.

Between steps the model has the weights x (:mod:`gramscope.optim.averaging`).
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from gramscope.distributed.exchange import Exchange, Group, find_exchange, is_sharded
from gramscope.errors import InputError, LayerError, ResultWarning
from gramscope.layers.kinds import EmbeddingLayer
from gramscope.layers.modules import outside_graphs, unwrap
from gramscope.layers.select import LayerSelector
from gramscope.linalg.arrays import without_autocast
from gramscope.optim.averaging import Averaging
from gramscope.optim.checks import check_owners, keep_dtypes, refuse_arguments, with_numbers
from gramscope.optim.choose_matrices import choose_trained
from gramscope.optim.directions import directions
from gramscope.optim.orthogonalise import in_pieces
from gramscope.optim.processes import check_together, local, over_shards, shards
from gramscope.optim.weight_matrix import WeightMatrix

#: the largest singular value of the first steps, for matrices with at least as many inputs as outputs
STEP = 0.18
#: λ of late steps
DECAY = 0.15
#: Adam's rate in the first steps
RATE = 0.02
#: the power of the average
POWER = 8
_BETAS = (0.9, 0.99)
#: gradients of Adam's parameters count as rounding up to this many ε of the largest
_NOISE = 8.0
#: matrices are orthogonalised together up to this share of all weights, or so many entries
_CHUNK, _ENTRIES = 1 / 12, 1 << 18
_INSTEAD = {
    "lr": "its step lengths are built in; optimizer.param_groups[i]['lr'] multiplies them, 1 by default",
    "weight_decay": "weights decay by a built-in share of each step (docs/free-muon.md)",
    "momentum": "the mean of gradients is built in",
    "betas": "the means of gradients are built in",
    "alpha": "that is an argument of gs.VCL",
    "gamma": "that is an argument of gs.VCL; optimizer.param_groups[i]['lr'] multiplies step lengths",
    "reduction": "its steps do not depend on the scale of the loss",
    "readout": "all other parameters are trained by Adam with a built-in rate",
    "solver": "that is an argument of gs.VCL",
}


def falling(n: int) -> float:
    """The share f of the first steps' length that step n has.

    >>> falling(8), round(falling(1000), 4)
    (1.0, 0.0341)
    """
    return float(min(1.0, (8 / n) ** 0.7))


def mean_weight(n: int) -> float:
    """β of the running mean at step n, ``min(0.95, n/(n + 20))``.

    >>> mean_weight(20), mean_weight(10_000)
    (0.5, 0.95)
    """
    return min(0.95, n / (n + 20))


class FreeMuon(Optimizer):
    """Muon with built-in step lengths and averaged weights, for a model's weight matrices and embeddings; Adam for the rest.

    There is no rate or schedule to choose, and the number of steps need not be known. Between steps the model has the averaged
    weights, which are the ones to evaluate and save. From the first forward pass in training mode until ``step()`` it has the
    newest ones, at which gradients are taken; ``state_dict()`` gives the average then too. ``param_groups`` has two groups,
    the matrices and the rest; ``lr`` multiplies the step lengths of a group and is 1, so that warm-ups and schedulers work.
    Steps do not depend on the scale of the loss. Weights of matrices decay by a built-in share that falls with the steps.

    Args:
        model: any module. Hooks on it and its parts move the weights before a step's first forward pass; so make the optimizer
            before a compiled model's first call.
        layers: names, globs or module types of the layers whose weights take Muon's steps. ``None``: every linear-like layer
            but the head, and embeddings whose weight is not tied. The head is what a Hugging Face model names in
            ``get_output_embeddings()``, else the layer registered last. :meth:`summary` shows the choice.
        split: names or globs of layers, each with the number of equal blocks of its outputs that are matrices of their own: 3
            for query, key and value of a fused layer, 3 × ``config.num_attention_heads`` for their heads.
        process_group: the processes that have the same gradients, which divide the work: by default those of a
            ``DistributedDataParallel`` model, else the default group of ``torch.distributed``; ``False`` where every process
            trains a model of its own.

    Raises:
        LayerError: no layer can be trained, or not one asked for.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
        >>> optimizer = gs.FreeMuon(model)
        >>> x, y = torch.randn(32, 8), torch.arange(32) % 3
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> print(optimizer.summary())
        parameter  matrix
        0.weight   16 × 8  Muon
        2.weight           Adam: the readout
        0.bias             Adam: 1-dimensional, not a matrix
        2.bias             Adam: 1-dimensional, not a matrix
    """

    #: torch.amp.GradScaler calls a step that it skips too, so that the model comes back to rest
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        layers: LayerSelector = None,
        split: Mapping[str, int] | None = None,
        process_group: Group = None,
        **unknown: Any,
    ) -> None:
        refuse_arguments("FreeMuon", unknown, "model layers split process_group", _INSTEAD)
        self._arguments: dict[str, Any] = {"layers": layers, "split": split, "process_group": process_group}
        self.model, self._root = model, unwrap(model)
        self._choice = choose_trained(model, layers, by_gradient=True, split=split)
        sharded = [p for p in self._choice.names if is_sharded(p)]
        #: processes that hold parts of the same parameters
        self._holders = list({e.group.group_name: e for p in sharded if (e := shards(p)[0])}.values())
        self._exchange = None if sharded else find_exchange(process_group, model)
        self._compared = False
        #: the matrices of each parameter; several for packed projections of attention
        self._matrices: dict[Tensor, list[WeightMatrix]] = defaultdict(list)
        for matrix in self._choice.matrices:
            self._matrices[matrix.parameter].append(matrix)
        rest = [p for p in self._choice.names if p not in self._matrices]
        names = [matrix.name for matrix in self._choice.matrices]
        self._open = True
        # betas: what OneCycleLR and CyclicLR cycle; matrices have a mean of their own
        super().__init__([{"params": list(self._matrices), "matrices": names}], {"lr": 1.0, "betas": _BETAS})
        if rest:
            self.add_param_group({"params": rest})
        self._open = False
        self._averaging = Averaging(self._root, self._choice.names)
        weakref.finalize(self, self._averaging.close).atexit = False

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._open:
            raise InputError("FreeMuon takes its parameters from the model: parameter groups cannot be added")
        super().add_param_group(param_group)

    def summary(self) -> str:
        """A table of all parameters: as which matrices they are trained, or why by Adam."""
        return self._choice.table("Muon", "Adam")

    @override
    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Matrices whose gradient is None or zero (an expert without tokens) keep their weights.

        Raises:
            LayerError: no matrix has a gradient, a parameter that is not the optimizer's has one, or processes have different
                gradients.
            NumericalError: a gradient is not finite. Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._skipped():
            return loss
        with without_autocast(self._choice.matrices[0].parameter.device):
            norms = self._gradient_norms()
            moved = self._moved(norms)
            self._averaging.rest()
            known = len(self.state)
            for p, name in self._choice.names.items():
                if name in norms:
                    self._begin(p)["step"] += p in moved
            matrices, *rest = self.param_groups
            mine = [p for p in matrices["params"] if p in moved]
            for chunk in self._chunks(mine):
                self._step_matrices(chunk, float(matrices["lr"]))
            for group in rest:
                self._step_rest([p for p in group["params"] if p in moved], group)
            self._average(moved)
            if len(self.state) > known:
                self._hold()
        return loss

    def _skipped(self) -> bool:
        """Undo the scaling of a GradScaler; True, and the model at rest, where gradients have overflowed."""
        overflow, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if overflow is not None and bool(overflow):
            self._averaging.rest()
            return True
        if scale is not None:
            for p in self._choice.names:
                if p.grad is not None:
                    local(p.grad).div_(scale)
        return False

    def _gradient_norms(self) -> dict[str, float]:
        """The norms of all gradients by name.

        Raises:
            LayerError, NumericalError: see :meth:`step`.
        """
        names = self._choice.names
        check_owners(self._root, names, "FreeMuon")
        norms = check_together(names, self._holders, next(iter(names)).device)
        if self._holders and norms:
            present = [p for p, name in names.items() if name in norms]
            sizes = torch.tensor(list(norms.values()), dtype=torch.float64, device=present[0].device)
            norms = dict(zip(norms, over_shards(sizes, present, Exchange.largest).tolist(), strict=True))
        if not any(names[p] in norms for p in self._matrices):
            raise LayerError(
                f"{self._choice.matrices[0].name} has no gradient, and no other matrix has: run backward() of a loss that "
                "depends on them before step()"
            )
        if self._exchange is not None and not self._compared:
            _compare(norms, self._exchange, next(iter(names)).device)
            self._compared = any(norms.values())
        return norms

    def _moved(self, norms: Mapping[str, float]) -> dict[Tensor, None]:
        """The parameters that this step changes: matrices whose gradient is not zero, and others that have one."""
        names = self._choice.names
        found = [p for p, name in names.items() if norms.get(name) or (name in norms and p not in self._matrices)]
        if any(self.state.get(p) for p in found) and not self._averaging.in_step:
            warnings.warn(
                "gradients were taken at the averaged weights, not at the newest ones: no module of the model was called in "
                "training mode since the last step. With torch.compile make FreeMuon before the model's first call",
                ResultWarning,
                stacklevel=4,
            )
        return dict.fromkeys(found)

    def _begin(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter, which begins with zeros."""
        state: dict[str, Any] = self.state[p]
        if not state:
            dtype = torch.promote_types(p.dtype, torch.float32)
            state["step"] = 0
            for key in ("mean", "lead") if p in self._matrices else ("exp_avg", "exp_avg_sq", "lead"):
                state[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
            if dtype != p.dtype:
                state["remainder"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
            if p in self._matrices:
                state["last"] = torch.zeros_like(p, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
                # c, the slope ⟨g, O⟩ before the last step, and the means u and v of slopes after and before steps
                state["guard"] = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype, device=p.device)
        return state

    def _chunks(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Parameters of a share of all weights, or a single one: what a step needs memory for at a time."""
        most = max(_CHUNK * sum(p.numel() for p in self._choice.names), _ENTRIES)
        chunk: list[Tensor] = []
        for p in sorted(parameters, key=lambda p: tuple(p.shape)):
            if chunk and sum(other.numel() for other in chunk) + p.numel() > most:
                yield chunk
                chunk = []
            chunk.append(p)
        if chunk:
            yield chunk

    def _step_matrices(self, parameters: Sequence[Tensor], lr: float) -> None:
        """Muon's steps of z."""
        states = [self.state[p] for p in parameters]
        grads = [_gradient(p) for p in parameters]
        for grad, state in zip(grads, states, strict=True):
            local(state["mean"]).lerp_(grad, 1 - mean_weight(state["step"]))
        betas = [mean_weight(state["step"]) for state in states]
        c, before, after_mean, before_mean = torch.stack([state["guard"] for state in states]).unbind(1)
        after = torch.stack([_inner(grad, local(state["last"])) for grad, state in zip(grads, states, strict=True)])
        after = over_shards(after, parameters)
        newest = 1 - torch.tensor(betas, dtype=after.dtype, device=after.device)
        after_mean, before_mean = after_mean.lerp(after, newest), before_mean.lerp(before, newest)
        c = torch.where(after_mean < -before_mean / 2, 0.7 * c, (1.1 * c).clamp_max(1.0))
        # as Nesterov: the newest gradient counts once more
        leads = {p: (g, local(s["mean"]), beta) for p, g, s, beta in zip(parameters, grads, states, betas, strict=True)}
        found = directions(leads, self._matrices, self._exchange)
        slopes = torch.stack([_inner(grad, O) for grad, O in zip(grads, found, strict=True)])
        slopes = over_shards(slopes, parameters)
        guards = torch.stack([c, slopes, after_mean, before_mean], 1)
        torch._foreach_copy_([state["guard"] for state in states], list(guards.unbind()))
        for p, state, O, share in zip(parameters, states, found, c.unbind(), strict=True):
            f = falling(state["step"])
            length = lr * STEP * f * share
            decay = length * DECAY * (1 - f)
            local(state["last"]).copy_(O)
            for lead, x, o in in_pieces(local(state["lead"]), local(p), O):  # z = p + lead
                lead.mul_(1 - decay).addcmul_(x.to(lead.dtype), decay, value=-1)
                lead.addcmul_(o.to(lead.dtype), length, value=-_scale(self._matrices[p][0]))

    def _step_rest(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Adam's steps of z with a falling rate; parameters with equally many steps together."""
        alike: dict[int, list[Tensor]] = defaultdict(list)
        for p in parameters:
            alike[self.state[p]["step"]].append(p)
        first, second = group["betas"]
        for n, members in alike.items():
            grads = [_gradient(p) for p in members]
            means, squares, leads = (
                [local(self.state[p][key]) for p in members] for key in ("exp_avg", "exp_avg_sq", "lead")
            )
            torch._foreach_lerp_(means, grads, 1 - first)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, grads, grads, 1 - second)
            sizes = torch._foreach_sqrt(squares)
            # Instead of Adam's eps, which is a scale of gradients: sizes below the rounding of the largest count as that, so
            # that a gradient that is zero up to rounding (of a bias of attention's keys) moves little. 0/0 is 0.
            filled = [size for size in sizes if size.numel()] or [sizes[0].new_zeros(1)]
            largest = torch.stack([norm.to(sizes[0]) for norm in torch._foreach_norm(filled, math.inf)]).amax()
            for exchange in self._holders:
                exchange.largest(largest)
            for size in sizes:
                size.clamp_min_((_NOISE * torch.finfo(size.dtype).eps * largest).to(size))
            torch._foreach_clamp_min_(sizes, math.sqrt(torch.finfo(sizes[0].dtype).tiny))
            rate = float(group["lr"]) * RATE * falling(n) * math.sqrt(1 - second**n) / (1 - first**n)
            torch._foreach_addcdiv_(leads, means, sizes, -rate)

    def _average(self, moved: Mapping[Tensor, None]) -> None:
        """Move x towards z; the parameters are at rest."""
        alike: dict[int, list[Tensor]] = defaultdict(list)
        for p in moved:
            alike[self.state[p]["step"]].append(p)
        for n, members in alike.items():
            share = (POWER + 1) / (n + POWER)
            leads = [local(self.state[p]["lead"]) for p in members]
            Averaging.add(members, leads, [self.state[p].get("remainder") for p in members], share)
            torch._foreach_mul_(leads, 1 - share)

    def _hold(self) -> None:
        """Tell the averaging of the parameters that have a state."""
        self._averaging.hold((p, self.state[p]) for p in self._choice.names if self.state.get(p))

    # --- state ----------------------------------------------------------------------------------------------------------

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`; training then continues with the same bits as without the interruption.

        States of torch's distributed checkpoint are taken too.
        """
        state_dict = with_numbers(state_dict)
        stored, own = state_dict["param_groups"][0], self.param_groups[0]
        if "matrices" not in stored:
            raise InputError("this state is not one of FreeMuon; was the checkpoint saved with another optimizer?")
        if stored["matrices"] != own["matrices"]:
            raise InputError(f"this state has the matrices {stored['matrices']}, this optimizer {own['matrices']}")
        for key, p in zip(stored["params"], own["params"], strict=True):
            mean = state_dict["state"].get(key, {}).get("mean")
            if mean is not None and mean.shape != p.shape:
                name = self._choice.names[p]
                raise InputError(f"the state of {name} is one of shape {tuple(mean.shape)}, not {tuple(p.shape)}")
        self._averaging.rest()
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)
        self._hold()

    def __deepcopy__(self, memo: dict[int, Any]) -> FreeMuon:
        """An optimizer with the same state for a copy of the model."""
        copied = type(self)(copy.deepcopy(self.model, memo), **self._arguments)
        memo[id(self)] = copied
        copied.load_state_dict(copy.deepcopy(self.state_dict()))
        copied._averaging.in_step = self._averaging.in_step
        return copied

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise InputError("FreeMuon holds hooks on its model and cannot be pickled; save optimizer.state_dict()")


def _gradient(p: Tensor) -> Tensor:
    """The gradient of a parameter, at least in float32."""
    return local(p.grad).to(torch.promote_types(p.dtype, torch.float32))


def _inner(A: Tensor, B: Tensor) -> Tensor:
    return sum(torch.dot(a.flatten(), b.to(a.dtype).flatten()) for a, b in in_pieces(A, B))  # type: ignore[return-value]


def _scale(matrix: WeightMatrix) -> float:
    """The largest singular value of a step over its length."""
    k, d = matrix.shape[-2:]
    one_hot = bool(matrix.layers) and isinstance(matrix.layers[0], EmbeddingLayer)
    return 0.5 * math.sqrt(k) if one_hot else math.sqrt(max(1.0, k / d))


def _compare(norms: Mapping[str, float], exchange: Exchange, device: torch.device) -> None:
    """Raise in all processes unless their gradients have the same norms, up to rounding."""
    size = math.hypot(*norms.values())
    both = torch.tensor([size, -size, len(norms), -len(norms)], dtype=torch.float32, device=device)
    exchange.largest(both)
    most, least, many, few = both.tolist()
    if most + least > 1e-3 * most or many != -few:
        raise LayerError(
            f"the gradients of the processes differ (norms from {-least:.4g} to {most:.4g}). Train the model in "
            "torch.nn.parallel.DistributedDataParallel, whose last backward pass before step() is outside no_sync(), or make "
            "gs.FreeMuon(..., process_group=False) where every process trains a model of its own"
        )
