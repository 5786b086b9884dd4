"""Where the members of a sweep train: in this process or its children, or on a Ray cluster."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from gramscope.errors import InputError
from gramscope_lab.training.members import Workers

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Placement:
    """Where the members of a sweep train. The results are the same bit for bit.

    Args:
        engine: ``local``: this machine; ``ray``: a Ray cluster, whose nodes need gramscope and see the run directory.
        address: of the Ray cluster, as ``ray.init`` takes it; empty for ``RAY_ADDRESS``, or else one of this machine alone.
        gpus: share of a GPU for each member: 0.25 lets four share one.
    """

    engine: str = "local"
    address: str = ""
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InputError(f"--engine {self.engine}: use {' or '.join(ENGINES)}")
        if self.address and self.engine != "ray":
            raise InputError(f"--address {self.address}: only a Ray cluster has one; add --engine ray")
        share = self.gpus
        if share is not None and (not 0 < share < math.inf or (share > 1 and share != int(share))):
            raise InputError(f"--gpus {share:g}: give a share between 0 and 1, or whole GPUs")

    def execution(self, asked: str, members: int, *, portable: bool) -> tuple[str, str]:
        """How the members run where ``asked`` says it for this process, and a note where they cannot run elsewhere."""
        if self.engine == "local":
            return asked, ""
        if members == 1:
            return asked, "one run, which trains in this process and not on the Ray cluster"
        if not portable:
            return asked, "runs with parts given as Python objects train in this process and not on the Ray cluster"
        if asked in ("vectorised", "one-by-one"):
            raise InputError(
                f"--engine ray: execution = {asked!r} keeps all runs in one process; use auto, or --engine local"
            )
        return "processes", ""

    def workers(self, members: int) -> Workers:
        """Workers for so many members."""
        if self.engine == "ray":
            from gramscope_lab.training.ray_cluster import RayCluster

            return RayCluster(self.address, self.gpus)
        from gramscope_lab.training.processes import LocalProcesses

        return LocalProcesses(members, self.gpus, self._visible() if self.gpus else ())

    def _visible(self) -> list[str]:
        """Names of this machine's GPUs that this process may use."""
        import torch

        named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        found = named or [str(index) for index in range(torch.cuda.device_count())]
        if not found or not torch.cuda.is_available() or (self.gpus or 0) > len(found):
            raise InputError(f"--gpus {self.gpus:g}: this machine has {torch.cuda.device_count()} GPUs to use")
        return found
