"""What a loader is asked for besides its own options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gramscope_lab.data.download import ensure
from gramscope_lab.data.sources import Source

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadRequest:
    """The data directory, whether missing files may be downloaded, and the seed of random draws."""

    root: Path
    download: bool = True
    seed: int = 0

    def generator(self) -> torch.Generator:
        """A new generator with the seed."""
        import torch

        return torch.Generator().manual_seed(self.seed)

    def files(self, source: Source) -> dict[str, Path]:
        """The files of a downloaded set by part; they are fetched first where they are missing."""
        return ensure(source, self.root, download=self.download).paths
