"""What runs in lanes of a device does not read what is not written yet, nor write what is still read.

Streams and their allocators are simulated: every operation has a time in its lane, every lane knows up to which time of the
others it has waited, and memory that Python has dropped may be given to the next tensor of the lane it was made in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gramscope.linalg import fused, kept_basis, processor, turning

MAIN = -1


@dataclass
class Memory:
    """A tensor's, with the lane it was made in and the times at which operations of lanes have used it."""

    lane: int
    alive: StorageWeakRef
    writes: list[tuple[int, int]] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)


class Device(TorchDispatchMode):
    """Watches operations as if they ran in the current lane, and notes what could go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = MAIN
        self.seen: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # by lane: times of all lanes
        self.memories: dict[int, Memory] = {}
        self.dropped: dict[int, list[Memory]] = defaultdict(list)
        self.hazards: set[str] = set()
        self.operations = 0

    def wait(self, lane: int, other: int) -> None:
        for name, time in self.seen[other].items():
            self.seen[lane][name] = max(self.seen[lane][name], time)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        written = [
            x
            for x, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.operation(str(func), (args, kwargs), results, [] if func.is_view else written, func.is_view)
        return results

    def operation(
        self, name: str, given: Any, results: Any, written: Sequence[Tensor] = (), view: bool = False
    ) -> None:
        for key, memory in list(self.memories.items()):
            if memory.alive.expired():
                self.dropped[memory.lane].append(self.memories.pop(key))
        read, made = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (given, results))
        self.seen[self.lane][self.lane] += not view
        now = self.lane, self.seen[self.lane][self.lane]
        self.operations += 1
        for x in read:
            memory = self._memory(x)
            if not view:
                self._require(memory.writes, f"{name} reads what is not written")
                memory.reads.append(now)
        for x in written:
            self._require(self._memory(x).reads[:-1], f"{name} writes what is read")
            self._memory(x).writes.append(now)
        for x in made:
            if x.untyped_storage()._cdata not in self.memories:
                for memory in self.dropped[self.lane]:
                    self._require(memory.reads + memory.writes, f"{name} is given what is used")
                self._memory(x).writes.append(now)

    def _memory(self, x: Tensor) -> Memory:
        storage = x.untyped_storage()
        return self.memories.setdefault(storage._cdata, Memory(self.lane, StorageWeakRef(storage)))

    def _require(self, uses: Sequence[tuple[int, int]], otherwise: str) -> None:
        if any(self.seen[self.lane][lane] < time for lane, time in uses):
            self.hazards.add(f"{otherwise} in lane {self.lane}")


class Lane:
    """:class:`~gramscope.linalg.beside.Beside` of the simulated device."""

    watched: Device
    forgetful = False

    def __init__(self, device: torch.device, lane: int = 0) -> None:
        self.lane = lane
        self.outside = MAIN

    def __enter__(self) -> None:
        self.watched.wait(self.lane, self.watched.lane)
        self.outside, self.watched.lane = self.watched.lane, self.lane

    def __exit__(self, *error: object) -> None:
        self.watched.lane = self.outside

    def join(self) -> None:
        if not self.forgetful:
            self.watched.wait(self.watched.lane, self.lane)


def seen_as_one(kernels: ModuleType, device: Device) -> SimpleNamespace:
    """The kernels, each an operation."""

    def one(name: str) -> Any:
        def call(*given: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes():
                results = getattr(kernels, name)(*given)
            device.operation(name, given, results)
            return results

        return call

    names = [name for name in vars(kernels) if name in vars(fused) and name.islower()]
    return SimpleNamespace(LARGEST=kernels.LARGEST, **{name: one(name) for name in names})


@pytest.fixture(params=["torch", "kernels"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device, with_kernels = Device(), None
    if request.param == "kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels are not interpreted where there is a GPU")
        from gramscope.linalg import kernels

        with_kernels = seen_as_one(kernels, device)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(processor, "on_host", return_value=False))
        stack.enter_context(mock.patch.object(fused, "_kernels", return_value=with_kernels))
        stack.enter_context(mock.patch.object(Lane, "watched", device, create=True))
        for module in (turning, kept_basis):
            stack.enter_context(mock.patch.object(module, "Beside", Lane))
        yield device


def go(device: Device, generator: torch.Generator) -> None:
    target = torch.randn(40, 48, generator=generator)
    source = target + 1e-3 * torch.randn(40, 48, generator=generator)
    V = kept_basis.new_basis(source)
    with device:
        for _ in range(2):
            found = turning.turned_in_basis({"target": target, "source": source, "vectors": V})
            found["nearest"] + 0, found["figures"] + 0
            del found
            renewed = kept_basis.renewed_basis({"source": source, "vectors": V})
            renewed["vectors"] + 0, renewed["corner"] + 0
            del renewed


def test_lanes_wait_for_each_other(device: Device, generator: torch.Generator) -> None:
    go(device, generator)
    assert device.operations > 100
    assert len(device.seen) == 4
    assert device.hazards == set()


def test_lanes_that_do_not_are_found_out(
    device: Device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "forgetful", True)
    go(device, generator)
    assert any("is given what is used" in hazard for hazard in device.hazards)
    assert any("reads what is not written" in hazard for hazard in device.hazards)
