"""The command-line form of a training configuration: from flags to a configuration, and back."""

from __future__ import annotations

import inspect
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gramscope.errors import InputError
from gramscope_lab.training.config import MOST_MEMBERS, TrainConfig, find_option
from gramscope_lab.training.options import METHODS, OPTIMIZERS

N = TypeVar("N", int, float)
#: where several runs train, for commands that make a :class:`~gramscope_lab.training.placement.Placement`
Engine = Annotated[str, typer.Option(help="Where several runs train: local, or ray for a Ray cluster.")]
Address = Annotated[
    str,
    typer.Option(
        help="Address of the Ray cluster, or auto (default: RAY_ADDRESS, or a local one).", show_default=False
    ),
]
Gpus = Annotated[
    float | None, typer.Option(help="Share of a GPU for each run: 0.25 lets four share one.", show_default=False)
]

#: panel of the help → flag → the key it sets; type and help text come from the option of that key
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
        "--warm-up": "schedule.warm_up", "--patience": "patience",
    },
    "Cadence and execution": {
        "--device": "device", "--dtype": "dtype", "--evaluate-every": "evaluate_every",
        "--measure-every": "measure.every", "--checkpoint-every": "checkpoint_every", "--keep": "keep",
        "--execution": "execution",
    },
}  # fmt: skip
#: help of keys without an option: names, and options of the nets
_TEXTS = {
    "data.name": "data set: digits, mnist, cifar10 … (gramscope data list), or a .npz file",
    "model.name": "net: mlp, cnn, resnet, logistic …, or package.module:factory of your own",
    "model.hidden": "widths of the hidden layers, such as 256 or 256,256",
    "model.activation": "activation, such as gelu or relu",
    "method.name": f"method: {', '.join(METHODS)}",
}


@dataclass(frozen=True)
class Flag:
    """One flag, and the key of the configuration that it sets."""

    name: str
    key: str
    panel: str

    @property
    def parameter(self) -> str:
        """Its name as a Python argument."""
        return self.name.strip("-").replace("-", "_")

    @property
    def listed(self) -> bool:
        """Whether it takes several whole numbers with commas between."""
        return self.key == "model.hidden"

    @property
    def kind(self) -> type:
        """The type of its value on the command line."""
        option = find_option(self.key)
        return str if option is None else type(option.default)

    @property
    def help(self) -> str:
        """Its line of ``gramscope train --help``."""
        option = find_option(self.key)
        text = _TEXTS[self.key] if option is None else option.help
        if option is not None and option.choices:
            text += f": {', '.join(option.choices)}"
        if option is not None and self.key.startswith("method."):
            text += f" ({', '.join(name for name in OPTIMIZERS if self.key[7:] in METHODS[name])})"
        return f"{text[0].upper()}{text[1:]}."


FLAGS = tuple(Flag(name, key, panel) for panel, flags in _PANELS.items() for name, key in flags.items())

#: used where neither the command line nor a file names them
DEFAULTS = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "method": {"name": "sgd"}}


def takes_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command, whose last parameter is ``**flags``, one option for each flag."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(
            flag.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                flag.kind | None,
                typer.Option(flag.name, help=flag.help, rich_help_panel=flag.panel, show_default=False),
            ],
        )
        for flag in FLAGS
    ]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return command


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
    for flag in FLAGS:
        value = flags.get(flag.parameter)
        if value is not None:
            _put(tree, flag.key, numbers(flag.name, value, int) if flag.listed else value)
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
    try:
        numbers = [int(part) for part in (seeds or "1").split(",")]
    except ValueError:
        raise InputError(f"--seeds {seeds}: give how many (5) or which (0,3,7)") from None
    if len(numbers) > 1:
        if len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise InputError(f"--seeds {seeds}: give each seed once, from 0 on")
        if seed is not None:
            raise InputError(f"--seeds {seeds} names the seeds; --seed {seed} only goes with a number of them")
        return numbers
    if not 1 <= numbers[0] <= MOST_MEMBERS:
        raise InputError(f"--seeds {seeds}: give 1 to {MOST_MEMBERS:,} seeds")
    return list(range(seed or 0, (seed or 0) + numbers[0]))


def to_arguments(config: TrainConfig) -> list[str]:
    """The command-line arguments that give this configuration."""
    plain = TrainConfig.from_dict({**DEFAULTS, **{name: {"name": config.to_dict()[name]["name"]} for name in DEFAULTS}})
    wanted, default = _leaves(config.to_dict()), _leaves(plain.to_dict())
    arguments: list[str] = []
    for flag in FLAGS:
        value = wanted.get(flag.key)
        named = flag.key in ("data.name", "model.name", "method.name")
        if (value != default.get(flag.key) or named) and (not flag.listed or _is_numbers(value)):
            arguments += [flag.name, _text(wanted.pop(flag.key))]
    for key, value in wanted.items():
        if key != "seeds" and not key.startswith("sweep/") and default.get(key) != value:
            arguments += ["--set", f"{key}={_toml(value)}"]
    for key, values in config.sweep.items():
        arguments += ["--sweep", f"{key}={_toml(list(values))}"]
    if len(config.seeds) == 1:
        return [*arguments, "--seed", str(config.seeds[0])]
    return [*arguments, "--seeds", ",".join(map(str, config.seeds))]


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
        return key.strip(), [_value(part) for part in value.split(",")]
    return key.strip(), _value(value)


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise InputError(f"{text[:20]}… is nested too deeply") from None
    except ValueError:  # not TOML, or a number of too many digits
        return text.strip()


def _toml(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    import tomli_w

    return tomli_w.dumps({"value": value}).split("=", 1)[1].strip()


def numbers(flag: str, text: str, kind: type[N], least: float | None = None) -> list[N]:
    """Numbers with commas between."""
    words = "whole numbers" if kind is int else "numbers"
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{flag} {text}: give {words} with commas between, such as 256,512") from None
    if least is not None and (not found or min(found) < least):
        raise InputError(f"{flag} {text}: give {words} of at least {least:g}, with commas between")
    return found


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of a configuration; sweeps, whose keys have dots themselves, are marked with a slash."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{key}{'/' if key == 'sweep' else '.'}{name}": item for name, item in value.items()}
        else:
            found[key] = value
    return found


def format_command(arguments: Sequence[str]) -> str:
    """Arguments as a shell command."""
    return " ".join(["gramscope", "train", *map(shlex.quote, arguments)])
