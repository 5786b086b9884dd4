"""Record a function of tensors as a CUDA graph and replay it: one launch in place of hundreds."""

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
Function: TypeAlias = Callable[[Tensors], dict[str, Tensor]]

#: calls before recording, in which libraries allocate their workspaces
_WARM_UP = 3
#: recordings kept; each holds the memory of one call of the function
_MOST = 32
#: tensors of this many numbers are copied one by one, which uses the whole device for each
_LARGE = 2**18


class Replay:
    """Calls ``function``; on CUDA it records the function once for every form of its inputs and replays it from then on.

    A form is the inputs' names, shapes, strides and dtypes. A replay runs the kernels that a call would run, so results do
    not depend on whether a call was the first one. Where recording is impossible (the function waits for the device, the
    caller is recording itself, there are more than 32 forms) the function is called.

    Args:
        function: from named tensors to named tensors, made of tensor operations only. It must not change its inputs.
            Everything else it reads must be the same tensors and numbers at every call.
        state: returns the tensors that the function changes in place. Warm-up calls change them too; their values are
            restored before the first replay.
    """

    def __init__(self, function: Function, state: Callable[[], Sequence[Tensor]] = tuple) -> None:
        self._function = function
        self._state = state
        self._recordings: dict[Any, _Recording] = {}
        self._possible = True

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        """The function's results; after a replay they are new tensors."""
        device = next(iter(inputs.values())).device
        if device.type != "cuda":
            return self._function(inputs)
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            recording = self._recording(inputs) if self._possible else None
            return self._function(inputs) if recording is None else recording.replay(inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recordings": {}}

    def _recording(self, inputs: Tensors) -> _Recording | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        form = tuple((name, x.shape, x.stride(), x.dtype, x.device) for name, x in inputs.items())
        if form not in self._recordings and len(self._recordings) < _MOST:
            before = [tensor.clone() for tensor in self._state()]
            try:
                self._recordings[form] = _Recording(self._function, inputs)
            except RuntimeError as error:
                self._possible = False
                reason = str(_first(error)).splitlines()[0]
                warnings.warn(f"no CUDA graph ({reason}): kernels are launched one by one", RescueWarning, stacklevel=4)
            _copy(zip(self._state(), before, strict=True))
        return self._recordings.get(form)


def _first(error: BaseException) -> BaseException:
    """The error that made recording fail; ending the failed recording may have raised another."""
    return error if error.__context__ is None else _first(error.__context__)


class _Recording:
    """One CUDA graph with the memory of its inputs and outputs."""

    def __init__(self, function: Function, inputs: Tensors) -> None:
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                function(self._inputs)
        current.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = function(self._inputs)

    def replay(self, inputs: Tensors) -> dict[str, Tensor]:
        """Run the graph on these inputs and copy its results."""
        _copy((self._inputs[name], x) for name, x in inputs.items())
        self._graph.replay()
        results = {name: torch.empty_like(x) for name, x in self._outputs.items()}
        _copy((results[name], x) for name, x in self._outputs.items())
        return results


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first: the small ones in one launch, the large ones one by one."""
    small: list[tuple[Tensor, Tensor]] = []
    for to, x in pairs:
        if x.numel() < _LARGE:
            small.append((to, x))
        else:
            to.copy_(x)
    if small:
        torch._foreach_copy_([to for to, _ in small], [x for _, x in small])
