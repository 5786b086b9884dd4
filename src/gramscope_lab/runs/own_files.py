"""Artefacts and figures of a run, and the list of those that gramscope wrote: only they may be removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gramscope_lab.runs import files
from gramscope_lab.runs.files import inside, is_file, names_in
from gramscope_lab.runs.layout import ARTEFACTS, FIGURES, FILES, can_name, file_name

#: names that only gramscope gives, in each folder
_OWN = {
    ARTEFACTS: re.compile(r"(spectra|diagonals)-.*\d\.safetensors"),
    FIGURES: re.compile(r"report\.html|panel-.*\.(png|pdf)"),
}


class OwnFiles:
    """What lies in ``artefacts/`` and ``figures/`` of the run directory ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def present(self, folder: str, ending: str = "") -> list[Path]:
        """Regular files in one of the folders; none where a link is in its place."""
        place = self._path / folder
        return [place / name for name in names_in(place) if name.endswith(ending) and is_file(place / name)]

    def add(self, folder: str, name: str) -> Path:
        """Where to write a file: it is listed as ours, and its folder made."""
        path = inside(self._path, f"{folder}/{file_name(name)}")
        with files.explained(str(path)):
            files.make_folder(path.parent)
            listed = self._listed()
            if f"{folder}/{name}" not in listed:
                lines = "".join(f"{line}\n" for line in (*listed, f"{folder}/{name}"))
                files.write_file(inside(self._path, FILES), lines.encode())
        return path

    def written(self) -> Iterator[Path]:
        """Files that gramscope wrote, also before it kept a list of them."""
        for name in self._listed():
            yield inside(self._path, name)
        for folder, pattern in _OWN.items():
            yield from (path for path in self.present(folder) if pattern.fullmatch(path.name))

    def _listed(self) -> list[str]:
        """Names in the list; one that leads anywhere but to artefacts and figures is ignored."""
        path = inside(self._path, FILES)
        lines = files.read_file(path).decode(errors="replace").splitlines() if files.exists(path) else []
        parts = (line.partition("/") for line in lines)
        return [f"{folder}/{name}" for folder, _, name in parts if folder in _OWN and can_name(name)]
