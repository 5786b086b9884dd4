"""A data set as four tensors: what every loader returns and everything else takes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.data.synthetic import randomise_labels

#: label of tokens that have none
IGNORED = -100

Task: TypeAlias = Literal["classification", "regression"]


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose: ``derive_seed(0, "order", 7)``."""
    text = "\0".join(map(str, ("gramscope", seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose: draws for different purposes are independent, also with the same seed and size."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *purpose))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test tensors with what a model needs to know about them.

    Args:
        name: name in the catalogue, or of the file.
        x_train, x_test: inputs, ``[n, d]`` vectors, ``[n, c, h, w]`` images or ``[n, t]`` integer tokens.
        y_train, y_test: ``[n]`` int64 labels, ``[n, t]`` labels of tokens (−100 for those without), or ``[n, outputs]``
            float targets.
        classes: number of classes; ``None`` means regression.
        description, citation: one line each, for people.
        x_val, y_val: the validation part, after :meth:`split_validation`.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int | None = None
    description: str = ""
    citation: str = ""
    x_val: Tensor | None = None
    y_val: Tensor | None = None

    def __post_init__(self) -> None:
        splits = {"train": (self.x_train, self.y_train), "test": (self.x_test, self.y_test)}
        if self.x_val is not None and self.y_val is not None:
            splits["val"] = (self.x_val, self.y_val)
        for split, (x, y) in splits.items():
            if x.dim() < 2 or len(x) != len(y):
                raise InputError(
                    f"{self.name}: x_{split} {tuple(x.shape)} and y_{split} {tuple(y.shape)} do not pair up; "
                    "inputs are [n, ...] and targets have the same n"
                )
            if not x.numel():
                raise InputError(f"{self.name}: x_{split} {tuple(x.shape)} is empty; give it at least one sample")
            if x.shape[1:] != self.x_train.shape[1:] or y.shape[1:] != self.y_train.shape[1:]:
                raise InputError(
                    f"{self.name}: one sample of {split} has shapes {tuple(x.shape[1:])}, {tuple(y.shape[1:])}, "
                    f"one of train {tuple(self.x_train.shape[1:])}, {tuple(self.y_train.shape[1:])}"
                )
            self._check_finite(f"x_{split}", x)
            self._check_targets(f"y_{split}", y)

    def _check_finite(self, name: str, values: Tensor) -> None:
        if values.is_floating_point():
            low, high = torch.aminmax(values)  # both carry NaN on, and no mask of the data's size is made
            if not bool(torch.isfinite(high - low)):
                raise InputError(f"{self.name}: {name} contains NaN or infinity; clean the data first")

    def _check_targets(self, name: str, y: Tensor) -> None:
        if self.classes is None:
            if y.dim() != 2 or not y.is_floating_point():
                raise InputError(
                    f"{self.name}: {name} is {y.dtype} {tuple(y.shape)}; regression targets are floats [n, outputs]"
                )
            self._check_finite(name, y)
            return
        of_tokens = y.dim() == 2 and y.shape[1] == self.x_train.shape[1]
        if not (y.dim() == 1 or of_tokens) or y.dtype != torch.int64:
            raise InputError(
                f"{self.name}: {name} is {y.dtype} {tuple(y.shape)}; labels are int64 [n], those of tokens [n, t] for "
                "inputs [n, t, …]"
            )
        y = y[y != IGNORED] if of_tokens else y
        if not y.numel():
            raise InputError(f"{self.name}: {name} labels no token; −100 marks those to leave out")
        if not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            raise InputError(
                f"{self.name}: {name} holds labels from {int(y.min())} to {int(y.max())}; "
                f"{self.classes} classes are numbered 0 to {self.classes - 1}"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the sample axis."""
        return tuple(self.x_train.shape[1:])

    @property
    def outputs(self) -> int:
        """Number of outputs a model needs: classes, or the width of the target."""
        return self.y_train.shape[1] if self.classes is None else self.classes

    @property
    def labels_tokens(self) -> bool:
        """Whether every token has a label of its own."""
        return self.classes is not None and self.y_train.dim() == 2

    @property
    def task(self) -> Task:
        """``"classification"`` when there are classes, ``"regression"`` otherwise."""
        return "regression" if self.classes is None else "classification"

    def __repr__(self) -> str:
        validation = "" if self.x_val is None else f", {len(self.x_val):,} validation"
        return (
            f"DataSet({self.name!r}: {len(self.x_train):,} train{validation}, {len(self.x_test):,} test, "
            f"inputs {self.input_shape}, {self.task} with {self.outputs} output{'s' if self.outputs > 1 else ''})"
        )

    def _map(self, x: Callable[[Tensor], Tensor] = _unchanged, y: Callable[[Tensor], Tensor] = _unchanged) -> DataSet:
        """The same set with a function applied to every input tensor and another to every target tensor."""
        return replace(
            self,
            x_train=x(self.x_train),
            x_test=x(self.x_test),
            x_val=None if self.x_val is None else x(self.x_val),
            y_train=y(self.y_train),
            y_test=y(self.y_test),
            y_val=None if self.y_val is None else y(self.y_val),
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> DataSet:
        """Move every tensor to a device and floating-point ones to a dtype; labels and tokens stay int64."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return self._map(move, move)

    def flat(self) -> DataSet:
        """Every input as one vector: ``[n, d]``."""
        return self._map(x=lambda x: x.flatten(1))

    def subset(self, n: int, seed: int = 0, *, test: int | None = None) -> DataSet:
        """``n`` training samples (and ``test`` test samples), drawn without replacement, in random order."""
        x_train, y_train = _draw(self, "training", self.x_train, self.y_train, n, seed)
        changes = {"x_train": x_train, "y_train": y_train}
        if test is not None:
            changes["x_test"], changes["y_test"] = _draw(self, "test", self.x_test, self.y_test, test, seed)
        return replace(self, **changes)  # type: ignore[arg-type]

    def split_validation(self, fraction: float, seed: int = 0) -> DataSet:
        """Move a random fraction of the training samples to ``x_val``, ``y_val``; the test part is untouched."""
        if self.x_val is not None:
            raise InputError(f"{self.name} has a validation part already; split the original set once")
        total = len(self.x_train)
        count = round(fraction * total)
        if not 0 < count < total:
            raise InputError(
                f"fraction={fraction} of {total} training samples leaves {count} for validation and {total - count} for "
                "training; choose a fraction that leaves both some"
            )
        order = _permutation(total, seed).to(self.x_train.device)
        return replace(
            self,
            x_val=self.x_train[order[:count]],
            y_val=self.y_train[order[:count]],
            x_train=self.x_train[order[count:]],
            y_train=self.y_train[order[count:]],
        )

    def with_label_noise(self, fraction: float, seed: int = 0, *, test: bool = False) -> DataSet:
        """Give a fraction of the training samples labels drawn at random; with ``test`` the test samples too.

        Validation samples keep their labels: split them off first.
        """
        if self.classes is None:
            raise InputError(f"{self.name} is a regression set: label noise needs classes")
        source = generator(seed, "label noise", "train")
        noisy = replace(self, y_train=randomise_labels(self.y_train, fraction, self.classes, source))
        if test:
            source = generator(seed, "label noise", "test")
            noisy = replace(noisy, y_test=randomise_labels(self.y_test, fraction, self.classes, source))
        return noisy


def _permutation(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def _draw(data: DataSet, split: str, x: Tensor, y: Tensor, n: int, seed: int) -> tuple[Tensor, Tensor]:
    if not 0 < n <= len(x):
        raise InputError(f"{data.name} has {len(x)} {split} samples; {n} cannot be drawn from them")
    chosen = _permutation(len(x), seed)[:n].to(x.device)
    return x[chosen], y[chosen]


def from_tensors(
    name: str,
    x_train: Tensor,
    y_train: Tensor,
    x_test: Tensor,
    y_test: Tensor,
    *,
    classes: int | None = None,
    description: str = "",
    citation: str = "",
) -> DataSet:
    """A data set from tensors: integer targets make it classification, float targets regression.

    uint8 inputs are pixels and become floats in [0, 1]; other integers stay whole numbers (int64), which a net may take as
    tokens. Without ``classes`` there are as many as the largest label says.
    """
    if x_train.dtype != x_test.dtype:  # bytes are scaled as pixels
        raise InputError(f"{name}: x_train is {x_train.dtype} but x_test {x_test.dtype}; give both one type")
    x_train, x_test = _inputs(x_train), _inputs(x_test)
    train, test = _targets(y_train), _targets(y_test)
    if train.is_floating_point() != test.is_floating_point():
        raise InputError(f"{name}: y_train is {y_train.dtype} but y_test {y_test.dtype}; use labels or floats for both")
    if not train.is_floating_point():
        classes = int(max(y.max() if len(y) else 0 for y in (train, test))) + 1 if classes is None else classes
        return DataSet(name, x_train, train, x_test, test, classes, description, citation)
    if train.shape[1] == 1 and bool((train == train.round()).all()):
        warnings.warn(
            f"{name}: y_train holds whole numbers as {y_train.dtype}, which are a regression target; labels are integers",
            ResultWarning,
            stacklevel=2,
        )
    if x_train.is_floating_point():
        train, test = train.to(x_train.dtype), test.to(x_train.dtype)
    return DataSet(name, x_train, train, x_test, test, classes, description, citation)


def _inputs(x: Tensor) -> Tensor:
    x = x.unsqueeze(1) if x.dim() == 1 else x
    if x.dtype == torch.uint8:
        return x.to(torch.float32) / 255
    return x if x.is_floating_point() else x.to(torch.int64)


def _targets(y: Tensor) -> Tensor:
    """Floats become ``[n, outputs]``; integers are labels, ``[n]`` or ``[n, 1]``, or labels of tokens ``[n, t]``."""
    if y.is_floating_point():
        return y.unsqueeze(1) if y.dim() == 1 else y.flatten(1)
    return (y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y).to(torch.int64)
