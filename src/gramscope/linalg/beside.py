"""Work that a CUDA device does beside other work: small kernels while large ones run."""

from __future__ import annotations

from functools import cache
from types import TracebackType

import torch


class Beside:
    """A context whose kernels go to a stream of their own; on devices without streams it changes nothing.

    What is entered waits for what the current stream has been given so far; :meth:`join` lets the current stream wait for it.
    Tensors made inside may be used outside after that, and tensors used inside must live until then. Where both compete for
    the device the work inside goes first.

    Args:
        device: of the tensors.
        lane: works in different lanes do not wait for each other.

    Example:
        >>> import torch
        >>> from gramscope.linalg.beside import Beside
        >>> beside = Beside(torch.device("cpu"))
        >>> with beside:
        ...     small = torch.ones(2).sum()
        >>> large = torch.ones(1000).sum()
        >>> beside.join()
        >>> float(small + large)
        1002.0
    """

    def __init__(self, device: torch.device, lane: int = 0) -> None:
        cuda = device.type == "cuda"
        self._stream = _stream(device, lane, torch.cuda.is_current_stream_capturing()) if cuda else None
        self._entered: torch.cuda.StreamContext | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._entered = torch.cuda.stream(self._stream)
            self._entered.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)
            self._entered = None

    def join(self) -> None:
        """Let the current stream wait for the work given so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@cache
def _stream(device: torch.device, lane: int, recorded: bool) -> torch.cuda.Stream:
    """One for each device and lane: libraries keep handles and memory for every stream they have seen.

    Recordings have streams of their own, so that this memory is theirs, and not given to others when libraries are told to
    return it.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream
