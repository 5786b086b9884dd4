"""Replaying a training step as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gramscope.errors import RescueWarning

Result = TypeVar("Result")

#: runs before capture, so that libraries allocate what they keep
_WARM_UP = 3


class GraphedSteps(Generic[Result]):
    """Captures ``step(index)`` once per batch size and replays it afterwards.

    What the step returned while it was captured is returned after each replay: tensors whose content is then new.

    Args:
        step: a step made of tensor operations only, changing its state in place.
        state: the tensors it changes; warming up must leave them as they were.
    """

    def __init__(self, step: Callable[[Tensor], Result], state: Callable[[], Sequence[Tensor]]) -> None:
        self._step = step
        self._state = state
        self._broken = False
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Result]] = {}

    def run(self, index: Tensor) -> Result:
        """One step for the batch ``index``."""
        with torch.cuda.device(index.device):
            return self._run(index)

    def _run(self, index: Tensor) -> Result:
        if self._broken:
            return self._step(index)
        if index.shape not in self._graphs:
            kept = [tensor.clone() for tensor in self._state()]
            try:
                self._graphs[index.shape] = self._capture(index)
            except RuntimeError as error:
                self._broken = True
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"no CUDA graph ({reason}): steps are launched one kernel at a time", RescueWarning, stacklevel=2
                )
            for tensor, before in zip(self._state(), kept, strict=True):
                tensor.copy_(before)
            return self._run(index)
        graph, place, result = self._graphs[index.shape]
        place.copy_(index)
        graph.replay()
        return result

    def _capture(self, index: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Result]:
        place = index.clone()
        aside = torch.cuda.Stream(index.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(index.device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._step(place)
        torch.cuda.current_stream(index.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._step(place)
        return graph, place, result
