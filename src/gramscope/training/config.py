"""The training configuration: frozen, strictly checked, the same as TOML, as command line and in Python.

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
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from gramscope.errors import InputError
from gramscope.training import options
from gramscope.training.member_names import short_key, value_labels
from gramscope.training.options import Option


def _setting(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with the rule that checks it."""
    rule = Option(default, text, **limits)
    return field(default=default, metadata={"option": rule})


class _Table:
    """Shared by the tables: checks fields by their rules, and converts from and to plain values."""

    _where = ""

    def _check(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            rule = item.metadata.get("option")
            if rule is not None:
                value = rule.check(f"{self._where}{item.name}", getattr(self, item.name))
                object.__setattr__(self, item.name, value)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Read one TOML table, refusing unknown keys."""
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        for key, value in table.items():
            if key not in known:
                raise InputError(f"{cls._where}{key} = {value!r}: unknown key; known: {', '.join(known)}")
        return cls(**table)

    def to_table(self) -> dict[str, Any]:
        """The table as plain values, without what TOML cannot say (``None``)."""
        return {item.name: _as_list(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Named(_Table):
    """A table with a name and free options, which the thing named checks itself."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"{self._where}name = {self.name!r}: must be a name")
        object.__setattr__(self, "options", {key: _as_tuple(value) for key, value in self.options.items()})
        self._check()

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Keys that are not fields are the options."""
        if "name" not in table:
            raise InputError(f"{cls._where}name is missing")
        own = {item.name for item in fields(cls)} - {"options"}
        return cls(
            **{key: value for key, value in table.items() if key in own},
            options={key: value for key, value in table.items() if key not in own},
        )

    def to_table(self) -> dict[str, Any]:
        """Name and options in one flat table."""
        own = {key: value for key, value in super().to_table().items() if key != "options"}
        return {**own, **{key: _as_list(value) for key, value in self.options.items() if value is not None}}


@dataclass(frozen=True)
class DataTable(_Named):
    """Which data set; options go to :func:`gramscope.data.load`."""

    _where = "data."
    dir: str = _setting("", "where data sets are kept; empty for GRAMSCOPE_DATA or the user's cache")
    seed: int = _setting(0, "seed of generated data, noise and the validation split", least=0)
    validation: float = _setting(0.0, "fraction of the training set held out for validation", least=0.0)
    samples: int = _setting(0, "training samples used (0: all)", least=0)
    test_samples: int = _setting(0, "test samples used (0: all)", least=0)
    label_noise: float = _setting(0.0, "fraction of the training samples given random labels", least=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation >= 1:
            raise InputError(f"data.validation = {self.validation!r}: must be a fraction below 1")


@dataclass(frozen=True)
class ModelTable(_Named):
    """Which net: a name known to :func:`gramscope.models.build`, or ``package.module:factory`` of your own."""

    _where = "model."


@dataclass(frozen=True)
class MethodTable(_Named):
    """Which optimizer; see :data:`gramscope.training.options.METHODS`."""

    _where = "method."

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "options", options.method_options(self.name, self.options))


@dataclass(frozen=True)
class ScheduleTable(_Table):
    """How the step size changes: a linear warm-up, then the named schedule."""

    _where = "schedule."
    name: str = _setting("constant", "shape after the warm-up", choices=options.SCHEDULES)
    warm_up: float = _setting(0.0, "epochs of linear warm-up", least=0.0)
    final: float = _setting(0.0, "last factor of linear and cosine", least=0.0)
    every: float = _setting(10.0, "epochs between the drops of step", least=0.0)
    factor: float = _setting(0.1, "factor of each drop of step", least=0.0)

    def __post_init__(self) -> None:
        self._check()
        if self.every == 0:
            raise InputError("schedule.every = 0: must be more than 0 epochs")


@dataclass(frozen=True)
class MeasureTable(_Table):
    """Measuring every layer while training."""

    _where = "measure."
    every: float = _setting(0.0, "epochs between measurements (0: none; the start and the end are included)", least=0.0)
    samples: int = _setting(1000, "training samples measured on", least=1)
    batch_size: int = _setting(500, "samples a batch while measuring", least=1)
    layers: str = _setting("", "glob of the layers; empty for all")
    matrices: bool = _setting(False, "keep spectra and diagonals of every layer too, for the report")
    names: tuple[str, ...] = ()  #: which measures; empty for the usual ones

    def __post_init__(self) -> None:
        self._check()
        names: Any = self.names
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise InputError(f"measure.names = {names!r}: must be a list of names, such as ['nfa', 'target_linearity']")
        object.__setattr__(self, "names", tuple(names))


@dataclass(frozen=True)
class TrainConfig(_Table):
    """What to train. See the module's text for the TOML form."""

    data: DataTable
    model: ModelTable
    method: MethodTable
    schedule: ScheduleTable = field(default_factory=ScheduleTable)
    measure: MeasureTable = field(default_factory=MeasureTable)
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    epochs: float = _setting(1.0, "passes over the training set", least=0.0, most=1e9)
    batch_size: int = _setting(64, "samples a step (0: the whole training set)", least=0)
    loss: str = _setting("auto", "loss of a sample; auto follows the data's task", choices=options.LOSSES)
    reduction: str = _setting("mean", "how the batch's losses become one number", choices=options.REDUCTIONS)
    device: str = _setting("auto", "cpu, cuda, cuda:1 …; auto takes a GPU if there is one")
    dtype: str = _setting("float32", "type of weights and inputs", choices=options.DTYPES)
    evaluate_train: bool = _setting(False, "evaluate on the training set too")
    evaluate_every: float = _setting(1.0, "epochs between evaluations (0: only at the end)", least=0.0)
    checkpoint_every: float = _setting(0.0, "epochs between checkpoints (0: every half minute)", least=0.0)
    keep: int = _setting(2, "checkpoints kept (0: all)", least=0)
    patience: int = _setting(0, "evaluations without improvement before stopping early (0: never stop)", least=0)
    execution: str = _setting("auto", "how several members run", choices=options.EXECUTIONS)

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
        """The values that make a member what it is (``lr``, ``model_init_scale``, ``data_seed``), for its records."""
        tree = member.to_dict()
        return {short_key(key): tree[key.partition(".")[0]].get(key.partition(".")[2]) for key in self.sweep}

    @property
    def seed(self) -> int:
        """The seed of a configuration with one member."""
        if len(self.seeds) > 1:
            raise InputError(f"this configuration has seeds {list(self.seeds)}; take one of its members()")
        return self.seeds[0]

    def anchored(self) -> TrainConfig:
        """A copy that means the same in every working directory: files and folders of data by their full names."""
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
        tree = dict(tree)
        for item in fields(cls):
            table = _TABLES.get(item.name)
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
                value = {key: [_as_list(v) for v in values] for key, values in value.items()}
            tree[item.name] = value.to_table() if isinstance(value, _Table) else _as_list(value)
        # scalars first: in TOML they would otherwise belong to the table before them
        return dict(sorted(tree.items(), key=lambda pair: isinstance(pair[1], dict)))

    @classmethod
    def from_toml(cls, path: Path | str) -> TrainConfig:
        """Read a TOML file."""
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}") from error
        return cls.from_dict(tree)

    def to_toml(self) -> str:
        """The configuration as TOML text."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())


_TABLES: dict[str, type[_Table]] = {
    "data": DataTable,
    "model": ModelTable,
    "method": MethodTable,
    "schedule": ScheduleTable,
    "measure": MeasureTable,
}


def _sweep_values(key: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"sweep.{key} = {value!r}: must be a list of values to try")
    values = tuple(_as_tuple(item) for item in value)
    for index, item in enumerate(values):
        if item in values[:index]:
            raise InputError(f"sweep.{key} = {list(value)!r}: the value {item!r} occurs twice")
    return values


def _full_file(name: str) -> str:
    return _full_folder(name) if name.endswith(".npz") else name


def _full_folder(name: str) -> str:
    return str(Path(name).expanduser().absolute()) if name else name


_ANCHORS: dict[str, Callable[[str], str]] = {"data.name": _full_file, "data.dir": _full_folder}


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list | tuple) else value


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, list | tuple) else value
