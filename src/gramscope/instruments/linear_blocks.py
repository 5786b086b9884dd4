"""Which blocks of a deep model a linear map replaces: the best affine map from each block's input to its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, no_such
from gramscope.layers.batches import Unpack, batches, first_tensor, to_device
from gramscope.layers.model_call import call_model, evaluating, model_device, model_dtype
from gramscope.layers.modules import unwrap
from gramscope.linalg.moments import Moments, block_moments
from gramscope.names import split_name


@dataclass(frozen=True)
class LinearBlock:
    """The least-squares affine map from a block's input to its output, over all positions that it saw.

    Args:
        name: of the block.
        r2: share of the output's variance that the map gives; blocks where it is high are replaced at the least cost.
        r2_update: the same of what a residual block adds, output minus input; NaN where their widths differ.
        weight: ``[d_out, d_in]``, float64.
        bias: ``[d_out]``, float64.
    """

    name: str
    r2: float
    r2_update: float
    weight: Tensor = field(repr=False)
    bias: Tensor = field(repr=False)


def block_names(model: nn.Module) -> list[str]:
    """The blocks of a deep model: elements of lists such as ``h``, ``layers`` and ``blocks``, outermost lists alone."""
    names = [name for name, _ in unwrap(model).named_modules() if name]
    found: dict[str, None] = {}
    for name in names:
        known = split_name(f"{name}.x")
        if known.block is not None and known.kind == "x":
            found[name] = None
    return list(found)


@torch.no_grad()
def linear_blocks(
    model: nn.Module, data: Any, blocks: list[str] | None = None, unpack: Unpack | None = None
) -> dict[str, LinearBlock]:
    """The best affine map in place of each block, in one pass over the data.

    Args:
        model: any module; it is left as it was.
        data: a loader, a data set or tensors, as for :func:`gramscope.measure`. Padding is not told apart.
        blocks: names of modules; by default all blocks of the model.
        unpack: ``batch -> (inputs, target)``.

    >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    >>> round(linear_blocks(net, torch.randn(40, 3), ["1"])["1"].r2, 6)
    1.0
    """
    root = unwrap(model)
    names = block_names(root) if blocks is None else blocks
    if not names:
        raise LayerError("the model has no list of blocks (h, layers, blocks); name the modules with blocks=")
    modules = dict(root.named_modules())
    sums: dict[str, Moments] = {}

    def add(name: str, args: Any, kwargs: Any, output: Any) -> None:
        x, y = _input_of(name, args, kwargs), _output_of(name, output)
        if x.shape[:-1] != y.shape[:-1]:
            raise LayerError(
                f"block {name!r} turns {tuple(x.shape)} into {tuple(y.shape)}: no map of single positions does that"
            )
        found = block_moments(x.flatten(0, -2).double(), y.flatten(0, -2).double(), True)
        sums[name] = sums[name].merge(found) if name in sums else found

    with ExitStack() as stack:
        for name in names:
            if name not in modules:
                raise LayerError(no_such("module", name, [n for n in modules if n]))
            hook = modules[name].register_forward_hook(
                lambda _module, args, kwargs, output, name=name: add(name, args, kwargs, output), with_kwargs=True
            )
            stack.callback(hook.remove)
        stack.enter_context(evaluating(root, True))
        for inputs, _ in batches(data, unpack, model_dtype(root)):
            call_model(root, to_device(inputs, model_device(root)))
    return {name: _fitted(name, sums[name]) for name in names if name in sums}


def _fitted(name: str, sums: Moments) -> LinearBlock:
    """The fit of least norm, from centred moments; directions below 1e-12 of the largest count as constant."""
    assert sums.C_hh is not None
    A = torch.linalg.pinv(sums.C_hh, rtol=1e-12, hermitian=True) @ sums.C_hy  # [d_in, d_out]
    explained = float((A * sums.C_hy).sum())
    total = float(sums.C_yy.trace())
    update = float("nan")
    if A.shape[0] == A.shape[1]:  # of y − x: the map is A − I, the total tr(C_yy − C_hy − C_hyᵀ + C_hh)
        cross = float(sums.C_hy.trace())
        spread = total - 2 * cross + float(sums.C_hh.trace())
        update = 1 - (total - explained) / spread if spread > 0 else float("nan")
    bias = sums.mean_y - sums.mean_h @ A
    return LinearBlock(name, explained / total if total > 0 else float("nan"), update, A.mT.contiguous(), bias)


@contextmanager
def replaced(model: nn.Module, fits: Mapping[str, LinearBlock]) -> Iterator[None]:
    """Let affine maps take the place of blocks while the context lasts; the model is as it was afterwards.

    >>> net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    >>> x = torch.randn(9, 3)
    >>> fits = linear_blocks(net, x, ["0"])
    >>> with replaced(net, fits):
    ...     inside = net(x)
    >>> bool(torch.allclose(inside, net(x), atol=1e-5))
    True
    """
    modules = dict(unwrap(model).named_modules())
    with ExitStack() as stack:
        for name, fit in fits.items():
            if name not in modules:
                raise LayerError(no_such("module", name, [n for n in modules if n]))

            def swap(_module: nn.Module, args: Any, kwargs: Any, output: Any, fit: LinearBlock = fit) -> Any:
                x = _input_of(fit.name, args, kwargs)
                y = (x.double() @ fit.weight.to(x.device).mT + fit.bias.to(x.device)).to(x.dtype)
                return (y, *output[1:]) if isinstance(output, tuple) else y

            stack.callback(modules[name].register_forward_hook(swap, with_kwargs=True).remove)
        yield


def _input_of(name: str, args: Any, kwargs: Any) -> Tensor:
    x = first_tensor(args)
    x = first_tensor(kwargs) if x is None else x
    if x is None or not x.is_floating_point() or x.dim() < 2:
        raise InputError(f"block {name!r} has no floating-point tensor as its first argument")
    return x


def _output_of(name: str, output: Any) -> Tensor:
    y = first_tensor(output)
    if y is None or not y.is_floating_point():
        raise InputError(f"block {name!r} returns no floating-point tensor first")
    return y
