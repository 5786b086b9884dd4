"""What every loader is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """Where data lies, whether it may be downloaded, and the seed of whatever is drawn at random."""

    root: Path
    download: bool = True
    seed: int = 0

    def generator(self) -> torch.Generator:
        """A new generator with the seed."""
        import torch

        return torch.Generator().manual_seed(self.seed)
