"""The parts of a training configuration, one class a table of the TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from gramscope.errors import InputError
from gramscope_lab.training import options
from gramscope_lab.training.options import Option


def check_plain(key: str, value: Any, depth: int = 0) -> None:
    """Raise unless a value is made of tables, lists, text, numbers that fit 64 bits, and yes or no."""
    if depth > 8:
        raise InputError(f"{key} is nested too deeply")
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_plain(f"{key}.{name}" if key else str(name), item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_plain(key, item, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{key} is a whole number of {value.bit_length()} bits; at most 63 are possible")
    elif not isinstance(value, str | int | float | None):
        raise InputError(f"{key} = {value!r}: must be a number, text, true, false or a list of them")


def as_tuple(value: Any) -> Any:
    """Lists at any depth as tuples."""
    return tuple(as_tuple(item) for item in value) if isinstance(value, list | tuple) else value


def as_list(value: Any) -> Any:
    """Tuples at any depth as lists."""
    return [as_list(item) for item in value] if isinstance(value, list | tuple) else value


def setting(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with the :class:`Option` that checks it."""
    return field(default=default, metadata={"option": Option(default, text, **limits)})


class Table:
    """A part of the configuration: checks its fields, and converts from and to plain values."""

    _where = ""

    def _check(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            option = item.metadata.get("option")
            if option is not None:
                value = option.check(f"{self._where}{item.name}", getattr(self, item.name))
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
        """The table as plain values."""
        return {item.name: as_list(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Named(Table):
    """A table with a name and any other options, which the named data set, net or method checks."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"{self._where}name = {self.name!r}: must be a name")
        object.__setattr__(self, "options", {key: as_tuple(value) for key, value in self.options.items()})
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
        return {**own, **{key: as_list(value) for key, value in self.options.items() if value is not None}}


@dataclass(frozen=True)
class DataTable(Named):
    """Which data set; options go to :func:`gramscope_lab.data.load`."""

    _where = "data."
    dir: str = setting("", "folder of downloaded sets; empty for GRAMSCOPE_DATA, or the user's cache")
    seed: int = setting(0, "seed of generated data, noise and the validation split", least=0)
    validation: float = setting(0.0, "fraction of the training set held out for validation", least=0.0, below=1.0)
    samples: int = setting(0, "training samples to use (0: all)", least=0)
    test_samples: int = setting(0, "test samples to use (0: all)", least=0)
    label_noise: float = setting(0.0, "fraction of training labels drawn at random", least=0.0)


@dataclass(frozen=True)
class ModelTable(Named):
    """Which net: a name known to :func:`gramscope_lab.nets.build`, or ``package.module:factory`` of your own."""

    _where = "model."


@dataclass(frozen=True)
class MethodTable(Named):
    """Which optimizer; see :data:`gramscope_lab.training.options.METHODS`."""

    _where = "method."

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "options", options.method_options(self.name, self.options))


@dataclass(frozen=True)
class ScheduleTable(Table):
    """How the step size changes: a linear warm-up, then the named schedule."""

    _where = "schedule."
    name: str = setting("constant", "shape after the warm-up", choices=options.SCHEDULES)
    warm_up: float = setting(0.0, "epochs of linear warm-up", least=0.0)
    final: float = setting(0.0, "last factor of linear and cosine", least=0.0)
    every: float = setting(10.0, "epochs between the drops of step", above=0.0)
    factor: float = setting(0.1, "factor of each drop of step", least=0.0)

    def __post_init__(self) -> None:
        self._check()


@dataclass(frozen=True)
class MeasureTable(Table):
    """Measuring every layer while training."""

    _where = "measure."
    every: float = setting(0.0, "epochs between measurements (0: none; the start and the end are included)", least=0.0)
    samples: int = setting(1000, "training samples measured on", least=1)
    batch_size: int = setting(500, "samples a batch while measuring", least=1)
    layers: str = setting("", "glob of the layers; empty for all")
    matrices: bool = setting(False, "keep spectra and diagonals of every layer too, for the report")
    names: tuple[str, ...] = ()  #: which measures; empty for the usual ones

    def __post_init__(self) -> None:
        self._check()
        names: Any = self.names
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise InputError(f"measure.names = {names!r}: must be a list of names, such as ['nfa', 'target_linearity']")
        object.__setattr__(self, "names", tuple(names))


#: name of each part in the configuration
TABLES: dict[str, type[Table]] = {
    "data": DataTable,
    "model": ModelTable,
    "method": MethodTable,
    "schedule": ScheduleTable,
    "measure": MeasureTable,
}
