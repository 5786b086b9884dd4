"""Curves over records, numbers as text, and figures in one style, readable for colour-blind people and in print.

Figures are made as objects, without pyplot, so nothing global is changed and no window is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gramscope.errors import MissingExtraError
from gramscope_lab.palette import PALETTE as PALETTE
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import write_file
from gramscope_lab.runs.records import Record
from gramscope_lab.spread import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # experiments name it in annotations; matplotlib itself is imported only to draw

#: line styles, so that lines differ in black and white too
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.handlelength": 2.6,
    "pdf.fonttype": 42,
    "savefig.bbox": "tight",
}
DPI = 160


def require_matplotlib() -> None:
    """Raise an error that says how to install matplotlib if it is missing."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise MissingExtraError('figures need matplotlib; install it with: pip install "gramscope[lab]"') from error


@contextmanager
def figure_style() -> Iterator[None]:
    """Use the style of all figures while they are drawn and saved; restore matplotlib's settings afterwards."""
    require_matplotlib()
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def panels(rows: int, columns: int, *, width: float = 2.3, height: float = 1.9, **options: Any) -> tuple[Figure, Any]:
    """A figure of equal panels and its axes as an array ``[rows, columns]``; ``options`` go to ``Figure.subplots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save_figure(figure: Figure, directory: RunDirectory, name: str) -> tuple[Path, ...]:
    """Write a figure as PNG and PDF."""
    paths = tuple(directory.figure_path(f"{name}.{ending}") for ending in ("png", "pdf"))
    for path in paths:
        content = BytesIO()
        figure.savefig(content, dpi=DPI, format=path.suffix[1:])
        write_file(path, content.getvalue())
    return paths


# -- lines --------------------------------------------------------------------------------------------------------
class Line(NamedTuple):
    """A value over training: where it was recorded, and its mean and standard deviation there."""

    x: list[float]
    means: list[float]
    deviations: list[float]

    @property
    def final(self) -> float:
        """The last mean."""
        return self.means[-1]

    @property
    def best(self) -> tuple[float, float]:
        """The highest mean, and where it is first reached."""
        top = max(self.means)
        return top, self.reaches(top)

    def at(self, x: float) -> float:
        """The mean at the first place from ``x`` on, or at the last one recorded."""
        return next((value for place, value in zip(self.x, self.means, strict=True) if place >= x), self.final)

    def reaches(self, level: float) -> float:
        """The first place with at least this mean; infinite if there is none."""
        return next((place for place, value in zip(self.x, self.means, strict=True) if value >= level), math.inf)


def curve(records: Iterable[Record], x: str, y: str) -> Line:
    """Mean and standard deviation of ``y`` over the records with equal ``x``.

    Records where ``y`` is missing or was not finite are left out; one record has deviation 0.
    """
    groups: dict[float, list[float]] = {}
    for record in records:
        if record.get(y) is not None:
            groups.setdefault(record[x], []).append(record[y])
    known = {key: value for key in sorted(groups) if (value := spread(groups[key])) is not None}
    return Line(list(known), [value.mean for value in known.values()], [value.deviation for value in known.values()])


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN without values."""
    found = spread(values)
    return math.nan if found is None else found.mean


def listed(form: str, *columns: Iterable[Any]) -> str:
    """A text for each row of the columns, with commas between.

    >>> listed("β {:g}: {:.2f}", [0.1, 1.0], [0.5, 0.25])
    'β 0.1: 0.50, β 1: 0.25'
    """
    return ", ".join(form.format(*row) for row in zip(*columns, strict=True))


def percent(accuracy: float) -> str:
    """``46.2 %``."""
    return f"{100 * accuracy:.1f} %"


def epoch_text(epoch: float, before: str = "epoch ") -> str:
    """``epoch 3``; ``never`` for an infinite one."""
    return "never" if math.isinf(epoch) else f"{before}{epoch:g}"


def band(
    axes: Axes,
    records: Iterable[Record],
    x: str,
    y: str,
    *,
    index: int = 0,
    label: str | None = None,
    deviations: float = 2.0,
    **options: Any,
) -> None:
    """Draw the mean of ``y`` over equal ``x`` with a band of ± ``deviations`` σ, in colour number ``index``."""
    xs, means, spreads = curve(records, x, y)
    colour = options.pop("color", PALETTE[index % len(PALETTE)])
    axes.plot(xs, means, label=label, color=colour, **{"linestyle": DASHES[index % len(DASHES)], **options})
    if deviations and any(spreads):
        low = [m - deviations * s for m, s in zip(means, spreads, strict=True)]
        high = [m + deviations * s for m, s in zip(means, spreads, strict=True)]
        axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)


def legend_below(figure: Figure, axes: Axes, title: str | None = None, *, columns: int = 6) -> None:
    """One legend for the whole figure, under it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns), title=title)


# -- matrices -----------------------------------------------------------------------------------------------------
def picture(values: Tensor) -> Tensor:
    """A diagonal ``[channels, height, width]`` or ``[height, width]`` as an image in [0, 1], channels last.

    >>> picture(torch.tensor([[[2.0, 4.0]]]))
    tensor([[0., 1.]])
    """
    image = (values - values.min()) / (values.max() - values.min())
    return image.movedim(0, -1).squeeze(-1) if image.dim() == 3 else image


def matrix(axes: Axes, values: Tensor, title: str, *, symmetric: bool = False, **options: Any) -> Any:
    """Show a matrix or image in its own range, ``symmetric`` around 0 with two colours; returns the image."""
    values = values.detach().to("cpu", torch.float64)
    limits: dict[str, Any] = {"cmap": "cividis"}
    if symmetric:
        limit = float(values.abs().max())
        limits = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    image = axes.imshow(values.numpy(), interpolation="nearest", **{**limits, **options})
    axes.set_title(title)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(True)
    return image
