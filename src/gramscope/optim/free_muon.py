"""``gs.FreeMuon``: Muon with built-in step lengths and averaged weights: no rate, schedule or horizon to choose.

A matrix z takes steps along O, the orthogonalised mean of recent gradients, and x is an average of all its values so far. At
step n, with s the scale of :func:`_scale` and ``f = min(1, (7.7/n)^0.6)``:

    O = orthogonalised Nesterov mean of gradients, β = min(0.95, n/(n + 20))
    c = 0.7 c  where ⟨gₙ, Oₙ₋₁⟩ < −½ ⟨gₙ₋₁, Oₙ₋₁⟩,  else min(1, 1.1 c);  1 at first
    z = z − c · 0.18 f · (s O + 0.2 (1 − f) z)
    x = x + 9/(n + 8) · (z − x)

Gradients are taken at z, which the parameters hold; x is what to evaluate and save (:meth:`FreeMuon.averaged`).

- The mean of gradients reaches back over about 1 + n/20 steps, at most 20: early gradients come from weights that are soon far
  away (Muon: Jordan et al. 2024).
- The average is the polynomial-decay average of Shamir and Zhang (2013) of power 8: its weights grow like n⁸, so that it covers
  about the last ninth of all steps, however many there are. It does what a schedule that falls to 0 would do at a known end.
- c shortens the steps of a matrix whose last step went too far: the loss fell along it before and rises along it now, by more
  than half as fast.
- Weights decay by a share that grows to 0.2 as steps fall, so that short runs are not slowed and long ones forget what early
  gradients wrote.

An embedding is the matrix ``[width, entries]`` that multiplies one-hot vectors. These have length 1, where the inputs of other
layers have about √d. So its steps are longer by ``√width/2``: an entry moves by up to 0.09 (root mean square).

All other parameters take steps of Adam with rate 0.02 f. They are not averaged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from gramscope.errors import InputError, LayerError
from gramscope.layers.kinds import EmbeddingLayer
from gramscope.layers.modules import outside_graphs
from gramscope.layers.select import LayerSelector
from gramscope.linalg.arrays import without_autocast
from gramscope.optim.checks import check_gradients, keep_dtypes, refuse_arguments
from gramscope.optim.choose_matrices import choose_trained
from gramscope.optim.orthogonalise import orthogonalised
from gramscope.optim.weight_matrix import WeightMatrix

#: the largest singular value of the first steps, for matrices with at least as many inputs as outputs
STEP = 0.18
#: λ of late steps
DECAY = 0.2
#: Adam's rate in the first steps
RATE = 0.02
_BETAS, _EPS = (0.9, 0.99), 1e-8
_INSTEAD = {
    "lr": "its step lengths are built in; optimizer.param_groups[i]['lr'] multiplies them, 1 by default",
    "weight_decay": "weights decay by a built-in share that grows as steps fall (docs/free-muon.md)",
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

    >>> falling(7), round(falling(1000), 4)
    (1.0, 0.0539)
    """
    return min(1.0, (7.7 / n) ** 0.6)


def mean_weight(n: int) -> float:
    """β of the running mean at step n, ``min(0.95, n/(n + 20))``.

    >>> mean_weight(20), mean_weight(10_000)
    (0.5, 0.95)
    """
    return min(0.95, n / (n + 20))


class FreeMuon(Optimizer):
    """Muon with built-in step lengths for a model's weight matrices and embeddings, and Adam for all other parameters.

    There is no rate to choose. ``param_groups`` has two groups, the matrices and the rest; ``lr`` multiplies the step lengths
    of a group and is 1, so that learning-rate schedulers work; none is needed. Steps of matrices do not depend on the scale of
    the loss. Evaluate and save the model under :meth:`averaged`.

    Args:
        model: any module. No hooks are placed on it.
        layers: names, globs or module types of the layers whose weights take Muon's steps. ``None``: every linear-like layer
            but the head, and embeddings whose weight is not tied. The head is what a Hugging Face model names in
            ``get_output_embeddings()``, else the layer registered last. :meth:`summary` shows the choice.

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

    def __init__(self, model: nn.Module, layers: LayerSelector = None, **unknown: Any) -> None:
        refuse_arguments("FreeMuon", unknown, "model layers", _INSTEAD)
        self._choice = choose_trained(model, layers, embeddings=True)
        #: the matrices of each parameter; several for packed projections of attention
        self._matrices: dict[Tensor, list[WeightMatrix]] = defaultdict(list)
        for matrix in self._choice.matrices:
            self._matrices[matrix.parameter].append(matrix)
        rest = [p for p in self._choice.names if p not in self._matrices]
        self._frozen = {p: name for name, p in model.named_parameters() if not p.requires_grad}
        names = [matrix.name for matrix in self._choice.matrices]
        self._open = True
        # betas: what OneCycleLR and CyclicLR cycle; matrices have a mean of their own
        super().__init__([{"params": list(self._matrices), "matrices": names}], {"lr": 1.0, "betas": _BETAS})
        if rest:
            self.add_param_group({"params": rest})
        self._open = False

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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Matrices whose gradient is None or zero (an expert without tokens) keep their weights.

        Raises:
            LayerError: no matrix has a gradient, or a parameter that was frozen when the optimizer was made has one.
            NumericalError: a gradient is not finite. Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        names = self._choice.names
        unfrozen = [name for p, name in self._frozen.items() if p.grad is not None]
        if unfrozen:
            raise LayerError(
                f"{unfrozen[0]} was frozen when FreeMuon was made and has a gradient now: make a new gs.FreeMuon(model)"
            )
        with torch.no_grad(), without_autocast(next(iter(names)).device):
            norms = check_gradients((name, p.grad) for p, name in names.items() if p.grad is not None)
            if not any(names[p] in norms for p in self._matrices):
                raise LayerError(
                    f"{self._choice.matrices[0].name} has no gradient, and no other matrix has: run backward() of a loss that "
                    "depends on them before step()"
                )
            matrices, *rest = self.param_groups
            self._step_matrices([p for p in matrices["params"] if norms.get(names[p])], float(matrices["lr"]))
            for group in rest:
                self._step_rest([p for p in group["params"] if p.grad is not None], group)
        return loss

    def _step_matrices(self, parameters: list[Tensor], lr: float) -> None:
        """Muon's steps; matrices of one shape are orthogonalised together."""
        alike: dict[Any, list[tuple[WeightMatrix, int]]] = defaultdict(list)
        for p in parameters:
            assert p.grad is not None
            dtype = torch.promote_types(p.dtype, torch.float32)
            state = self.state[p]
            if not state:
                state |= {
                    "step": 0,
                    "mean": torch.zeros_like(p, dtype=dtype),
                    "average": p.detach().to(dtype, copy=True),
                }
                state |= {"last": [None] * len(self._matrices[p]), "guard": [None] * len(self._matrices[p])}
            n = state["step"] = state["step"] + 1
            state["mean"].lerp_(p.grad.to(dtype), 1 - mean_weight(n))
            for number, matrix in enumerate(self._matrices[p]):
                alike[matrix.shape, dtype, p.device].append((matrix, number))
        for members in alike.values():
            leads = []
            for matrix, _ in members:
                state, gradient = self.state[matrix.parameter], matrix.gradient()
                assert gradient is not None
                mean = matrix.view(state["mean"])  # as Nesterov: the newest gradient counts once more
                leads.append(torch.lerp(gradient.to(mean.dtype), mean, mean_weight(state["step"])))
            for (matrix, number), O in zip(members, orthogonalised(torch.stack(leads)), strict=True):
                self._step_matrix(matrix, number, O, lr)
        for p in parameters:
            state = self.state[p]
            state["average"].lerp_(p.detach().to(state["average"].dtype), 9 / (state["step"] + 8))

    def _step_matrix(self, matrix: WeightMatrix, number: int, O: Tensor, lr: float) -> None:
        """One step along O."""
        state, gradient = self.state[matrix.parameter], matrix.gradient()
        assert gradient is not None
        share = falling(state["step"])
        slope = _inner(gradient, O)
        if state["last"][number] is None:
            c = torch.ones_like(slope)
        else:
            c, before = state["guard"][number]
            too_far = _inner(gradient, state["last"][number]) < -before / 2
            c = torch.where(too_far, 0.7 * c, (1.1 * c).clamp_max(1.0))
        state["last"][number], state["guard"][number] = O.to(torch.bfloat16), torch.stack([c, slope])
        length = lr * STEP * share * c[..., None, None]
        weights = matrix.read().to(O.dtype)
        matrix.assign((1 - length * DECAY * (1 - share)) * weights - length * _scale(matrix) * O)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this block the model has the averaged weights x, to evaluate or save it."""
        trained = [p for p in self._matrices if self.state[p]]
        own = [p.detach().clone() for p in trained]
        with torch.no_grad():
            torch._foreach_copy_(trained, [self.state[p]["average"] for p in trained])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(trained, own)

    def _step_rest(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Adam's steps with a falling rate; parameters with equally many steps together."""
        alike: dict[int, list[Tensor]] = defaultdict(list)
        for p in parameters:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            alike[state["step"]].append(p)
        first, second = group["betas"]
        for n, members in alike.items():
            grads = [p.grad.to(torch.promote_types(p.dtype, torch.float32)) for p in members if p.grad is not None]
            means, squares = (
                [self.state[p].setdefault(key, torch.zeros_like(grad)) for p, grad in zip(members, grads, strict=True)]
                for key in ("exp_avg", "exp_avg_sq")
            )
            torch._foreach_lerp_(means, grads, 1 - first)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, grads, grads, 1 - second)
            sizes = torch._foreach_sqrt(squares)
            torch._foreach_div_(sizes, math.sqrt(1 - second**n))
            torch._foreach_add_(sizes, _EPS)
            steps = torch._foreach_div(means, sizes)
            torch._foreach_mul_(steps, -float(group["lr"]) * RATE * falling(n) / (1 - first**n))
            torch._foreach_add_(members, steps)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`; training then continues with the same bits as without the interruption."""
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
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "step"}


def _scale(matrix: WeightMatrix) -> float:
    """The largest singular value of a step over its length ρ."""
    k, d = matrix.shape[-2:]
    one_hot = bool(matrix.layers) and isinstance(matrix.layers[0], EmbeddingLayer)
    return 0.5 * math.sqrt(k) if one_hot else math.sqrt(max(1.0, k / d))


def _inner(A: Tensor, B: Tensor) -> Tensor:
    """⟨A, B⟩ of two matrices, or of each pair in two stacks."""
    dtype = torch.promote_types(A.dtype, B.dtype)
    return (A.to(dtype) * B.to(dtype)).sum((-2, -1))
