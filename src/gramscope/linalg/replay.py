"""Replaying a function of tensors as a CUDA graph: one launch in place of hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gramscope.errors import RescueWarning

#: tensors by name
Tensors: TypeAlias = Mapping[str, Tensor]

#: runs before recording, so that libraries allocate what they keep
_WARM_UP = 2
#: recordings kept; each holds the memory of one run of the function
_MOST = 32
#: tensors of so many numbers are copied one by one
_LARGE = 2**18


class Replay:
    """Calls ``function``; on CUDA it is recorded once for every form of its inputs and replayed from then on.

    Small matrices keep a GPU waiting for the next launch. A recording starts all kernels of the function at once, and they
    are the same kernels: results do not depend on whether a call was the first one. Where recording is not possible (an
    operation that waits for the device, a caller that is recording itself, more than 32 forms of inputs) the function
    is called.

    Args:
        function: from named tensors to named tensors, made of tensor operations only. It must not change its inputs, and
            anything else it reads must stay the same from call to call.
        lasting: names of inputs that are not changed in place, so that a tensor given again need not be copied again.
        lent: results are used before the next call, which may overwrite them.
    """

    def __init__(
        self, function: Callable[[Tensors], dict[str, Tensor]], lasting: Sequence[str] = (), lent: bool = False
    ) -> None:
        self._function = function
        self._lasting = tuple(lasting)
        self._lent = lent
        self._recordings: dict[Any, _Recording] = {}
        self._possible = True

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        """The function's results, as new tensors unless they are lent."""
        device = next(iter(inputs.values())).device
        if device.type != "cuda":
            return self._function(inputs)
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            recording = self._recording(inputs) if self._possible else None
            if recording is None:
                return self._function(inputs)
            recording.play(inputs)
            return dict(recording.outputs) if self._lent else recording.copies()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recordings": {}}

    def _recording(self, inputs: Tensors) -> _Recording | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        form = tuple((name, x.shape, x.stride(), x.dtype, x.device) for name, x in inputs.items())
        if form not in self._recordings and len(self._recordings) < _MOST:
            try:
                self._recordings[form] = _Recording(self._function, inputs, self._lasting)
            except RuntimeError as error:
                self._possible = False
                reason = str(_first(error)).splitlines()[0]
                warnings.warn(f"no CUDA graph ({reason}): kernels are launched one by one", RescueWarning, stacklevel=4)
        return self._recordings.get(form)


def _first(error: BaseException) -> BaseException:
    """The error that made recording fail, which the end of the recording may have followed with another."""
    return error if error.__context__ is None else _first(error.__context__)


class _Recording:
    """One CUDA graph with the memory its inputs and outputs lie in."""

    def __init__(
        self, function: Callable[[Tensors], dict[str, Tensor]], inputs: Tensors, lasting: Sequence[str]
    ) -> None:
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        self._lasting: dict[str, Tensor | None] = dict.fromkeys(lasting)
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                function(self._inputs)
        current.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs = function(self._inputs)

    def play(self, inputs: Tensors) -> None:
        """Run the graph on these inputs."""
        _copy((self._inputs[name], x) for name, x in inputs.items() if self._lasting.get(name) is not x)
        for name in self._lasting:
            self._lasting[name] = inputs[name]
        self._graph.replay()

    def copies(self) -> dict[str, Tensor]:
        """The results, to keep."""
        results = {name: torch.empty_like(x) for name, x in self.outputs.items()}
        _copy((results[name], x) for name, x in self.outputs.items())
        return results


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Into the first from the second: the small ones at once, the large ones with all of the device."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for to, x in pairs:
        if x.numel() < _LARGE:
            small[0].append(to)
            small[1].append(x)
        else:
            to.copy_(x)
    if small[0]:
        torch._foreach_copy_(*small)
