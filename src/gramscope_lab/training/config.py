"""The training configuration, frozen and checked: the same as a TOML file, as a command line and in Python.

    seeds = [0, 1, 2]
    epochs = 2
    [data]
    name = "cifar10"
    [model]
    name = "mlp"
    hidden = [256]
    [method]
    name = "vcl"
    gamma = 1.0
    [sweep]
    "method.gamma" = [1.0, 0.1]

Every combination of seed and sweep value is one *member* of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gramscope.errors import InputError
from gramscope_lab.runs.files import MOST_TEXT, parse_toml
from gramscope_lab.training import options
from gramscope_lab.training.config_tables import (
    TABLES,
    DataTable,
    MeasureTable,
    MethodTable,
    ModelTable,
    ScheduleTable,
    Table,
    as_list,
    as_tuple,
    check_plain,
    setting,
)  # fmt: skip
from gramscope_lab.training.member_names import short_key, value_labels

#: runs of one configuration
MOST_MEMBERS = 10_000


@dataclass(frozen=True)
class TrainConfig(Table):
    """What to train. The text at the top of this module shows the TOML form."""

    data: DataTable
    model: ModelTable
    method: MethodTable
    schedule: ScheduleTable = field(default_factory=ScheduleTable)
    measure: MeasureTable = field(default_factory=MeasureTable)
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    epochs: float = setting(1.0, "passes over the training set", least=0.0, most=1e9)
    batch_size: int = setting(64, "samples a step (0: the whole training set)", least=0)
    loss: str = setting("auto", "loss of a sample, where auto follows the data's task", choices=options.LOSSES)
    reduction: str = setting("mean", "how the batch's losses become one number", choices=options.REDUCTIONS)
    device: str = setting("auto", "device: cpu, cuda, cuda:1 …, or auto for a GPU if there is one")
    dtype: str = setting("float32", "type of weights and inputs", choices=options.DTYPES)
    evaluate_train: bool = setting(False, "evaluate on the training set too")
    evaluate_every: float = setting(1.0, "epochs between evaluations (0: only at the end)", least=0.0)
    checkpoint_every: float = setting(0.0, "epochs between checkpoints (0: every half minute)", least=0.0)
    keep: int = setting(2, "checkpoints to keep (0: all)", least=0)
    patience: int = setting(0, "evaluations without improvement before stopping (0: never stop)", least=0)
    execution: str = setting("auto", "how several runs train", choices=options.EXECUTIONS)

    def __post_init__(self) -> None:
        self._check()
        seeds: Any = self.seeds
        if isinstance(seeds, str) or not hasattr(seeds, "__iter__"):
            raise InputError(f"seeds = {seeds!r}: must be a list of whole numbers, such as [0, 1, 2]")
        object.__setattr__(self, "seeds", tuple(seeds))
        if not self.seeds or any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in self.seeds):
            raise InputError(f"seeds = {list(self.seeds)!r}: must be a list of whole numbers from 0, such as [0, 1, 2]")
        if len(set(self.seeds)) != len(self.seeds):
            raise InputError(f"seeds = {list(self.seeds)!r}: a seed occurs twice")
        object.__setattr__(
            self, "sweep", {self._sweep_key(key): _sweep_values(key, value) for key, value in self.sweep.items()}
        )
        count = math.prod([len(self.seeds), *map(len, self.sweep.values())])
        if count > MOST_MEMBERS:
            raise InputError(
                f"seeds and sweep make {count:,} runs; at most {MOST_MEMBERS:,} fit into one configuration"
            )
        if self.sweep:
            self.members()  # checks every combination

    def _sweep_key(self, key: str) -> str:
        if "." not in key and key in options.METHODS[self.method.name]:
            key = f"method.{key}"
        if not key.startswith(("method.", "model.", "data.")):
            raise InputError(f"sweep.{key}: sweep over an option of the method, model or data, such as method.lr")
        return key

    # -- members --------------------------------------------------------------------------------------------------
    def members(self) -> dict[str, TrainConfig]:
        """Every combination of seed and sweep value as a configuration of its own, by a name such as ``seed-0``."""
        found: dict[str, TrainConfig] = {}
        choices = [
            [
                (f"{short_key(key)}-{label}", key, value)
                for label, value in zip(value_labels(values), values, strict=True)
            ]
            for key, values in self.sweep.items()
        ]
        for chosen in itertools.product(*choices):
            for seed in self.seeds:
                name = ",".join([*(label for label, _, _ in chosen), f"seed-{seed}"])
                member = replace(self, sweep={}, seeds=(seed,))
                found[name] = member.with_values({key: value for _, key, value in chosen})
        return found

    def swept(self, member: TrainConfig) -> dict[str, Any]:
        """A member's values of what is swept over (``lr``, ``model_init_scale``, ``data_seed``), for its records."""
        tree = member.to_dict()
        return {short_key(key): tree[key.partition(".")[0]].get(key.partition(".")[2]) for key in self.sweep}

    @property
    def seed(self) -> int:
        """The seed of a configuration with one member."""
        if len(self.seeds) > 1:
            raise InputError(f"this configuration has seeds {list(self.seeds)}; take one of its members()")
        return self.seeds[0]

    def anchored(self) -> TrainConfig:
        """A copy with full paths of data files and folders, valid in every working directory."""
        sweep = {
            key: tuple(map(_ANCHORS[key], values)) if key in _ANCHORS else values for key, values in self.sweep.items()
        }
        data = replace(self.data, name=_full_file(self.data.name), dir=_full_folder(self.data.dir))
        return replace(self, data=data, sweep=sweep)

    def with_values(self, values: Mapping[str, Any]) -> TrainConfig:
        """A copy with dotted keys replaced, such as ``{"method.lr": 0.1, "epochs": 3}``."""
        tree = self.to_dict()
        for key, value in values.items():
            table, _, name = key.rpartition(".")
            (tree[table] if table else tree)[name] = value
        return TrainConfig.from_dict(tree)

    # -- conversions ----------------------------------------------------------------------------------------------
    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> TrainConfig:
        """Read nested plain values (parsed TOML), refusing unknown keys."""
        check_plain("", tree)
        tree = dict(tree)
        for item in fields(cls):
            table = TABLES.get(item.name)
            if table is None:
                continue
            value = tree.get(item.name)
            if value is None:
                if item.default_factory is MISSING:
                    raise InputError(f"[{item.name}] is missing; give at least {item.name}.name")
                continue
            if not isinstance(value, Mapping):
                raise InputError(f"{item.name} = {value!r}: must be a table such as [{item.name}]")
            tree[item.name] = table.from_table(value)
        if not isinstance(tree.get("sweep", {}), Mapping):
            raise InputError(f"sweep = {tree['sweep']!r}: must be a table such as [sweep]")
        return cls.from_table(tree)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for TOML or JSON."""
        tree: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "sweep":
                value = {key: [as_list(v) for v in values] for key, values in value.items()}
            tree[item.name] = value.to_table() if isinstance(value, Table) else as_list(value)
        # scalars first: in TOML they would otherwise belong to the table before them
        return dict(sorted(tree.items(), key=lambda pair: isinstance(pair[1], dict)))

    @classmethod
    def from_stored(cls, tree: Mapping[str, Any]) -> TrainConfig:
        """Read the configuration of a run directory; an option it lacks has the default of earlier versions."""
        method = tree.get("method")
        if isinstance(method, Mapping):
            tree = {**tree, "method": {**options.earlier_defaults(str(method.get("name"))), **method}}
        return cls.from_dict(tree)

    def to_resume(self, stored: TrainConfig) -> TrainConfig:
        """This configuration, with the earlier defaults of the stored run that is to go on.

        An option at its present default takes the stored value where that is the default of earlier versions.
        """
        if stored.method.name != self.method.name:
            return self
        known, old = options.METHODS[self.method.name], options.earlier_defaults(self.method.name)
        now, then = self.method.options, stored.method.options
        kept = {key: value for key, value in old.items() if now[key] == known[key].default and then[key] == value}
        return self.with_values({f"method.{key}": value for key, value in kept.items()})

    def factories(self) -> set[str]:
        """The functions ``package.module:function`` that are named as nets; using one runs its code."""
        names = (self.model.name, *self.sweep.get("model.name", ()))
        return {name for name in names if isinstance(name, str) and ":" in name}

    def check_trusted(self, where: Path | str, allowed: Collection[str] = ()) -> None:
        """Raise unless every function that is named as a net is among the ``allowed`` ones.

        A configuration in a file may come from somebody else, and must not run code.
        """
        for name in sorted(self.factories() - set(allowed)):
            raise InputError(
                f"{where} names the function {name!r} as its net, and calling it runs code; if you trust the file, allow "
                f"it with --trust, or name the function yourself with --model {name}"
            )

    @classmethod
    def from_toml(cls, path: Path | str, *, trust: bool = False) -> TrainConfig:
        """Read a TOML file; only with ``trust`` may it name a function of your own as the net."""
        try:
            with Path(path).open("rb") as file:
                content = file.read(MOST_TEXT)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error}") from error
        config = cls.from_dict(parse_toml(Path(path), content))
        if not trust:
            config.check_trusted(path)
        return config

    def to_toml(self) -> str:
        """The configuration as TOML text."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())


def find_option(key: str) -> options.Option | None:
    """The option with a dotted key such as ``schedule.warm_up``; ``None`` where a net or data set defines it."""
    table, _, name = key.rpartition(".")
    known = {item.name: item.metadata.get("option") for item in fields(TABLES.get(table, TrainConfig))}  # type: ignore[arg-type]
    if table == "method":
        known |= {name: option for method in reversed(options.METHODS.values()) for name, option in method.items()}
    return known.get(name)


def _sweep_values(key: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"sweep.{key} = {value!r}: must be a list of values to try")
    values = tuple(as_tuple(item) for item in value)
    for index, item in enumerate(values):
        if item in values[:index]:
            raise InputError(f"sweep.{key} = {list(value)!r}: the value {item!r} occurs twice")
    return values


def _full_file(name: str) -> str:
    return _full_folder(name) if name.endswith(".npz") else name


def _full_folder(name: str) -> str:
    return str(Path(name).expanduser().absolute()) if name else name


_ANCHORS: dict[str, Callable[[str], str]] = {"data.name": _full_file, "data.dir": _full_folder}
