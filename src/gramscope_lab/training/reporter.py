"""How training reports its progress. The library itself prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Reporter:
    """Receives notes and progress from training. This one ignores them; the command line prints them."""

    def note(self, text: str) -> None:
        """Something worth saying once: how members are run, which parameters an optimizer leaves to another."""

    def start(self, label: str, total: int, unit: str = "step") -> None:
        """Work of ``total`` units begins."""

    def advance(self, done: int) -> None:
        """``done`` units are complete."""

    def records(self, records: Sequence[dict[str, Any]], label: str = "") -> None:
        """New evaluation records, one a member; ``label`` names them where they are not of the work begun last."""

    def member(self, name: str, done: float, total: float) -> None:
        """A member that trains elsewhere has done ``done`` of its ``total`` epochs."""

    def member_ended(self, name: str) -> None:
        """A member that trained elsewhere has ended."""

    def stop_asked(self) -> bool:
        """Whether training is to save and stop, where no signal can say so."""
        return False

    def finish(self) -> None:
        """The work begun last is over."""
