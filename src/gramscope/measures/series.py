"""Tables over the steps of a training run, in one object and in files."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gramscope.errors import InputError, ResultWarning, no_such
from gramscope.measures.table import Table, format_value
from gramscope.measures.table_files import read_tables, write_tables, write_whole

#: the name of the file with the settings of a stored series
_SETTINGS = "series.json"
#: measures whose last values are printed
MOST_MEASURES = 6


@dataclass(frozen=True)
class Series:
    """Tables over the steps of a training run.

    Args:
        tables: by step, in increasing order.
        skipped: steps whose checkpoint could not be measured, and why.
        equal: steps whose weights are exactly those of an earlier step, and that step.

    >>> series = Series({0: Table({"fc": {"nfa": 0.25}}, {"loss": 2.0}), 8: Table({"fc": {"nfa": 0.5}}, {"loss": 1.0})})
    >>> series["nfa"], series.network("loss")
    ({'fc': {0: 0.25, 8: 0.5}}, {0: 2.0, 8: 1.0})
    """

    tables: Mapping[int, Table] = field(default_factory=dict)
    skipped: Mapping[int, str] = field(default_factory=dict)
    equal: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> Series:
        """The series of a monitor's records ``{step, layers, network, notes}``; of one step the last."""
        return cls({record["step"]: Table.from_dict(record) for record in records})

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def steps(self) -> list[int]:
        """The steps that were measured."""
        return list(self.tables)

    @property
    def columns(self) -> list[str]:
        """Names of the measures of layers."""
        return list(dict.fromkeys(name for table in self.tables.values() for name in table.columns))

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return list(dict.fromkeys(name for table in self.tables.values() for name in table.rows))

    def __getitem__(self, column: str) -> dict[str, dict[int, float | None]]:
        """One measure, ``{layer: {step: value}}``."""
        if column not in self.columns:
            raise InputError(no_such("measure", column, self.columns))
        return {
            layer: {step: table.rows[layer].get(column) for step, table in self.tables.items() if layer in table.rows}
            for layer in self.layers
        }

    def network(self, name: str = "loss") -> dict[int, float | None]:
        """A number of the whole network (loss, accuracy) over the steps."""
        return {step: table.network.get(name) for step, table in self.tables.items()}

    def save(self, path: str | Path) -> None:
        """Write all tables to one file, ``.json`` or ``.parquet`` (one row for each step, layer and measure)."""
        write_tables(path, self.tables, skipped=dict(self.skipped), equal=dict(self.equal))

    @classmethod
    def load(cls, path: str | Path) -> Series:
        """The series of a file that :meth:`save` wrote, or of the folder that ``gs.series(out=…)`` stored."""
        if Path(path).is_dir():
            return ordered(*SeriesStore(Path(path)).read_all())
        tables, rest = read_tables(path)
        return cls(tables, *({int(s): x for s, x in rest.get(name, {}).items()} for name in ("skipped", "equal")))

    def plot(self, column: str, backend: Literal["matplotlib", "plotly"] = "matplotlib") -> Any:
        """A figure of one measure over steps (across) and layers (down), with the loss below where it was measured."""
        from gramscope.measures.plots import plot_series

        return plot_series(self, column, backend)

    def report(self, path: str | Path, title: str = "Feature learning over training") -> None:
        """Write a page that needs no network: every measure over steps and layers, chosen from a menu."""
        from gramscope.measures.plots import write_report

        write_report(self, path, title)

    def curves(self) -> dict[str, dict[str, dict[int, float]]]:
        """``{measure: {layer: {step: value}}}`` of the values that are there; those of the network come first."""
        found: dict[str, dict[str, dict[int, float]]] = {}
        for step, table in self.tables.items():
            for layer, row in {"network": table.network, **table.rows}.items():
                for name, value in row.items():
                    if value is not None and math.isfinite(value):
                        found.setdefault(name, {}).setdefault(layer, {})[step] = value
        return found

    def __str__(self) -> str:
        steps, layers = self.steps, self.layers
        counts = [(len(steps), "table"), (len(layers), "layer"), (len(self.columns), "measure")]
        words = ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counts)
        lines = [words + (f", steps {steps[0]} to {steps[-1]}" if steps else "")]
        last = next((table for table in reversed(list(self.tables.values())) if table.rows), Table({}))
        for name in last.columns[:MOST_MEASURES]:
            ends = [(layer, last.rows.get(layer, {}).get(name)) for layer in dict.fromkeys((layers[0], layers[-1]))]
            values = " … ".join(f"{format_value(value)} ({layer})" for layer, value in ends)
            lines.append(f"  {name}: {values} at the last step")
        lines += [f"skipped step {step}: {reason}" for step, reason in self.skipped.items()]
        lines += [f"step {step} has exactly the weights of step {other}" for step, other in self.equal.items()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Curves of the measures that change, and the last table, in a notebook."""
        from gramscope.measures.plots import small_curves

        if not self.tables:
            return "<p>no tables yet</p>"
        last = self.steps[-1]
        return f"<div>{small_curves(self.curves())}<p>step {last}</p>{self.tables[last]._repr_html_()}</div>"


def ordered(tables: dict[int, Table], skipped: dict[int, str], digests: dict[int, str]) -> Series:
    """The series in the order of steps, with the steps whose weights came before."""
    first: dict[str, int] = {}
    equal = {}
    for step in sorted(tables):
        if first.setdefault(digests[step], step) != step:
            equal[step] = first[digests[step]]
    for step, other in equal.items():
        warnings.warn(f"step {step} has exactly the weights of step {other}", ResultWarning, stacklevel=3)
    return Series({step: tables[step] for step in sorted(tables)}, dict(sorted(skipped.items())), equal)


class SeriesStore:
    """A folder with one file for each measured step, written as soon as its table is there."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        if settings is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        asked = {name: getattr(value, "__qualname__", repr(value)) for name, value in sorted(settings.items())}
        path = folder / _SETTINGS
        if not path.exists():
            write_whole(path, json.dumps(asked).encode())
        stored = json.loads(path.read_bytes())
        if stored != asked:
            raise InputError(f"{folder} holds a series with {stored}, not {asked}; give another folder as out=")

    def write(self, step: int, table: Table, digest: str) -> None:
        """Store the table of a step."""
        write_tables(self.folder / f"step-{step:09d}.json", {step: table}, digest=digest)

    def read_all(self) -> tuple[dict[int, Table], dict[int, str], dict[int, str]]:
        """Tables, nothing skipped (such steps are tried again), and digests."""
        tables: dict[int, Table] = {}
        digests: dict[int, str] = {}
        for path in sorted(self.folder.glob("step-*.json")):
            try:
                found, rest = read_tables(path)
                tables |= found
                digests |= dict.fromkeys(found, rest["digest"])
            except (InputError, KeyError) as error:
                raise InputError(f"{path} is damaged ({error}); delete it to measure the step again") from error
        return tables, {}, digests
