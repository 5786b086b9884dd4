"""Every data set by name: the catalogue, and ``load``. Listing needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gramscope.errors import InputError, no_such
from gramscope_lab.data import downloads
from gramscope_lab.data.downloads import Source, data_root, ensure

if TYPE_CHECKING:
    from gramscope_lab.data.dataset import DataSet


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue.

    Args:
        name: what to pass to :func:`load`.
        kind: ``shipped`` with the package, ``generated`` from a seed, or ``downloaded`` once.
        loader: ``module:function`` below ``gramscope_lab.data``; the function takes its files, unless the set is
            generated, then a generator, and its options.
        train, test: number of samples (of a generated set: by default).
        input_shape: shape of one input (of a generated set: by default).
        classes: number of classes; ``None`` is regression.
        description, citation: one line each.
        source: the official files of a downloaded set.
    """

    name: str
    kind: Literal["shipped", "generated", "downloaded"]
    loader: str
    train: int
    test: int
    input_shape: tuple[int, ...]
    classes: int | None
    description: str
    citation: str
    source: Source | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain values for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "train": self.train,
            "test": self.test,
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "download_bytes": sum(file.size for file in self.source.archives) if self.source else 0,
            "description": self.description,
            "citation": self.citation,
        }


_BEAGLEHOLE = "Beaglehole, Mitliagkas & Agarwala, Feature learning as alignment, 2024"
_KRIZHEVSKY = "Krizhevsky, Learning multiple layers of features from tiny images, University of Toronto 2009"

_ENTRIES = (
    Entry(
        "digits", "shipped", "images:digits", 1438, 359, (1, 8, 8), 10,
        "handwritten digits of 13 writers, 17 grey levels; every fifth sample is a test sample",
        "Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository 1998, CC BY 4.0",
    ),
    Entry(
        "faces", "generated", "generated:faces", 2000, 500, (1, 64, 64), 2,
        "drawn faces with and without glasses", "drawn by gramscope",
    ),
    Entry(
        "swiss-roll", "generated", "generated:swiss_roll", 1000, 1000, (2,), None,
        "points of a Swiss roll and their position along it",
        "Tenenbaum, de Silva & Langford, Science 290, 2000",
    ),
    Entry(
        "gaussian", "generated", "generated:gaussian", 256, 1000, (32,), None,
        "Gaussian inputs with spectrum 1/(1+k^alpha), random linear target", _BEAGLEHOLE,
    ),
    Entry(
        "chain-monomial", "generated", "generated:chain_monomial", 256, 1000, (32,), None,
        "sum of products of neighbours on a ring of coordinates", _BEAGLEHOLE,
    ),
    Entry(
        "merged-staircase", "generated", "generated:merged_staircase", 1000, 1000, (10,), None,
        "x1 + x1 x2 + x1 x2 x3 + x1 x2 x3 x4", "Abbe, Boix-Adsera & Misiakiewicz, COLT 2022",
    ),
    Entry(
        "high-rank-polynomial", "generated", "generated:high_rank_polynomial", 128, 1000, (128,), None,
        "sum of squares of all coordinates in a random basis", _BEAGLEHOLE,
    ),
    Entry(
        "alignment-reversing", "generated", "generated:alignment_reversing", 256, 256, (256,), None,
        "data built to disrupt the neural feature ansatz at initialisation", _BEAGLEHOLE,
    ),
    Entry(
        "modular-arithmetic", "generated", "generated:modular_arithmetic", 2605, 1116, (122,), 61,
        "all pairs x, y and x+y (or -, *, /, polynomials) mod p, one-hot or tokens",
        "Power et al., Grokking, 2022",
    ),
    Entry(
        "mnist", "downloaded", "images:mnist", 60000, 10000, (1, 28, 28), 10,
        "handwritten digits", "LeCun, Bottou, Bengio & Haffner, Proc. IEEE 86, 1998", downloads.MNIST,
    ),
    Entry(
        "fashion-mnist", "downloaded", "images:fashion_mnist", 60000, 10000, (1, 28, 28), 10,
        "articles of clothing", "Xiao, Rasul & Vollgraf, arXiv:1708.07747, 2017", downloads.FASHION_MNIST,
    ),
    Entry(
        "svhn", "downloaded", "images:svhn", 73257, 26032, (3, 32, 32), 10,
        "house numbers, cropped to single digits",
        "Netzer et al., NIPS Workshop on Deep Learning and Unsupervised Feature Learning 2011", downloads.SVHN,
    ),
    Entry(
        "cifar10", "downloaded", "images:cifar10", 50000, 10000, (3, 32, 32), 10,
        "photographs in 10 classes", _KRIZHEVSKY, downloads.CIFAR10,
    ),
    Entry(
        "cifar100", "downloaded", "images:cifar100", 50000, 10000, (3, 32, 32), 100,
        "photographs in 100 classes (or 20 coarse ones)", _KRIZHEVSKY, downloads.CIFAR100,
    ),
    Entry(
        "celeba", "downloaded", "celeba:celeba", 7500, 2000, (3, 64, 64), 2,
        "faces with or without an attribute (glasses), a balanced subset",
        "Liu, Luo, Wang & Tang, Deep learning face attributes in the wild, ICCV 2015", downloads.CELEBA,
    ),
)  # fmt: skip


def catalogue() -> tuple[Entry, ...]:
    """Every data set that has a name."""
    return _ENTRIES


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def find_entry(name: str) -> Entry:
    """The entry of a name; case, dashes and underscores do not matter."""
    entry = next((entry for entry in _ENTRIES if _plain(entry.name) == _plain(name)), None)
    if entry is None:
        raise InputError(f"{no_such('data set', name, [e.name for e in _ENTRIES])}, or the path of an .npz file")
    return entry


def load(
    name: str, data_dir: str | Path | None = None, *, seed: int = 0, download: bool = True, **options: Any
) -> DataSet:
    """Load a data set as tensors.

    Args:
        name: a name of :func:`catalogue`, or the path of an ``.npz`` file with x_train, y_train, x_test, y_test.
        data_dir: folder with the official files; ``$GRAMSCOPE_DATA`` or the user's cache when ``None``.
        seed: of everything drawn at random: generated samples, chosen subsets.
        download: fetch the official files when they are not there.
        options: those of the loader, for example ``scale="signed"`` for images or ``d=64, rank=3`` for chain-monomial.

    >>> load("digits")
    DataSet('digits': 1,438 train, 359 test, inputs (1, 8, 8), classification with 10 outputs)
    """
    import torch

    if name.endswith(".npz"):
        from gramscope_lab.data.images import load_npz

        _check_options(name, load_npz, options)
        return load_npz(Path(name).expanduser(), **options)
    entry = find_entry(name)
    module, _, function = entry.loader.partition(":")
    loader = getattr(import_module(f"gramscope_lab.data.{module}"), function)
    _check_options(entry.name, loader, options)
    arguments: list[Any] = [torch.Generator().manual_seed(seed)]
    if entry.kind != "generated":
        files = ensure(entry.source, data_root(data_dir), download=download) if entry.source else {}
        arguments.insert(0, files)
    data: DataSet = loader(*arguments, **options)
    return replace(data, description=entry.description, citation=entry.citation)


def _check_options(name: str, loader: Callable[..., Any], options: dict[str, Any]) -> None:
    known = [p.name for p in inspect.signature(loader).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise InputError(f"data set {name} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")
