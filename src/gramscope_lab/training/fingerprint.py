"""Fingerprints of data sets, so that a resumed run uses the data it was begun with."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.data.dataset import DataSet

_PARTS = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test")


def fingerprints(sets: Iterable[DataSet]) -> list[dict[str, str]]:
    """The fingerprint of each different data set, in order."""
    different = {id(data): data for data in sets}
    return [fingerprint(data) for data in different.values()]


def fingerprint(data: DataSet) -> dict[str, str]:
    """Type and shape of every part, and a digest of all values."""
    digest = hashlib.sha256()
    found = {"name": data.name}
    for part in _PARTS:
        tensor: Tensor | None = getattr(data, part)
        if tensor is not None:
            found[part] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return {**found, "digest": f"sha256:{digest.hexdigest()}"}


def check_same_data(path: Path, before: Any, now: Sequence[Mapping[str, Any]], *, drawn: bool) -> None:
    """Refuse to go on with other data than a run was begun with.

    Args:
        path: the run.
        before, now: fingerprints; ``before``, from a file, is an empty list for runs of versions that did not record them.
        drawn: the data were generated again on another machine, so that their last bits may differ.
    """
    if not isinstance(before, list) or not all(isinstance(found, dict) for found in before):
        raise InputError(f"the data in {path}/environment.json are not fingerprints; restore it, or delete it")
    if not before or before == list(now):
        return
    pairs = [(old, new) for old, new in zip(before, now, strict=False) if old != new]
    old, new = pairs[0] if pairs else ({}, {})
    if drawn and len(before) == len(now) and all(_without_digest(a) == _without_digest(b) for a, b in pairs):
        warnings.warn(
            f"{path} goes on with data drawn anew, which differ from those it was begun with: {_described(old)} then, "
            f"{_described(new)} now",
            ResultWarning,
            stacklevel=3,
        )
        return
    counts = f"{len(before)} data sets then, {len(now)} now; " if len(before) != len(now) else ""
    raise InputError(
        f"{path} was begun with other data: {counts}{_described(old)} then, {_described(new)} now; restore the data, or "
        "start again with --force"
    )


def _without_digest(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "digest"}


def _described(found: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{part} {found[part]}" for part in ("x_train", "y_train") if part in found)
    return f"{found.get('name')} ({parts}, {str(found.get('digest'))[:15]}…)"
