"""The log of a monitor: a function or a TensorBoard writer that gets every record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from gramscope.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class ScalarWriter(Protocol):
    """The part of TensorBoard's ``SummaryWriter`` that every record needs."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""


@runtime_checkable
class PictureWriter(ScalarWriter, Protocol):
    """The part of TensorBoard's ``SummaryWriter`` for histograms and images."""

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> None:
        """Write a distribution."""

    def add_image(self, tag: str, img_tensor: Tensor, global_step: int) -> None:
        """Write an image ``[channels, height, width]`` with values in [0, 1]."""


#: called with ``(step, record)``, or a TensorBoard writer
Log: TypeAlias = Callable[[int, dict[str, Any]], object] | ScalarWriter


def check_log(log: Log | None) -> Log | None:
    """The log, or an error unless it is ``None``, a function or a writer."""
    if log is None or callable(log) or isinstance(log, ScalarWriter):
        return log
    raise InputError(
        f"log={log!r} is a {type(log).__name__}; give a function of (step, record) or a writer with add_scalar, such as "
        "torch.utils.tensorboard.SummaryWriter"
    )


def write_record(log: Log, record: dict[str, Any]) -> None:
    """Hand a record to a function, or to a writer as one scalar ``layer/measure`` or ``network/measure`` each."""
    if not isinstance(log, ScalarWriter):
        log(record["step"], record)
        return
    for layer, row in (*record["layers"].items(), ("network", record["network"])):
        for name, value in row.items():
            if value is not None:
                log.add_scalar(f"{layer}/{name}", value, record["step"])


def write_pictures(
    log: PictureWriter, step: int, spectra: dict[str, Tensor], diagonals: dict[str, dict[str, Tensor]]
) -> None:
    """Histograms ``layer/singular_values`` and images ``layer/diagonal_nfm``, ``layer/diagonal_agop``."""
    for layer, values in spectra.items():
        log.add_histogram(f"{layer}/singular_values", values.cpu(), step)
    for layer, quantities in diagonals.items():
        for name, image in quantities.items():
            log.add_image(f"{layer}/diagonal_{name}", as_picture(image).cpu(), step)


def as_picture(image: Tensor) -> Tensor:
    """An image of 1 or 3 channels with values from 0 to 1; other numbers of channels are summed.

    >>> import torch
    >>> as_picture(torch.tensor([[1.0, 3.0]]))
    tensor([[[0., 1.]]])
    """
    image = image if image.dim() == 3 else image[None]
    if image.shape[0] not in (1, 3):
        image = image.sum(0, keepdim=True)
    low, high = image.amin(), image.amax()
    return (image - low) / (high - low if high > low else 1)
