"""``gs.VCL``: virtual covariance learning as a PyTorch optimizer."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from typing_extensions import override

from gramscope.distributed.exchange import Group, find_exchange
from gramscope.errors import InputError, LayerError, NumericalError, RescueWarning, ResultWarning
from gramscope.layers.modules import outside_graphs, unwrap
from gramscope.layers.select import LayerSelector
from gramscope.layers.tape import unseen
from gramscope.linalg.arrays import without_autocast
from gramscope.optim.checks import check_gradients, check_owners, keep_dtypes, refuse_arguments, with_numbers
from gramscope.optim.choose_matrices import choose_trained
from gramscope.optim.vcl.exact import cutoff, exact_step
from gramscope.optim.vcl.gradients import Batch, GradientCollector, ModelHooks, Reduction, batch_of
from gramscope.optim.vcl.processes import batches_of_all
from gramscope.optim.vcl.recursion import Recursion, factors, rebased, recursive_step, start
from gramscope.optim.vcl.warm_up import warm_up
from gramscope.optim.weight_matrix import WeightMatrix

Solver: TypeAlias = Literal["recursive", "exact"]
#: makes the optimizer of all parameters that VCL does not train
ReadoutFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
#: larger values have no square in float64
_MOST_GAMMA = 1e150
#: by default nothing is truncated up to this many inputs, or twice as many as outputs
_UNTRUNCATED = 256
_INSTEAD = {
    "lr": "its step is gamma=; the rate of the other parameters goes into readout=",
    "weight_decay": "Algorithm 1 decays no weights; that of the other parameters goes into readout=",
    "momentum": "Algorithm 1 has none; that of the other parameters goes into readout=",
}
#: state of one matrix → its new state, its new weights, diagnostics
_Step: TypeAlias = tuple[dict[str, Any], Tensor, dict[str, Tensor]]


class VCL(Optimizer):
    """Virtual covariance learning of a model's linear-like layers ([VCL] Algorithm 1); another optimizer trains the rest.

    After every backward pass the weights of a layer become the matrix nearest to the present one whose Gram is the power 2α of
    ``W_tᵀW_t + V_t``, where ``V_t`` sums the virtual covariance shifts of all batches so far. VCL places hooks on the model's
    layers; :meth:`close` removes them.

    Args:
        model: any module.
        gamma: step γ of the virtual update ``h − γ ∂L/∂h``. It is the ``lr`` of this optimizer's first parameter group, so
            that learning-rate schedulers change it.
        alpha: power of the eigenvalues; 0.1 in the paper. At 0.5 the Gram of the new weights is G itself.
        reduction: how the loss is reduced over the batch. Algorithm 1 needs the sum of per-sample gradients: ``"mean"``
            multiplies gradients by the batch size of their forward pass, ``"sum"`` takes them as they are, a number is the
            factor, and a function returns the factor for a batch size. Gradients do not show what a loss divided by: where that
            is not the number of samples (class weights, ignored labels, a mean over tokens), give the divisor as a number or
            function, or sum the losses of the samples yourself.
        layers: names, globs or module types of the layers to train by VCL. ``None``: every linear-like layer but the head,
            which a Hugging Face model names in ``get_output_embeddings()`` and which else is registered last.
        readout: a function from the list of all other parameters to their optimizer, by default ``SGD(lr=0.1)``. Its parameter
            groups follow the first one in ``param_groups``.
        solver: ``"recursive"`` works in a small moving basis; ``"exact"`` is Algorithm 1 to the letter on d×d matrices in
            float64.
        rank: directions that the recursive solver keeps in a layer of k outputs and d inputs: by default all for d up to 256
            or 2k, else k + max(16, k/16).
        process_group: the processes that average their gradients: by default those of a ``DistributedDataParallel`` model,
            else the default group of ``torch.distributed``; ``False`` where every process trains a model of its own. The steps
            are those of one process on the batches of all.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
        >>> optimizer = gs.VCL(model)
        >>> x, y = torch.randn(32, 8), torch.arange(32) % 3
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> print(optimizer.summary())
        parameter  matrix
        0.weight   16 × 8  VCL recursive
        2.weight           SGD: the readout
        0.bias             SGD: 1-dimensional, not a matrix
        2.bias             SGD: 1-dimensional, not a matrix
    """

    def __init__(
        self,
        model: nn.Module,
        gamma: float = 1.0,
        alpha: float = 0.1,
        reduction: Reduction = "mean",
        layers: LayerSelector = None,
        readout: ReadoutFactory | None = None,
        solver: Solver = "recursive",
        rank: int | None = None,
        process_group: Group = None,
        **unknown: Any,
    ) -> None:
        known = "model gamma alpha reduction layers readout solver rank process_group"
        refuse_arguments("VCL", unknown, known, _INSTEAD)
        _check_arguments(gamma, alpha, reduction, solver, rank)
        self._arguments: dict[str, Any] = {  # for __deepcopy__
            "gamma": gamma, "alpha": alpha, "reduction": reduction, "layers": layers, "readout": readout,
            "solver": solver, "rank": rank, "process_group": process_group,
        }  # fmt: skip
        self.model, self.solver, self.alpha = model, solver, alpha
        self._choice = choose_trained(model, layers, by_gradient=False)
        self._exchange = find_exchange(process_group, model)
        self._ranks = {matrix: _rank(matrix, rank) for matrix in self.matrices}
        self._collectors = {
            matrix: GradientCollector(matrix, _precision(matrix.parameter, solver), self._exchange is not None)
            for matrix in self.matrices
        }
        self._diagnostics: dict[str, dict[str, Tensor]] = {}
        self._warned: set[str] = set()
        facts = {"layers": [matrix.name for matrix in self.matrices], "alpha": alpha}
        trained = list(dict.fromkeys(matrix.parameter for matrix in self.matrices))
        self._open = True
        super().__init__([{"params": trained, "lr": gamma, **facts}], {"lr": gamma})
        self._open = False
        others = [p for p in self._choice.names if p not in set(trained)]
        self.readout = _make_readout(readout or partial(SGD, lr=0.1), others)
        self._share()
        self._hooks = ModelHooks(model, list(self._collectors.values()), reduction)
        self._finalizer = weakref.finalize(self, self._hooks.close)

    @property
    def matrices(self) -> Sequence[WeightMatrix]:
        """The matrices trained by VCL."""
        return self._choice.matrices

    def _share(self) -> None:
        """Give both optimizers one state and one list of groups, so that schedulers and checkpoints see everything."""
        if self.readout is not None:
            if len(self.param_groups) == 1:
                self.param_groups += self.readout.param_groups
                self.state.update(self.readout.state)
            self.readout.param_groups = self.param_groups[1:]
            self.readout.state = self.state
        # what OneCycleLR and CyclicLR change in every group beside lr
        known = {} if self.readout is None else self.readout.defaults
        cycled: dict[str, Any] = {name: known[name] for name in ("momentum", "betas") if name in known}
        cycled = cycled or {"momentum": 0.0}
        self.defaults.update(cycled)
        for name, value in cycled.items():
            self.param_groups[0].setdefault(name, value)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._open:
            raise InputError(
                "VCL takes its parameters from the model: parameter groups cannot be added. Choose layers with layers= and "
                "group all other parameters in the optimizer that readout= makes"
            )
        super().add_param_group(param_group)

    def summary(self) -> str:
        """A table of all parameters: which are trained by VCL, and why the others by the readout's optimizer."""
        ranks = [rank for matrix, rank in self._ranks.items() if rank < matrix.shape[-1]]
        rank = f", rank {'/'.join(map(str, dict.fromkeys(ranks)))}" if ranks and self.solver == "recursive" else ""
        other = "nothing" if self.readout is None else type(self.readout).__name__
        return self._choice.table(f"VCL {self.solver}{rank}", other)

    # --- training -----------------------------------------------------------------------------------------------------

    @override
    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of VCL on its layers and of the readout optimizer on everything else.

        A layer that no gradient reaches (an expert without tokens) keeps its weights, as in torch's own optimizers.

        Raises:
            LayerError: no VCL layer has received a gradient, or one was not seen in a forward pass.
            NumericalError: a gradient is not finite or a decomposition failed. Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gamma = float(self.param_groups[0]["lr"])
        _check_gamma(gamma)
        self._check_head()
        check_owners(unwrap(self.model), self._choice.names, "VCL")
        with torch.no_grad(), without_autocast(self.matrices[0].parameter.device):
            self._check_gradients()
            steps = {matrix: self._step(matrix, batch, gamma) for matrix, batch in self._batches().items()}
            self._check_steps(steps)
        if self.readout is not None:
            self.readout.step()
        for matrix, (state, weights, found) in steps.items():
            matrix.assign(weights)
            if self._exchange is not None:
                self._exchange.send_from(0, matrix.parameter.data)
            if self.solver == "recursive":
                state["written"] = matrix.read().clone()
            own = {matrix.part: state} if matrix.part else state
            self.state[matrix.parameter].update(own)
            self._diagnostics[matrix.name] = found
        return loss

    def _batches(self) -> dict[WeightMatrix, Batch]:
        """The gradients of the matrices that have one."""
        collectors = list(self._collectors.values())
        if self._exchange is not None:
            return {collector.matrix: batch for collector, batch in batches_of_all(collectors, self._exchange).items()}
        busy = [collector for collector in collectors if not collector.idle] or collectors
        return {collector.matrix: batch_of(collector) for collector in busy}

    def _step(self, matrix: WeightMatrix, batch: Batch, gamma: float) -> _Step:
        """One step of one matrix; nothing is written."""
        old = self._state_of(matrix)
        W = matrix.read()
        if self.solver == "exact":
            V, new, found = exact_step(old.get("matrix"), W.to(batch.D.dtype), batch.D, batch.sigma, gamma, self.alpha)
            return {"matrix": V}, new, found
        if not old:
            state = start(W.to(batch.D.dtype))
        else:
            state = Recursion(**{name: old[name] for name in Recursion.__dataclass_fields__})
            if not torch.equal(old["written"], W):  # changed from outside
                state = rebased(state, W.to(batch.D.dtype))
        factored = factors(batch.D, batch.count, batch.tolerance)
        state, new, found = recursive_step(state, factored, batch.sigma, gamma, self.alpha, self._ranks[matrix])
        return {name: getattr(state, name) for name in Recursion.__dataclass_fields__}, new, found

    def _check_head(self) -> None:
        """Raise where the layer taken for the head is not the one executed last."""
        last, head = self._hooks.last, self._choice.head
        trained = {layer.name for matrix in self.matrices for layer in matrix.layers}
        if head and last is not None and last.name in trained:
            raise LayerError(
                f"layer {head[-1].name!r}, registered last, was taken for the readout, but {last.name!r} ran last: name the "
                "layers that VCL trains with layers="
            )

    def _check_gradients(self) -> None:
        """Raise in all processes if a gradient is not finite in one."""
        error: Exception | None = None
        try:
            check_gradients((name, p.grad) for p, name in self._choice.names.items() if p.grad is not None)
        except (NumericalError, InputError) as raised:
            error = raised
        if self._exchange is not None:
            self._exchange.raise_together(error, self.matrices[0].parameter.device)
        if error is not None:
            raise error

    def _check_steps(self, steps: Mapping[WeightMatrix, _Step]) -> None:
        """Raise if new weights are not finite; warn, once for each matrix, of weights that lose rank."""
        for matrix, (_, new, found) in steps.items():
            dtype = matrix.parameter.dtype
            norm, cut = torch.stack([torch.linalg.vector_norm(new.to(dtype).double()), found["cut"].sum()]).tolist()
            if not math.isfinite(norm):
                raise NumericalError(
                    f"the VCL step of {matrix.name} has weights that are not finite or too large for {dtype}; weights and "
                    "state are as before this step. Lower gamma"
                )
            if matrix.name in self._warned:
                continue
            if norm == 0 and matrix.name not in self._diagnostics:
                self._warned.add(matrix.name)
                warnings.warn(
                    f"all weights of {matrix.name} are zero and stay so: Algorithm 1 changes weights by products with them. "
                    "Start from other weights, or leave the layer to readout= with layers=",
                    ResultWarning,
                    stacklevel=4,
                )
            elif cut:
                self._warned.add(matrix.name)
                share = cutoff(torch.float64, matrix.shape[-1])
                warnings.warn(
                    f"{matrix.name}: positive eigenvalues at rounding level (up to {share:.1e} of the largest) are taken as "
                    "zero, so W loses rank. A smaller gamma= or alpha= keeps it",
                    RescueWarning,
                    stacklevel=4,
                )

    @override
    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._hooks.clear()

    def warm_up(
        self,
        loader: Iterable[Any],
        loss: Callable[[Tensor, Tensor], Tensor],
        epochs: int = 1,
        unpack: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> list[float]:
        """Train the last layer alone with the readout optimizer, as the paper does before virtual covariance learning.

        Where the last layer is itself trained by VCL, or ``layers=`` was given, all of the readout optimizer's parameters are
        trained.

        Args:
            loader: batches ``(x, y)``, mappings with labels, or anything with ``unpack``; moved to the model's device.
            loss: ``loss(output, target)``.
            epochs: passes over the loader.
            unpack: ``batch -> (inputs, target)``.

        Returns:
            The mean loss of each epoch.
        """
        if self.readout is None:
            raise InputError("there is nothing to warm up: VCL trains every parameter of the model")
        with unseen(unwrap(self.model)):
            return warm_up(self.model, self.readout, self.warm_up_parameters(), loader, loss, epochs, unpack)

    def warm_up_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`warm_up` trains."""
        others = [p for group in self.param_groups[1:] for p in group["params"]]
        if not self._choice.head:
            return others
        own = {id(p) for layer in self._choice.head for p in layer.module.parameters()}
        found = [p for p in others if id(p) in own and p.requires_grad]
        if not found:
            raise InputError(f"there is nothing to warm up: the last layer, {self._choice.head[-1].name!r}, is frozen")
        return found

    def diagnostics(self) -> dict[str, dict[str, float | list[float]]]:
        """Numbers about the last step of each VCL matrix (lists for grouped convolutions); waits for the device.

        ``moved``: ``‖W⁺ − W‖``. ``rank``: singular values in use. ``cut``: positive eigenvalues taken as zero. ``largest``,
        ``most_negative``: eigenvalues of G. ``constraint``: share of G (by norm) that the weights cannot represent, at α = ½
        the residual of the constraint. ``discarded``: share of ``‖G‖²`` dropped by truncation.
        """
        return {
            name: {key: value.tolist() for key, value in found.items()} for name, found in self._diagnostics.items()
        }

    def close(self) -> None:
        """Remove every hook from the model; after that no step can be taken."""
        self._finalizer()

    # --- state --------------------------------------------------------------------------------------------------------

    def _state_of(self, matrix: WeightMatrix) -> dict[str, Any]:
        """The state of one matrix within that of its parameter, which may be a packed weight of several matrices."""
        state = self.state[matrix.parameter]
        found: dict[str, Any] = state.get(matrix.part, {}) if matrix.part else state
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> VCL:
        """An optimizer with the same state for a copy of the model."""
        copied = type(self)(copy.deepcopy(self.model, memo), **self._arguments)
        memo[id(self)] = copied
        copied.load_state_dict(copy.deepcopy(self.state_dict()))
        return copied

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise InputError("VCL holds hooks on its model and cannot be pickled; save optimizer.state_dict()")

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`; training then continues with the same bits as without the interruption.

        The model must hold the weights it had when the state was saved. States of torch's distributed checkpoint are taken too.
        """
        state_dict = with_numbers(state_dict)
        stored, own = state_dict["param_groups"][0], self.param_groups[0]
        if "layers" not in stored:
            raise InputError("this state is not one of VCL; was the checkpoint saved with another optimizer?")
        for fact in ("layers", "alpha"):
            if stored.get(fact) != own[fact]:
                raise InputError(f"this state belongs to {fact}={stored.get(fact)!r}, not {own[fact]!r}")
        keys = dict(zip(own["params"], stored["params"], strict=True))
        for matrix in self.matrices:
            state = state_dict["state"].get(keys[matrix.parameter], {})
            _check_state(matrix, state.get(matrix.part, {}) if matrix.part else state, self.solver)
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)
        self._share()
        self._hooks.clear()


def _check_state(matrix: WeightMatrix, state: Mapping[str, Any], solver: Solver) -> None:
    """Raise an InputError unless a stored state is empty or fits this matrix and solver."""
    if not state:
        return
    found = "exact" if "matrix" in state else "recursive"
    if found != solver:
        raise InputError(f"the state of {matrix.name} is one of solver={found!r}, not {solver!r}")
    shape = state["written"].shape if solver == "recursive" else (*matrix.shape[:-1], state["matrix"].shape[-1])
    if tuple(shape) != tuple(matrix.shape):
        raise InputError(f"the state of {matrix.name} is one of shape {tuple(shape)}, not {tuple(matrix.shape)}")


def _make_readout(factory: ReadoutFactory, parameters: Sequence[Tensor]) -> Optimizer | None:
    """The optimizer of everything that VCL does not train; None where there is nothing.

    Raises:
        InputError: ``factory`` does not return an optimizer that can work beside VCL.
    """
    if not parameters:
        return None
    made = factory(list(parameters)) if callable(factory) else factory  # type: ignore[arg-type]
    if not isinstance(made, Optimizer):
        raise InputError(
            "readout= must be a function that returns a torch optimizer, such as "
            f"lambda params: torch.optim.AdamW(params, lr=1e-3); got {type(made).__name__}"
        )
    if isinstance(made, LBFGS):
        raise InputError(
            "readout=LBFGS evaluates the loss several times a step, and VCL once: choose another optimizer"
        )
    given, taken = {id(p) for p in parameters}, {id(p) for group in made.param_groups for p in group["params"]}
    if given != taken:
        raise InputError(
            f"the optimizer made by readout= holds {len(taken)} parameters, not exactly the {len(given)} it was given"
        )
    return made


def _check_gamma(gamma: float) -> None:
    if not (isinstance(gamma, int | float) and 0 <= gamma <= _MOST_GAMMA):
        raise InputError(f"gamma={gamma!r}: the step of the virtual update must be a number from 0 to {_MOST_GAMMA:g}")


def _check_arguments(gamma: float, alpha: float, reduction: object, solver: str, rank: int | None) -> None:
    """Raise an InputError that names the first argument with an invalid value."""
    _check_gamma(gamma)
    if not (isinstance(alpha, int | float) and 0 < alpha <= 1):
        raise InputError(f"alpha={alpha!r}: the power of the eigenvalues must lie in (0, 1]; the paper uses 0.1")
    if isinstance(reduction, int | float) and not (math.isfinite(reduction) and reduction > 0):
        raise InputError(f"reduction={reduction!r}: the factor must be a positive number")
    if not (reduction in ("mean", "sum") or isinstance(reduction, int | float) or callable(reduction)):
        raise InputError(f"reduction={reduction!r}: give 'mean', 'sum', a number, or a function of the batch size")
    if solver not in ("recursive", "exact"):
        hint = "; its steps are those of gs.FreeMuon(model)" if solver == "averaged" else ""
        raise InputError(f"solver={solver!r}: choose 'recursive' or 'exact'{hint}")
    if not (rank is None or isinstance(rank, int)):
        raise InputError(f"rank={rank!r}: the number of directions to keep must be a whole number")


def _rank(matrix: WeightMatrix, rank: int | None) -> int:
    """How many directions to keep of a matrix."""
    k, d = matrix.shape[-2:]
    if rank is None:
        return d if d <= max(_UNTRUNCATED, 2 * k) else k + max(16, k // 16)
    if rank < min(k, d):
        raise InputError(f"rank={rank} is below the rank {min(k, d)} of {matrix.name}'s weights")
    return min(rank, d)


def _precision(parameter: Tensor, solver: Solver) -> torch.dtype:
    """In which a step is computed: float64 for the exact solver, else that of the weights, at least float32."""
    if parameter.device.type == "mps":
        return torch.float32
    return torch.float64 if solver == "exact" else torch.promote_types(parameter.dtype, torch.float32)
