"""The command-line form of a training configuration: flags made from its models."""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic.fields import FieldInfo

from gramscope.errors import InputError
from gramscope_lab.training.config import MOST_MEMBERS, TABLES, TrainConfig
from gramscope_lab.training.method_options import METHODS

N = TypeVar("N", int, float)
#: how several runs train, for commands that make a :class:`~gramscope_lab.training.train.Parallel`
ParallelOption = Annotated[
    str,
    typer.Option(
        "--parallel",
        help="How several runs train: auto, stack (one step for all), a number of processes, or ray[:ADDRESS].",
    ),
]
Gpus = Annotated[
    float | None,
    typer.Option(help="Share of a GPU for each run on a Ray cluster: 0.25 lets four share one.", show_default=False),
]

#: panel of the help → flag → the key it sets; type and help text come from the model of that key
_PANELS = {
    "Data": {
        "--data": "data.name", "--data-dir": "data.dir", "--validation": "data.validation",
        "--samples": "data.samples", "--label-noise": "data.label_noise",
    },
    "Net": {"--model": "model.name", "--hidden": "model.hidden", "--activation": "model.activation"},
    "Method": {
        "--method": "method.name", "--lr": "method.lr", "--gamma": "method.gamma", "--alpha": "method.alpha",
        "--momentum": "method.momentum", "--weight-decay": "method.weight_decay",
    },
    "Training": {
        "--epochs": "epochs", "--batch-size": "batch_size", "--loss": "loss", "--schedule": "schedule.name",
        "--warm-up": "schedule.warm_up",
    },
    "Cadence": {
        "--device": "device", "--dtype": "dtype", "--evaluate-every": "evaluate_every",
        "--measure-every": "measure.every", "--checkpoint-every": "checkpoint_every", "--keep": "keep",
    },
}  # fmt: skip
#: flag → key, and the name of its Python argument
FLAGS = {flag: key for flags in _PANELS.values() for flag, key in flags.items()}
#: help of names, and of options of the nets
_TEXTS = {
    "data.name": "data set: digits, mnist, cifar10 … (gramscope data list), or a .npz file",
    "model.name": "net: mlp, cnn, resnet …, or package.module:factory of your own",
    "model.hidden": "widths of the hidden layers, such as 256 or 256,256",
    "model.activation": "activation, such as gelu or relu",
    "method.name": f"method: {', '.join(METHODS)}",
}
#: used where neither the command line nor a file names them
DEFAULTS = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "method": {"name": "sgd"}}
#: the key whose values are whole numbers with commas between
_LISTED = "model.hidden"


def argument(flag: str) -> str:
    """The name of a flag as a Python argument."""
    return flag.strip("-").replace("-", "_")


def find_field(key: str) -> FieldInfo | None:
    """The field of a dotted key such as ``schedule.warm_up``; ``None`` where a net or data set defines it."""
    table, _, name = key.rpartition(".")
    models = [TABLES.get(table, TrainConfig)] if table != "method" else list(METHODS.values())
    return None if key in _TEXTS else next((m.model_fields[name] for m in models if name in m.model_fields), None)


def _option(flag: str, key: str, panel: str) -> Any:
    """The annotation from which typer makes a flag."""
    field = find_field(key)
    kind: Any = str
    text = _TEXTS.get(key, "")
    if field is not None:
        choices = typing.get_args(field.annotation)
        kind = str if choices else field.annotation
        text = f"{field.description}{': ' if choices else ''}{', '.join(map(str, choices))}"
        if key.startswith("method."):
            users = [name for name, model in METHODS.items() if key[7:] in model.model_fields and "-" not in name]
            text += f" ({', '.join(users)})"
    help_ = f"{text[0].upper()}{text[1:]}."
    return Annotated[kind | None, typer.Option(flag, help=help_, rich_help_panel=panel, show_default=False)]


def takes_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command, whose last parameter is ``**flags``, one option for each flag."""
    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [p.replace(kind=keyword) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [
        inspect.Parameter(argument(flag), keyword, default=None, annotation=_option(flag, key, panel))
        for panel, flags in _PANELS.items()
        for flag, key in flags.items()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return command


def refuse_unused(context: typer.Context, names: Iterable[str], form: str) -> None:
    """Raise where an option was given that this form of a command does not use."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{options[name]} is not used {form}; leave it out")


# -- to a configuration -------------------------------------------------------------------------------------------
def read_config(
    path: Path | None,
    flags: Mapping[str, Any],
    settings: Iterable[str] = (),
    sweeps: Iterable[str] = (),
    seeds: str | None = None,
    seed: int | None = None,
    *,
    trust: bool = False,
) -> TrainConfig:
    """A configuration from a TOML file (or the defaults), with the values of the command line in place of its own.

    A function of the user's own as the net must be named on the command line; a file may name one only with ``trust``.
    """
    in_file = None if path is None else TrainConfig.from_toml(path, trust=True)
    tree: dict[str, Any]
    tree = in_file.to_dict() if in_file is not None else {k: dict(v) for k, v in DEFAULTS.items()}
    for flag, key in FLAGS.items():
        value = flags.get(argument(flag))
        if value is not None:
            _put(tree, key, numbers(flag, value, int) if key == _LISTED else value)
    parse_assignments(settings, tree)
    for sweep in sweeps:
        key, value = _assignment("--sweep", sweep, listed=True)
        table = tree.setdefault("sweep", {})
        if not isinstance(table, dict):
            raise InputError(
                f"--set sweep={table}: sweep is a table of lists; sweep over a key with --sweep lr=0.1,0.01"
            )
        table[key] = value
    if seeds is not None or seed is not None:
        tree["seeds"] = parse_seeds(seeds, seed)
    config = TrainConfig.from_dict(tree)
    if in_file is not None and not trust:
        config.check_trusted(str(path), (config.factories() - in_file.factories()) | {str(flags.get("model"))})
    return config


def parse_seeds(seeds: str | None, seed: int | None = None) -> list[int]:
    """``5`` is five seeds counted from ``seed``; ``3,7`` are these two."""
    found = numbers("--seeds", seeds or "1", int)
    if len(found) > 1:
        if seed is not None:
            raise InputError(f"--seeds {seeds} names the seeds; --seed {seed} only goes with a number of them")
        return found
    if not found or not 1 <= found[0] <= MOST_MEMBERS:
        raise InputError(f"--seeds {seeds}: give how many, 1 to {MOST_MEMBERS:,}, or which (0,3,7)")
    return list(range(seed or 0, (seed or 0) + found[0]))


def parse_assignments(settings: Iterable[str], tree: dict[str, Any] | None = None) -> dict[str, Any]:
    """``model.width=64`` and the like as nested tables, added to ``tree``."""
    tree = {} if tree is None else tree
    for setting in settings:
        _put(tree, *_assignment("--set", setting))
    return tree


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    table, _, name = key.rpartition(".")
    target = tree.setdefault(table, {}) if table else tree
    if not isinstance(target, dict):
        raise InputError(f"{key}: {table} is not a table")
    if name == "name" and table in DEFAULTS and target.get("name") != value:
        target.clear()  # another net, method or data set: the old one's options do not apply
    target[name] = value


def _assignment(flag: str, text: str, *, listed: bool = False) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"{flag} {text}: write key=value, such as {'lr=0.1,0.01' if listed else 'data.seed=3'}")
    if listed and not value.startswith("["):
        return key.strip(), [_value(item) for item in value.split(",")]
    return key.strip(), _value(value)


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise InputError(f"{text[:20]}… is nested too deeply") from None
    except ValueError:  # not TOML, or a number of too many digits
        return text.strip()


def numbers(flag: str, text: str, kind: type[N], least: float | None = None) -> list[N]:
    """Numbers with commas between."""
    words = "whole numbers" if kind is int else "numbers"
    try:
        found = [kind(item) for item in text.split(",") if item.strip()]
    except ValueError:
        raise InputError(f"{flag} {text}: give {words} with commas between, such as 256,512") from None
    if least is not None and (not found or min(found) < least):
        raise InputError(f"{flag} {text}: give {words} of at least {least:g}, with commas between")
    return found
