"""What an experiment is made of: options, parts, claims and a figure. docs/reproduce.md has an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from torch import Tensor

from gramscope.errors import InputError
from gramscope_lab.experiments.parts import Part
from gramscope_lab.experiments.plots import Figure
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.records import Record
from gramscope_lab.training.config import TrainConfig

Scale: TypeAlias = Literal["quick", "paper"]
Selection: TypeAlias = Literal["validation", "test"]
S = TypeVar("S")


@dataclass(frozen=True)
class Options:
    """Options of a run besides its settings.

    Args:
        scale: ``quick`` or ``paper``.
        select: where hyper-parameters are chosen: on a ``validation`` split, or on the ``test`` set as the papers did.
        data_dir: folder of downloaded data sets; the default folder when empty.
        device: as in a training configuration.
    """

    scale: Scale = "quick"
    select: Selection = "validation"
    data_dir: str = ""
    device: str = "auto"


def training_config(settings: Any, options: Options, **tables: Any) -> TrainConfig:
    """A training with the seeds, epochs and batch size of the settings, on the device of the options.

    ``tables`` are the other entries of the configuration (``data``, ``model``, ``method``, …), and replace those.
    """
    usual = {key: getattr(settings, key) for key in ("seeds", "epochs", "batch_size") if key not in tables}
    return TrainConfig.from_dict({**usual, "device": options.device, **tables})


@dataclass(frozen=True)
class Claim:
    """One row of the claims table.

    Args:
        claim: what is claimed.
        published: what the paper reports, as text.
        measured: what the records say, as text.
        holds: whether it holds; ``None`` when this scale or data cannot decide it.
        reason: why it does not hold or cannot be decided, or settings that the reader should know.
    """

    claim: str
    published: str
    measured: str
    holds: bool | None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.holds is None and not self.reason:
            raise InputError(f"claim {self.claim!r} is undecided without a reason; give reason=")
        if self.holds is not None:
            object.__setattr__(self, "holds", bool(self.holds))  # also from a tensor or NumPy comparison

    def to_record(self) -> Record:
        """The claim as a record of kind ``claim``."""
        return {"kind": "claim", **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Results(Generic[S]):
    """What figures and claims read: settings, options and everything stored on disk."""

    name: str
    settings: S
    options: Options
    directory: RunDirectory

    @cached_property
    def _all(self) -> list[Record]:
        return self.directory.records()

    def records(self, kind: str | None = None, *, part: str | None = None, **match: Any) -> list[Record]:
        """Records of a kind, of a part, and with given values: ``records("evaluation", part="sgd", epoch=2.0)``."""
        return [
            record
            for record in self._all
            if (kind is None or record["kind"] == kind)
            and (part is None or record["run"].split("/")[0] == part)
            and all(record.get(key) == value for key, value in match.items())
        ]

    def artefact(self, part: str, name: str) -> dict[str, Tensor]:
        """Matrices a part stored."""
        return self.directory.member(part).load_artefact(name)


@dataclass(frozen=True)
class Experiment(Generic[S]):
    """A published result.

    Args:
        quick, paper: the settings of the two scales.
        parts: what is run.
        claims: functions over the results, in the order of the table.
        figure: draws the paper's panels.
        chooses: whether hyper-parameters are chosen, so that ``options.select`` matters.
        classes: whether the data sets of ``--data`` must have classes.
    """

    quick: S
    paper: S
    parts: Callable[[S, Options], Sequence[Part]]
    claims: tuple[Callable[[Results[S]], Claim | Iterable[Claim]], ...]
    figure: Callable[[Results[S]], Figure]
    chooses: bool = False
    classes: bool = False

    def judge(self, results: Results[S]) -> list[Claim]:
        """All rows of the claims table."""
        rows: list[Claim] = []
        for claim in self.claims:
            found = claim(results)
            rows += [found] if isinstance(found, Claim) else list(found)
        return rows
