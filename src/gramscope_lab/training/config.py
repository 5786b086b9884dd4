"""The training configuration: the same as a TOML file, as a command line and in Python.

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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from gramscope.errors import InputError, no_such
from gramscope_lab.runs.files import from_toml

#: runs of one configuration
MOST_MEMBERS = 10_000


def as_tuple(value: Any) -> Any:
    """Lists at any depth as tuples."""
    return tuple(as_tuple(item) for item in value) if isinstance(value, list | tuple) else value


def as_list(value: Any) -> Any:
    """Tuples at any depth as lists."""
    return [as_list(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(key: str, value: Any, depth: int = 0) -> Any:
    """A free option; an error unless it is made of lists, text, numbers that fit 64 bits, and yes or no."""
    if isinstance(value, list | tuple) and depth < 8:
        return tuple(_plain(key, item, depth + 1) for item in value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{key} is a whole number of {value.bit_length()} bits; at most 63 are possible")
    if not isinstance(value, str | int | float | None):
        raise InputError(f"{key} = {_shown(value)}: must be a number, text, true, false or a list of them")
    return value


class Section(BaseModel):
    """A part of the configuration, which checks its values and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    #: what stands before a key in messages
    where: ClassVar[str] = ""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(self._said(error)) from None

    @classmethod
    def _said(cls, error: ValidationError) -> str:
        """The first problem, with key, value and remedy."""
        found = error.errors(include_url=False)[0]
        if found["type"] == "value_error":  # ours, or of a section inside
            return str(found["ctx"]["error"])
        key = cls.where + ".".join(str(part) for part in found["loc"])
        if found["type"] == "missing":
            return f"{key} is missing"
        if found["type"] == "extra_forbidden":
            return f"{key} = {_shown(found['input'])}: {no_such('key', key, [cls.where + name for name in cls.model_fields])}"
        return f"{key} = {_shown(found['input'])}: {found['msg'].replace('Input should', 'must')}"

    def refuse_unused(self, keys: Collection[str], chosen: str) -> None:
        """Raise where one of ``keys``, which what is chosen does not use, has another value than its default."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise InputError(
                    f"{self.where}{key} = {_shown(getattr(self, key))}: {chosen} does not use it; leave it out"
                )

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Read one table of a TOML file."""
        if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
            raise InputError(f"{cls.where.strip('.') or 'the configuration'} = {_shown(table)}: must be a table")
        return cls(**table)

    def to_table(self) -> dict[str, Any]:
        """The values as a table of a TOML file."""
        return {key: as_list(value) for key, value in self if value is not None}


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a deeply nested value"
    return text if len(text) < 80 else f"{text[:77]}…"


class Named(Section):
    """A table with a name and any other options, which the named data set, net or method checks."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _plain_options(cls, values: dict[str, Any]) -> dict[str, Any]:
        own = cls.model_fields
        return {key: value if key in own else _plain(cls.where + key, value) for key, value in values.items()}

    @property
    def options(self) -> dict[str, Any]:
        """The options beside the table's own keys."""
        return dict(self.model_extra or {})


class DataTable(Named):
    """Which data set; options go to :func:`gramscope_lab.data.load`."""

    where: ClassVar[str] = "data."

    dir: str = Field(default="", description="folder of downloaded sets; empty for GRAMSCOPE_DATA, or the user's cache")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of generated data, noise and the validation split")
    validation: float = Field(
        default=0.0, ge=0, lt=1, description="fraction of the training set held out for validation"
    )
    samples: int = Field(default=0, ge=0, description="training samples to use (0: all)")
    test_samples: int = Field(default=0, ge=0, description="test samples to use (0: all)")
    label_noise: float = Field(default=0.0, ge=0, description="fraction of training labels drawn at random")


class ModelTable(Named):
    """Which net: a name known to :func:`gramscope_lab.nets.build`, or ``package.module:factory`` of your own."""

    where: ClassVar[str] = "model."


class MethodTable(Named):
    """Which optimizer, and all its options; see :mod:`gramscope_lab.training.method_options`."""

    where: ClassVar[str] = "method."

    @model_validator(mode="before")
    @classmethod
    def _all_options(cls, values: dict[str, Any]) -> dict[str, Any]:
        from gramscope_lab.training.method_options import METHODS

        name = values.get("name", "")
        if not isinstance(name, str) or name not in METHODS:
            raise InputError(f"method.name = {_shown(name)}: {no_such('method', str(name), METHODS)}")
        chosen = METHODS[name](**{key: value for key, value in values.items() if key != "name"})
        return {"name": name, **dict(chosen)}


class ScheduleTable(Section):
    """How the step size changes: a linear warm-up, then the named schedule."""

    where: ClassVar[str] = "schedule."

    name: Literal["constant", "linear", "cosine", "step"] = Field(
        default="constant", description="shape after the warm-up"
    )
    warm_up: float = Field(default=0.0, ge=0, description="epochs of linear warm-up")
    final: float = Field(default=0.0, ge=0, description="last factor of linear and cosine")
    every: float = Field(default=10.0, gt=0, description="epochs between the drops of step")
    factor: float = Field(default=0.1, ge=0, description="factor of each drop of step")

    @model_validator(mode="after")
    def _used(self) -> Self:
        used = {"linear": ("final",), "cosine": ("final",), "step": ("every", "factor")}.get(self.name, ())
        self.refuse_unused({"final", "every", "factor"} - set(used), f"the schedule {self.name!r}")
        return self


class MeasureTable(Section):
    """Measuring every layer while training: at the start, at the end, and as often as asked in between."""

    where: ClassVar[str] = "measure."

    every: float = Field(default=0.0, ge=0, description="epochs between measurements (0: only the start and the end)")
    samples: int = Field(default=1000, ge=0, description="training samples measured on (0: no measurements)")
    batch_size: int = Field(default=500, ge=1, description="samples a batch while measuring")
    layers: str = Field(default="", description="glob of the layers; empty for all")
    matrices: bool = Field(default=False, description="keep spectra and diagonals of every layer too, for the report")
    names: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(default=(), description="which measures")


class TrainConfig(Section):
    """What to train. The text at the top of this module shows the TOML form."""

    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], BeforeValidator(as_tuple)] = Field(
        default=(0,), min_length=1
    )
    epochs: float = Field(default=1.0, ge=0, le=1e9, description="passes over the training set")
    batch_size: int = Field(default=64, ge=0, description="samples a step (0: the whole training set)")
    loss: Literal["auto", "cross-entropy", "mse", "half-squared"] = Field(
        default="auto", description="loss of a sample, where auto follows the data's task"
    )
    reduction: Literal["mean", "sum"] = Field(default="mean", description="how the batch's losses become one number")
    device: str = Field(default="auto", description="device: cpu, cuda, cuda:1 …, or auto for a GPU if there is one")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="type of weights and inputs")
    evaluate_train: bool = Field(default=False, description="evaluate on the training set too")
    evaluate_every: float = Field(default=1.0, ge=0, description="epochs between evaluations (0: only at the end)")
    checkpoint_every: float = Field(default=0.0, ge=0, description="epochs between checkpoints (0: every half minute)")
    keep: int = Field(default=2, ge=0, description="checkpoints to keep (0: all)")
    clip: float = Field(default=0.0, ge=0, description="largest norm of the gradient (0: not clipped)")
    data: DataTable
    model: ModelTable
    method: MethodTable
    schedule: ScheduleTable = ScheduleTable()
    measure: MeasureTable = MeasureTable()
    sweep: dict[str, Any] = Field(default={})

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise InputError(f"seeds = {list(seeds)!r}: a seed occurs twice")
        return seeds

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        sweep = {self._sweep_key(key): _sweep_values(key, value) for key, value in self.sweep.items()}
        self.sweep.clear()
        self.sweep.update(sweep)
        count = math.prod([len(self.seeds), *map(len, sweep.values())])
        if count > MOST_MEMBERS:
            raise InputError(
                f"seeds and sweep make {count:,} runs; at most {MOST_MEMBERS:,} fit into one configuration"
            )
        if sweep:
            self.members()  # checks every combination
        return self

    def _sweep_key(self, key: str) -> str:
        if "." not in key and key in self.method.options:
            key = f"method.{key}"
        if not key.startswith(("method.", "model.", "data.")):
            raise InputError(f"sweep.{key}: sweep over an option of the method, model or data, such as method.lr")
        return key

    # -- members --------------------------------------------------------------------------------------------------
    def members(self) -> dict[str, TrainConfig]:
        """Every combination of seed and sweep value as a configuration of its own, by a name such as ``seed-0``."""
        found: dict[str, TrainConfig] = {}
        choices = [
            [(f"{short_key(key)}-{label}", key, v) for label, v in zip(value_labels(values), values, strict=True)]
            for key, values in self.sweep.items()
        ]
        tree = {**self.to_dict(), "sweep": {}}
        for chosen in itertools.product(*choices):
            member = TrainConfig.from_dict(_with_values(tree, {key: value for _, key, value in chosen}))
            for seed in self.seeds:
                name = ",".join([*(label for label, _, _ in chosen), f"seed-{seed}"])
                found[name] = member.model_copy(update={"seeds": (seed,)})
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

    def with_values(self, values: Mapping[str, Any]) -> TrainConfig:
        """A copy with dotted keys replaced, such as ``{"method.lr": 0.1, "epochs": 3}``."""
        return TrainConfig.from_dict(_with_values(self.to_dict(), values))

    def with_absolute_paths(self) -> TrainConfig:
        """A copy with full paths of data files and folders, valid in every working directory."""
        swept = {"data.name": _full_file, "data.dir": _full_folder}
        tree = _with_values(
            self.to_dict(), {"data.name": _full_file(self.data.name), "data.dir": _full_folder(self.data.dir)}
        )
        tree["sweep"] = {key: [swept[key](v) if key in swept else v for v in vs] for key, vs in self.sweep.items()}
        return TrainConfig.from_dict(tree)

    # -- conversions ----------------------------------------------------------------------------------------------
    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> TrainConfig:
        """Read nested plain values (parsed TOML), refusing unknown keys."""
        for name in ("data", "model", "method"):
            if isinstance(tree, Mapping) and tree.get(name) is None:
                raise InputError(f"[{name}] is missing; give at least {name}.name")
        if not isinstance(tree, Mapping):
            raise InputError(f"the configuration = {_shown(tree)}: must be a table")
        return cls.from_table(
            {**tree, **{name: table.from_table(tree[name]) for name, table in TABLES.items() if name in tree}}
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for TOML or JSON."""
        tree = {key: value.to_table() if isinstance(value, Section) else as_list(value) for key, value in self}
        tree["sweep"] = {key: as_list(values) for key, values in self.sweep.items()}
        return tree

    @classmethod
    def from_toml(cls, path: Path | str, *, trust: bool = False) -> TrainConfig:
        """Read a TOML file; only with ``trust`` may it name a function of your own as the net."""
        config = cls.from_dict(from_toml(Path(path)))
        if not trust:
            config.check_trusted(path)
        return config

    def to_toml(self) -> str:
        """The configuration as TOML text."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    # -- functions of others --------------------------------------------------------------------------------------
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


#: name of each table in the configuration
TABLES: dict[str, type[Section]] = {
    "data": DataTable,
    "model": ModelTable,
    "method": MethodTable,
    "schedule": ScheduleTable,
    "measure": MeasureTable,
}


# -- names of members ---------------------------------------------------------------------------------------------
def short_key(key: str) -> str:
    """``method.lr`` as ``lr``, other tables' keys as ``data_seed``."""
    return key.removeprefix("method.").replace(".", "_")


def value_labels(values: Collection[Any]) -> list[str]:
    """A name for each of different values, safe in file names; numbered where they would be equal.

    >>> value_labels([0.1, 0.01]), value_labels(["x+y", "x*y"])
    (['0.1', '0.01'], ['x_y-1', 'x_y-2'])
    """
    labels = []
    for value in values:
        text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
        text = f"{value:g}" if isinstance(value, float) else Path(text).name if text.endswith(".npz") else text
        labels.append("".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text))
    if len(set(labels)) == len(labels):
        return labels
    return [f"{label}-{number}" for number, label in enumerate(labels, start=1)]


def _sweep_values(key: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"sweep.{key} = {_shown(value)}: must be a list of values to try")
    values: tuple[Any, ...] = tuple(_plain(f"sweep.{key}", item) for item in value)
    for index, item in enumerate(values):
        if item in values[:index]:
            raise InputError(f"sweep.{key} = {_shown(list(value))}: the value {item!r} occurs twice")
    return values


def _with_values(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with dotted keys replaced."""
    changed = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        (changed[table] if table else changed)[name] = value
    return changed


def _full_file(name: str) -> str:
    return _full_folder(name) if name.endswith(".npz") else name


def _full_folder(name: str) -> str:
    return str(Path(name).expanduser().absolute()) if name else name
