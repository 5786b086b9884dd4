"""From the model table of a configuration to a net: one of ours, or the user's own function."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gramscope.errors import InputError
from gramscope_lab.data.seeds import generator
from gramscope_lab.training.config import ModelTable
from gramscope_lab.training.random_state import PrivateRandomState


def build_model(table: ModelTable, seed: int, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The net a configuration names, on the CPU, initialised from ``seed`` alone."""
    with PrivateRandomState(seed, "factory").active():
        if ":" in table.name:
            factory = load_factory(table.name)
            _check_arguments(table, factory)
            model = factory(**table.options)
            if not isinstance(model, nn.Module):
                raise InputError(f"model.name = {table.name!r}: returned {type(model).__name__}, not a torch module")
            return model
        from gramscope_lab.nets import build

        options = {"sampling": True, **table.options} if table.name == "vae" else table.options
        try:
            return build(table.name, input_shape, outputs, generator=generator(seed, "weights"), **options)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise InputError(f"model.name = {table.name!r} with {table.options} does not fit into memory") from error


def load_state(model: nn.Module, state: Mapping[str, Any], where: Path) -> None:
    """Give a net stored weights, with an error that names the file or run they come from."""
    try:
        model.load_state_dict(dict(state))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where} does not fit {type(model).__name__}: {error}") from error


def load_factory(path: str) -> Callable[..., Any]:
    """The function named ``package.module:function``; modules in the working directory are found, also later."""
    module_name, _, attribute = path.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(f"{path!r}: give package.module:function, such as mynet:build for build() in mynet.py")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"{path!r}: {error}; give package.module:function, importable from here") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise InputError(f"{path!r}: module {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _check_arguments(table: ModelTable, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # written in C
        return
    try:
        signature.bind(**table.options)
    except TypeError as error:
        known = ", ".join(map(str, signature.parameters.values())) or "nothing"
        raise InputError(
            f"model.name = {table.name!r}: {error}; it takes {known}, given as model.NAME = value"
        ) from error
