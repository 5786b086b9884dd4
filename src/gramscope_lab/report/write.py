"""Write a report about run directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gramscope.errors import InputError
from gramscope_lab.report.collapse_panel import collapse_panel
from gramscope_lab.report.layer_panels import layer_panels
from gramscope_lab.report.loaded_runs import Runs, read_runs
from gramscope_lab.report.matplotlib_figures import save_panel
from gramscope_lab.report.overview import OWN_FIGURE, overview
from gramscope_lab.report.page import Content, render_page, require_extra
from gramscope_lab.report.run_files import is_inside
from gramscope_lab.report.snapshot_panels import diagonals_panel, spectra_panel
from gramscope_lab.report.training_panels import training_panels
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import write_file
from gramscope_lab.runs.layout import FIGURES

PAGE = "report.html"


@dataclass(frozen=True)
class Report:
    """The files that were written."""

    page: Path
    figures: tuple[Path, ...]


def write_report(paths: Sequence[Path | str], out: Path | str | None = None, *, figures: bool = True) -> Report:
    """Write one self-contained HTML page about runs, and the same figures as PNG and PDF.

    Args:
        paths: run directories or groups of them; several are compared.
        out: folder to write to; the run's own ``figures`` if there is one run, ``report`` in the working directory if
            there are several. An earlier report there is replaced.
        figures: also write PNG and PDF files.

    Raises:
        MissingExtraError: plotly, jinja2 or matplotlib is not installed.
        InputError: a path holds no run, or the folder cannot be written.
    """
    require_extra()
    if not paths:
        raise InputError("name at least one run directory")
    content = report_content(read_runs(paths))
    folder = _folder(paths, out)
    page = folder / PAGE
    ours = out is None or page.exists()  # in a folder of the user's, figures are ours beside a report alone
    write_file(page, render_page(content).encode("utf-8", "replace"))
    if not figures:
        return Report(page, ())
    for old in folder.glob(f"{OWN_FIGURE}*") if ours else ():
        if old.suffix in (".png", ".pdf"):
            old.unlink()
    return Report(page, tuple(path for panel in content.panels for path in save_panel(panel, folder, OWN_FIGURE)))


def report_content(runs: Runs) -> Content:
    """The content of a report about these runs."""
    panels = [
        *training_panels(runs),
        *layer_panels(runs),
        spectra_panel(runs),
        diagonals_panel(runs),
        collapse_panel(runs),
    ]
    return Content(runs, overview(runs), panels)  # the overview last: it lists what the panels could not read


def _folder(paths: Sequence[Path | str], out: Path | str | None) -> Path:
    if out is None and len(paths) == 1:
        run = RunDirectory.open(paths[0])
        if not is_inside(run.path / FIGURES, run.path):
            raise InputError(f"{run.path / FIGURES} is a link out of the run's directory; remove it or choose --out")
        return run.figure_path(PAGE).parent
    folder = Path("report" if out is None else out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write the report to {folder}: {error}; choose another --out") from error
    return folder
