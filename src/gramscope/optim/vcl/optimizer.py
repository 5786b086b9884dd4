"""``gs.VCL``: virtual covariance learning as a PyTorch optimizer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from gramscope.distributed.exchange import Group, find_exchange
from gramscope.errors import InputError
from gramscope.layers.modules import outside_graphs, unwrap
from gramscope.layers.select import LayerSelector
from gramscope.layers.watchers import unseen
from gramscope.linalg.autocast import without_autocast
from gramscope.optim.vcl.algorithm_1 import Algorithm1
from gramscope.optim.vcl.averaged import AveragedTrainer
from gramscope.optim.vcl.checks import (
    check_arguments,
    check_averaged,
    check_facts,
    check_gamma,
    check_reduction,
    error_of_gradients,
)
from gramscope.optim.vcl.direction import Direction
from gramscope.optim.vcl.execution_order import ExecutionOrder, Trained
from gramscope.optim.vcl.falling_adamw import FallingAdamW
from gramscope.optim.vcl.form import Averaged, Form, Unit
from gramscope.optim.vcl.matrix_trainer import MatrixTrainer
from gramscope.optim.vcl.model_hooks import Reduction
from gramscope.optim.vcl.readout_layer import ReadoutFactory, head_parameters, make_readout
from gramscope.optim.vcl.rules import Anchor, Rules, Solver
from gramscope.optim.vcl.spectral_map import SpectralMap
from gramscope.optim.vcl.summary_table import summary_table
from gramscope.optim.vcl.trainable import find_embeddings, find_trainable
from gramscope.optim.vcl.warm_up import warm_up

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class VCL(Optimizer):
    """Virtual covariance learning of a model's linear-like layers; another optimizer trains the rest.

    ``gs.VCL(model)`` needs no rate. Its steps go along the orthogonalised mean of recent gradients, and their length follows
    from the number of steps taken (:mod:`gramscope.optim.vcl.averaged`). With ``solver="recursive"`` or ``"exact"`` it is [VCL]
    Algorithm 1: after every backward pass the weights become the matrix nearest to the present one whose Gram is the power 2α
    of ``W_tᵀW_t + V_t``, where ``V_t`` sums the virtual covariance shifts of all batches so far.

    Args:
        model: any module. VCL places hooks on its layers; :meth:`close` removes them.
        gamma: step γ of the virtual update ``h − γ ∂L/∂h``. It is the ``lr`` of this optimizer's first parameter group, so
            that learning-rate schedulers change it. Averaged steps depend on it as γ^2α, to first order as Algorithm 1 does.
        alpha: power of the eigenvalues; 0.1 in the paper. At 0.5 the Gram of the new weights is G itself (see ``anchor``).
        reduction: how the loss is reduced over the batch. Algorithm 1 needs the sum of per-sample gradients: ``"mean"``
            multiplies gradients by the batch size of their forward pass, ``"sum"`` takes them as they are, a number is the
            factor, and a function returns the factor for a batch size. Gradients do not show what a loss divided by: where that
            is not the number of samples (class weights, ignored labels, a mean over tokens), give the divisor as a number or
            function, or sum the losses of the samples yourself. Averaged steps do not depend on the scale of gradients.
        layers: names, globs or module types of the layers to train by VCL. ``None``: every linear-like layer but the last
            one executed, or the only one there is; with averaged steps embeddings too.
        readout: a function from the list of all other parameters to their optimizer. By default AdamW, whose rate of 0.02
            falls as averaged steps do; beside Algorithm 1 ``SGD(lr=0.1)``. Its parameter groups follow the first one in
            ``param_groups``.
        solver: ``"averaged"``, or how Algorithm 1 is computed: ``"recursive"`` works in a small moving basis; ``"exact"`` is
            Algorithm 1 to the letter on d×d matrices in float64; ``"auto"`` is exact for up to 64 inputs. The arguments below
            belong to Algorithm 1.
        rank: directions that the recursive solver keeps in a layer of k outputs and d inputs: by default all for d up to 256
            or 2k, else k + max(16, k/16). A rank of d or more also makes every step a full one.
        anchor: ``"current"``: ``G = W_tᵀW_t + V_t``, as in the paper; ``"initial"``: ``G = W₀ᵀW₀ + V_t``, which counts no shift
            twice and stays bounded at α = ½ with ``second_order=False``.
        second_order: whether the shift has its γ² term ``γ²Wᵀ(Σδδᵀ)W``, which amplifies itself at large α.
        floor: τ of a smooth floor ``(λ + √(λ² + 4τ²))/2`` of the eigenvalues, which keeps the rank of W; 0 clamps at zero.
        cutoff: eigenvalues up to this times the largest are zero; by default ``2·eps·√n`` of the precision used.
        refresh: the recursive solver takes a full step at least once in this many steps. The light steps in between are
            accurate to a few per cent of a step; one whose own error estimate is large is replaced by a full one. 1 makes
            every step a full one.
        momentum: β of a running mean of the gradient, which then forms the shift.
        orthogonalise: form the shift from the orthogonalised gradient.
        aim: of all weights with the new Gram take the nearest to ``W − aim·γ·D`` instead of W; D is the direction used.
        bias: train a VCL layer's bias with its weight, as the weight of a constant input.
        precision: dtype of the computation: by default float64 for ``"exact"`` and for ``"recursive"`` with ``refresh=1``
            where nothing is truncated, else that of the weights, at least float32.
        process_group: the processes that average their gradients: by default those of a ``DistributedDataParallel`` model,
            else the default group of ``torch.distributed``; ``False`` where every process trains a model of its own. The steps
            are those of one process on the batches of all. Of Algorithm 1, each process computes the steps of the layers that
            it owns (:meth:`summary` names the owners) and keeps their state (:meth:`consolidate_state_dict`).
        mesh: a device mesh of one dimension, in place of ``process_group``.

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
        parameter  shape     trained by
        0.weight   16 × 8    VCL averaged
        0.bias     16        FallingAdamW
        2.weight   3 × 16    FallingAdamW (readout)
        2.bias     3         FallingAdamW
    """

    def __init__(
        self,
        model: nn.Module,
        gamma: float = 1.0,
        alpha: float = 0.1,
        reduction: Reduction = "mean",
        layers: LayerSelector = None,
        readout: ReadoutFactory | None = None,
        solver: Solver = "averaged",
        rank: int | None = None,
        *,
        anchor: Anchor = "current",
        second_order: bool = True,
        floor: float = 0.0,
        cutoff: float | None = None,
        refresh: int = 32,
        momentum: float = 0.0,
        orthogonalise: bool = False,
        aim: float = 0.0,
        bias: bool = False,
        precision: torch.dtype | None = None,
        process_group: Group = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "model", "__class__")}
        self._arguments = arguments  # for __deepcopy__
        check_arguments(gamma, solver, anchor, rank, refresh, aim, precision)
        check_reduction(reduction)
        averaged = solver == "averaged"
        if averaged:
            check_averaged(arguments)
        direction = Direction(momentum, orthogonalise)
        if direction.active and second_order:
            raise InputError(
                "momentum and orthogonalise change what the shift is formed from; they need second_order=False"
            )
        rules = Rules(SpectralMap(alpha, floor, cutoff), anchor, aim)
        self.model = model
        found = find_trainable(model, layers, bias)
        self._refused = found.refused
        exchange = find_exchange(process_group, mesh, model)
        self._form: Form
        if averaged:
            embeddings = find_embeddings(model) if layers is None else []
            self._form = Averaged([AveragedTrainer(weight) for weight in (*embeddings, *found.matrices)])
        else:
            make = partial(
                MatrixTrainer,
                rules=rules,
                direction=direction,
                second_order=second_order,
                solver=solver,
                rank=rank,
                refresh=refresh,
                precision=precision,
            )
            untrained = [layer for layer, _ in found.refused]
            self._form = Algorithm1(model, [make(w) for w in found.matrices], untrained, reduction, exchange)
        # the first forward pass shows which layer is executed last; until then take it to be the one registered last
        self._presumed = found.last if layers is None and len(found.matrices) > 1 else None
        self._form.head = self._presumed
        self._settled = self._presumed is None
        self._closed_to_groups = False
        facts = {"layers": self._vcl_names(), "head": None, "anchor": anchor, "alpha": alpha, "gamma": gamma}
        super().__init__([{"params": self._vcl_parameters(), "lr": gamma, **facts}], {"lr": gamma})
        self._closed_to_groups = True
        usual: ReadoutFactory = FallingAdamW if averaged else partial(SGD, lr=0.1)
        self.readout = make_readout(readout or usual, self._other_parameters())
        self._add_cycled()
        self._share()
        self._order = None if self._settled else ExecutionOrder(model, found.layers, found.matrices, traced=averaged)
        self._finalizer = weakref.finalize(self, _close, self._form, self._order)

    @classmethod
    def best(cls, *args: Any, **options: Any) -> VCL:
        """Removed: ``gs.VCL(model)`` took its place."""
        raise InputError("gs.VCL.best was removed: use gs.VCL(model), which needs no gamma and no other argument")

    # --- who trains what ----------------------------------------------------------------------------------------------

    @property
    def units(self) -> list[Unit]:
        """The matrices trained by VCL."""
        return list(self._form.units)

    def _vcl_names(self) -> list[str]:
        return [unit.weight.name for unit in self.units]

    def _vcl_parameters(self) -> list[Tensor]:
        found = {id(p): p for unit in self.units for p in unit.weight.parameters}
        return list(found.values())

    def _other_parameters(self) -> list[nn.Parameter]:
        mine = {id(p) for p in self._vcl_parameters()}
        return [p for p in unwrap(self.model).parameters() if p.requires_grad and id(p) not in mine]

    def _share(self) -> None:
        """Give both optimizers one state and one list of groups, so that schedulers and checkpoints see everything."""
        if self.readout is not None:
            if len(self.param_groups) == 1:
                self.param_groups += self.readout.param_groups
                self.state.update(self.readout.state)
            self.readout.param_groups = self.param_groups[1:]
            self.readout.state = self.state

    def _add_cycled(self) -> None:
        """Give the group of VCL the entry that OneCycleLR and CyclicLR change in every group beside ``lr``.

        It is the readout optimizer's ``momentum`` or ``betas``. VCL's own momentum does not follow it.
        """
        known = {} if self.readout is None else self.readout.defaults
        cycled: dict[str, Any] = {name: known[name] for name in ("momentum", "betas") if name in known} or {
            "momentum": 0.0
        }
        self.defaults.update(cycled)
        for name, value in cycled.items():
            self.param_groups[0].setdefault(name, value)

    def _settle(self) -> None:
        """Find out which layer is executed last, and give it to the readout optimizer."""
        if self._order is not None and not self._settled:
            self._regroup(self._order.last())

    def _regroup(self, head: Trained | None, settled: bool = True) -> None:
        before, self._form.head, self._settled = self._form.head, head, settled
        if self._order is not None:
            if settled:
                self._order.detach()
            else:
                self._order.attach()
        self.param_groups[0]["layers"] = self._vcl_names()
        self.param_groups[0]["head"] = head.name if settled and head is not None else None
        if head is before or self.readout is None:
            return
        others = self._other_parameters()
        wanted = {id(p) for p in others}
        self.param_groups[0]["params"] = self._vcl_parameters()
        for group in self.param_groups[1:]:
            group["params"] = [p for p in group["params"] if id(p) in wanted]
        present = {id(p) for group in self.param_groups[1:] for p in group["params"]}
        self.param_groups[1]["params"] += [p for p in others if id(p) not in present]

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_closed_to_groups", False):
            raise InputError(
                "VCL takes its parameters from the model: parameter groups cannot be added. Choose layers with layers= and "
                "group all other parameters in the optimizer that readout= makes"
            )
        super().add_param_group(param_group)

    def summary(self) -> str:
        """A table of all parameters: shape, and which optimizer trains each."""
        form = self._form
        return summary_table(
            self.model, form.units, form.head, self._settled, self.readout, self._refused, form.owners()
        )

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
        self._settle()
        check_gamma(float(self.param_groups[0]["lr"]))
        with torch.no_grad(), without_autocast(self._form.all_units[0].weight.parameter.device):
            problem = error_of_gradients(self.model, self.param_groups[1:])
            proposals = self._form.propose(self._state_of, self.param_groups[0], problem)
        if self.readout is not None:
            self.readout.step()
        for unit, proposal in proposals:
            unit.weight.assign(proposal.weights)
            self._store(unit, proposal.state)
            unit.report = proposal.report
        self._form.finish(self.state)
        return loss

    @override
    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._form.clear()

    def warm_up(
        self,
        loader: Iterable[Any],
        loss: Callable[[Tensor, Tensor], Tensor],
        epochs: int = 1,
        unpack: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> list[float]:
        """Train the last layer alone with the readout optimizer, as the paper does before virtual covariance learning.

        Where the last layer executed is itself trained by VCL, or ``layers=`` was given, all of the readout optimizer's
        parameters are trained.

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
        with unseen(unwrap(self.model), by_all_but=self._order):
            return warm_up(self, loader, loss, epochs, unpack)

    def warm_up_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`warm_up` trains, once the last layer executed is known."""
        self._settle()
        head = self._form.head
        if head is None:
            return self._other_parameters()
        own = {id(p) for p in head_parameters(head)}
        found = [p for p in self._other_parameters() if id(p) in own]
        if not found:
            raise InputError(f"there is nothing to warm up: the last layer executed, {head.name!r}, is frozen")
        return found

    def diagnostics(self) -> dict[str, dict[str, float | list[float]]]:
        """Numbers about the last step of each VCL layer (lists for grouped convolutions); waits for the device.

        Averaged steps have ``step``, their length ρ, and ``moved``, ``‖W⁺ − W‖``. Those of Algorithm 1 have ``moved`` and:
        ``rank``: singular values in use. ``largest``, ``most_negative``: eigenvalues of G. ``constraint``: share of G (by
        norm) that the weights cannot represent, at α = ½ the residual of the constraint. ``discarded``: share of ``‖G‖²``
        dropped by truncation. ``unsettled``: error estimate of a light step, 0 after a full one (see ``refresh``).
        """
        return {unit.weight.name: unit.report.numbers() for unit in self.units if unit.report is not None}

    def close(self) -> None:
        """Remove every hook from the model. Algorithm 1 cannot step any more, nor averaged steps before their first one."""
        self._finalizer()

    # --- state --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> VCL:
        """An optimizer with the same state for a copy of the model."""
        _finish_copies(self.model, memo)
        copied = type(self)(copy.deepcopy(self.model, memo), **self._arguments)
        memo[id(self)] = copied
        copied.load_state_dict(copy.deepcopy(self.state_dict()))
        return copied

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise InputError("VCL holds hooks on its model and cannot be pickled; save optimizer.state_dict()")

    def _state_of(self, unit: Unit) -> dict[str, Any]:
        return _own(unit, self.state[unit.weight.parameter])

    def _store(self, unit: Unit, state: dict[str, Any]) -> None:
        if unit.weight.part:
            self.state[unit.weight.parameter][unit.weight.part] = state
        else:
            self.state[unit.weight.parameter] = state

    def consolidate_state_dict(self) -> None:
        """Give every process the state of all layers, for :meth:`state_dict`; every process of the group must call this.

        One layer after the other is sent. The next step drops again what this process does not own. In a single process
        this does nothing. ``torch.distributed.optim.ZeroRedundancyOptimizer`` has a method of the same name and purpose.
        """
        self._form.consolidate(self.state)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state of all layers and of the readout optimizer.

        Raises:
            InputError: other processes own some layers and :meth:`consolidate_state_dict` was not called since the last step.
        """
        if not self._form.complete:
            raise InputError(
                "the state of some VCL layers is in other processes: call optimizer.consolidate_state_dict() in every process "
                "before state_dict()"
            )
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`; training then continues with the same bits as without the interruption.

        The model must hold the weights it had when the state was saved. States that torch's distributed checkpoint has stored,
        which turns the numbers of parameters into text, are taken too.
        """
        numbered = {
            int(key) if str(key).isdigit() else key: value for key, value in state_dict.get("state", {}).items()
        }
        state_dict = {**state_dict, "state": numbered}
        facts = state_dict["param_groups"][0] if state_dict.get("param_groups") else {}
        name = facts.get("head")
        layers = {layer.name: layer for layer, _ in self._refused}
        matrices = {unit.weight.name: unit.weight for unit in self._form.all_units}
        head = self._presumed if name is None else matrices.get(name, layers.get(name))
        names = [layer for layer, weight in matrices.items() if weight is not head]
        check_facts(facts, {**self.param_groups[0], "layers": names})
        if self._presumed is not None:
            self._regroup(head, settled=name is not None)
        keys = dict(zip(self.param_groups[0]["params"], state_dict["param_groups"][0]["params"], strict=True))
        for unit in self.units:
            unit.forget()
            unit.check_state(_own(unit, state_dict["state"].get(keys[unit.weight.parameter], {})))
        super().load_state_dict(state_dict)
        self._add_cycled()
        self._share()
        # torch casts floating-point state to the parameter's dtype; V must keep its own
        vcl = {id(unit.weight.parameter) for unit in self.units}
        for group, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(group["params"], mine["params"], strict=True):
                if id(parameter) in vcl and key in state_dict["state"]:
                    copied = partial(torch.Tensor.to, device=parameter.device, copy=True)
                    self.state[parameter] = tree_map_only(Tensor, copied, state_dict["state"][key])
        self._form.clear()
        self._form.complete = True


def _close(form: Form, order: ExecutionOrder | None) -> None:
    form.close()
    if order is not None:
        order.close()


def _finish_copies(model: nn.Module, memo: dict[int, Any]) -> None:
    """Finish the copies of modules that are being made, of a model that holds its own optimizer."""
    for module in model.modules():
        made = memo.get(id(module))
        if made is not None and "_modules" not in made.__dict__:
            for name, value in module.__dict__.items():
                if not isinstance(value, VCL):
                    made.__dict__[name] = copy.deepcopy(value, memo)


def _own(unit: Unit, state: dict[str, Any]) -> dict[str, Any]:
    """The state of one matrix within that of its parameter, which may be a packed weight of several matrices."""
    found: dict[str, Any] = state.get(unit.weight.part, {}) if unit.weight.part else state
    return found
