"""From a method's name and options to its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn, optim
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.layers.select import select_layers
from gramscope_lab.training.config import MethodTable
from gramscope_lab.training.method_options import METHODS, split_wrapper

if TYPE_CHECKING:
    from gramscope.optim.vcl import VCL

#: the hyper-parameter of a parameter group that the schedule multiplies; VCL's γ goes by that name too
SCALED = "lr"


class Method:
    """One or several optimizers that together train all parameters of a net, stepped as one."""

    def __init__(self, optimizers: Sequence[optim.Optimizer], notes: Sequence[str] = ()) -> None:
        self.optimizers = list(optimizers)
        self.notes = list(notes)
        self._configured = [[dict(group) for group in optimizer.param_groups] for optimizer in self.optimizers]

    def step(self, factor: float = 1.0) -> None:
        """One step of every optimizer, of its configured step size times ``factor``; the gradients are forgotten."""
        for optimizer, groups in zip(self.optimizers, self._configured, strict=True):
            for group, configured in zip(optimizer.param_groups, groups, strict=True):
                group[SCALED] = configured[SCALED] * factor
            self._advance(optimizer)
            optimizer.zero_grad(set_to_none=True)

    def _advance(self, optimizer: optim.Optimizer) -> None:
        optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """The optimizers' states, for a checkpoint."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from stored states, with the configured options."""
        for optimizer, groups, state in zip(self.optimizers, self._configured, states, strict=True):
            optimizer.load_state_dict(state)
            for loaded, configured in zip(optimizer.param_groups, groups, strict=True):
                loaded.update({key: value for key, value in configured.items() if key != "params"})


class VCLMethod(Method):
    """VCL after a warm-up in which the readout's optimizer trains the last layer alone ([VCL] §3)."""

    def __init__(self, vcl: VCL, warm_up_steps: int) -> None:
        notes = []
        if vcl.readout is not None:
            trained = ", ".join(matrix.name for matrix in vcl.matrices)
            notes = [f"VCL trains {trained}; {type(vcl.readout).__name__} trains the other parameters"]
        super().__init__([vcl], notes)
        self.vcl = vcl
        #: steps taken, those of the warm-up included
        self.done = 0
        self._warm_up_steps = warm_up_steps

    @override
    def _advance(self, optimizer: optim.Optimizer) -> None:
        if self.done < self._warm_up_steps and self.vcl.readout is not None:
            trained = {id(p) for p in self.vcl.warm_up_parameters()}
            for group in self.vcl.readout.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in trained:
                        parameter.grad = None
            optimizer = self.vcl.readout
        optimizer.step()
        self.done += 1

    @override
    def state_dict(self) -> list[dict[str, Any]]:
        return [*super().state_dict(), {"done": self.done}]

    @override
    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        super().load_state_dict(states[:-1])
        self.done = int(states[-1]["done"])


def build_method(table: MethodTable, model: nn.Module, *, reduction: str = "mean", steps_per_epoch: int = 1) -> Method:
    """The optimizers of a method for a model.

    Args:
        table: the method and its options.
        model: the net, on its device.
        reduction: how the training loss is reduced over the batch (VCL needs to know).
        steps_per_epoch: for options given in epochs.
    """
    options = table.options
    try:
        if table.name == "vcl":
            return _vcl(model, options, reduction, steps_per_epoch)
        if table.name == "free-muon":
            from gramscope.optim.free_muon import FreeMuon

            return Method([FreeMuon(model, options["layers"] or None)])
        kind, name = split_wrapper(table.name)
        return _wrapped(kind, name, model, options) if kind else _plain(name, model, options)
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"method {table.name!r} with {options}: {error}") from error


def _plain(name: str, model: nn.Module, options: Mapping[str, Any]) -> Method:
    if name == "muon":
        return _muon(model, options)
    return Method([torch_optimizer(name, [p for p in model.parameters() if p.requires_grad], options)])


def torch_optimizer(name: str, parameters: Iterable[Tensor], options: Mapping[str, Any]) -> optim.Optimizer:
    """An optimizer of torch with those of the options that it takes."""
    defaults = dict(METHODS[name]())
    arguments = {
        key: options.get(key, default) for key, default in defaults.items() if key not in ("readout", "adamw_lr")
    }
    if "beta1" in arguments:
        arguments["betas"] = (arguments.pop("beta1"), arguments.pop("beta2"))
    if "adjust" in arguments:
        arguments["adjust_lr_fn"] = arguments.pop("adjust")
    return _TORCH[name](parameters, **arguments)


_TORCH: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "muon": optim.Muon,
}  # fmt: skip


def _muon(model: nn.Module, options: Mapping[str, Any]) -> Method:
    """Muon on matrices (the readout only if asked), AdamW on all other parameters."""
    last = select_layers(model).layers[-1].parameter
    muon: dict[str, nn.Parameter] = {}
    adamw: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            other = parameter.ndim != 2 or (options["readout"] == "adamw" and parameter is last)
            (adamw if other else muon)[name] = parameter
    if not muon:
        raise InputError(
            "method.name = 'muon': no matrix is left for Muon (it trains 2-D weights, and the readout only with "
            "method.readout = 'muon'); use adamw"
        )
    first = torch_optimizer("muon", muon.values(), options)
    if not adamw:
        return Method([first])
    beside = {"lr": options["adamw_lr"], "weight_decay": options["weight_decay"]}
    rest = torch_optimizer("adamw", adamw.values(), beside)
    return Method([first, rest], [f"Muon trains {', '.join(muon)}; AdamW trains {', '.join(adamw)}"])


def _wrapped(kind: str, name: str, model: nn.Module, options: Mapping[str, Any]) -> Method:
    from gramscope.optim.whitening import GramFixed, GramWhitened

    inner = _plain(name, model, options)
    wrapper = GramWhitened if kind == "whiten" else GramFixed
    layers = [options["layers"]] if options["layers"] else None
    first = wrapper(inner.optimizers[0], model, layers, options["whiten_readout"], options["polar"])
    return Method([first, *inner.optimizers[1:]], inner.notes)


def _vcl(model: nn.Module, options: Mapping[str, Any], reduction: str, steps_per_epoch: int) -> Method:
    from gramscope.optim.vcl import VCL

    beside = {key.removeprefix("readout_"): value for key, value in options.items() if key.startswith("readout_")}

    def readout(parameters: list[nn.Parameter]) -> optim.Optimizer:
        return torch_optimizer(options["readout"], parameters, beside)

    own = {key: options[key] for key in ("gamma", "alpha", "solver", "rank")}
    vcl = VCL(model, reduction=reduction, layers=options["layers"] or None, readout=readout, **own)
    return VCLMethod(vcl, round(float(options["warm_up_epochs"]) * steps_per_epoch))
