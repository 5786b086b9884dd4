"""Official files of the downloaded sets: where they come from, where they lie on disk, and fetching them with pooch.

Every SHA-256 is the one published by tensorflow-datasets and by torchvision for the authors' own files.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gramscope.errors import GramscopeError, InputError, MissingExtraError

#: environment variable that names the data directory
ENVIRONMENT = "GRAMSCOPE_DATA"
#: seconds without an answer after which a server is given up
TIMEOUT = 30

#: part of a data set → its file
Files: TypeAlias = dict[str, Path]


class DownloadError(GramscopeError, OSError):
    """A file could not be fetched."""


@dataclass(frozen=True)
class RemoteFile:
    """One file to download, with its SHA-256 and its size in bytes."""

    name: str
    size: int
    sha256: str
    url: str


@dataclass(frozen=True)
class Source:
    """The files of one data set.

    Args:
        name: name in the catalogue.
        homepage: where the authors describe the set.
        folder: folder below the data directory that downloads go to.
        archives: what is downloaded.
        folders: folders below the data directory to look into, in order; ``"."`` is the directory itself.
        splits: split of the set → file names that may hold it.
        members: the files taken out of the archive, where it is a tar file; empty: downloads are read as they are.
        pickled: folder of a version that is not read, because its files are Python programs.
    """

    name: str
    homepage: str
    folder: str
    archives: tuple[RemoteFile, ...]
    folders: tuple[str, ...]
    splits: dict[str, tuple[str, ...]]
    members: tuple[str, ...] = ()
    pickled: str = ""


def _files(address: str, *files: tuple[str, int, str]) -> tuple[RemoteFile, ...]:
    """Files ``(name, size, sha256)`` that lie under their names at one address."""
    return tuple(RemoteFile(*file, url=address + file[0]) for file in files)


def _google_drive(name: str, size: int, sha256: str, identifier: str) -> RemoteFile:
    address = f"https://drive.usercontent.google.com/download?id={identifier}&export=download&confirm=t"
    return RemoteFile(name, size, sha256, address)


def _idx_splits() -> dict[str, tuple[str, ...]]:
    """The four idx files, gzipped or not, also with the dot that some unpackers write instead of the first dash."""
    names = {
        "x_train": "train-images-idx3-ubyte",
        "y_train": "train-labels-idx1-ubyte",
        "x_test": "t10k-images-idx3-ubyte",
        "y_test": "t10k-labels-idx1-ubyte",
    }
    forms = ((split, name, name.replace("-idx", ".idx")) for split, name in names.items())
    return {split: (name, f"{name}.gz", dotted, f"{dotted}.gz") for split, name, dotted in forms}


MNIST = Source(
    name="mnist",
    homepage="http://yann.lecun.com/exdb/mnist/",
    folder="mnist",
    folders=("mnist", "MNIST/raw", "MNIST"),
    splits=_idx_splits(),
    archives=_files(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)

FASHION_MNIST = Source(
    name="fashion-mnist",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    folder="fashion-mnist",
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist", "fashion"),
    splits=_idx_splits(),
    archives=_files(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ("train-images-idx3-ubyte.gz", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte.gz", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte.gz", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte.gz", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
)

SVHN = Source(
    name="svhn",
    homepage="http://ufldl.stanford.edu/housenumbers/",
    folder="svhn",
    folders=("svhn", "SVHN", "."),
    splits={"train": ("train_32x32.mat",), "test": ("test_32x32.mat",)},
    archives=_files(
        "http://ufldl.stanford.edu/housenumbers/",
        ("train_32x32.mat", 182040794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        ("test_32x32.mat", 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    ),
)

_CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

CIFAR10 = Source(
    name="cifar10",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folder=".",
    folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "."),
    splits={batch: (f"{batch}.bin",) for batch in _CIFAR10_BATCHES},
    archives=_files(
        "https://www.cs.toronto.edu/~kriz/",
        ("cifar-10-binary.tar.gz", 170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    ),
    members=tuple(f"cifar-10-batches-bin/{batch}.bin" for batch in _CIFAR10_BATCHES),
    pickled="cifar-10-batches-py",
)

CIFAR100 = Source(
    name="cifar100",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folder=".",
    folders=("cifar-100-binary", "cifar100/cifar-100-binary"),
    splits={"train": ("train.bin",), "test": ("test.bin",)},
    archives=_files(
        "https://www.cs.toronto.edu/~kriz/",
        ("cifar-100-binary.tar.gz", 168513733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    ),
    members=("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    pickled="cifar-100-python",
)

CELEBA = Source(
    name="celeba",
    homepage="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
    folder="celeba",
    folders=("celeba", "CelebA", "."),
    splits={
        "attributes": ("list_attr_celeba.txt", "Anno/list_attr_celeba.txt"),
        "partition": ("list_eval_partition.txt", "Eval/list_eval_partition.txt"),
        "images": ("img_align_celeba", "Img/img_align_celeba", "img_align_celeba.zip", "Img/img_align_celeba.zip"),
    },
    archives=(
        _google_drive(
            "list_attr_celeba.txt",
            26721026,
            "f0e5da289d5ccf75ffe8811132694922b60f2af59256ed362afa03fefba324d0",
            "0B7EVK8r0v71pblRyaVFSWGxPY0U",
        ),
        _google_drive(
            "list_eval_partition.txt",
            2836386,
            "fc955bcb3ef8fbdf7d5640d9a8693a8431b5f2ee291a5c1449a1549e7e073fe7",
            "0B7EVK8r0v71pY0NSMzRuSXJEVkk",
        ),
        *_files(
            "https://s3.amazonaws.com/pytorch-tutorial-assets/",
            ("img_align_celeba.zip", 1443490838, "46fb89443c578308acf364d7d379fe1b9efb793042c0af734b6112e4fd3a8c74"),
        ),
    ),
)


def data_root(data_dir: str | Path | None = None) -> Path:
    """The data directory: ``data_dir``, else ``$GRAMSCOPE_DATA``, else the user's cache folder of the system."""
    chosen = data_dir or os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser()
    try:
        import pooch
    except ImportError:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gramscope"
    return Path(pooch.os_cache("gramscope"))


def locate(source: Source, root: Path) -> Files | None:
    """The files of a data set from the first folder that has all of them, or ``None``."""
    present = (_present(source, folder) for folder in _folders(source, root))
    return next((files for files in present if len(files) == len(source.splits)), None)


def _folders(source: Source, root: Path) -> list[Path]:
    """Folders a set may be in: those below ``root``, and ``root`` where it is already such a folder."""
    tails = [Path(folder).parts for folder in source.folders]
    itself = any(root.absolute().parts[-len(tail) :] == tail for tail in tails if tail)
    return [*([root] if itself else []), *(root / folder for folder in source.folders)]


def _present(source: Source, folder: Path) -> Files:
    paths = {split: [folder / name for name in names] for split, names in source.splits.items()}
    first = {split: next((path for path in options if path.exists()), None) for split, options in paths.items()}
    return {split: path for split, path in first.items() if path is not None}


def _not_there(source: Source, root: Path) -> InputError:
    """The error for a set that is not there: what was looked for, what is missing, and the ways to get it."""
    pickled = (root, root / source.pickled, root / source.name / source.pickled)
    for path in pickled if source.pickled else ():
        if path.name == source.pickled and path.is_dir():
            return InputError(
                f"{path} is the Python version of {source.name}, whose files are pickles: programs, which are not run. "
                f"Take {source.archives[0].name} from {source.homepage}, or run `gramscope data fetch {source.name}`"
            )
    names = {split: options[0] for split, options in source.splits.items()}
    missing = ""
    for folder in _folders(source, root):
        if present := _present(source, folder):
            absent = ", ".join(name for split, name in names.items() if split not in present)
            missing = f"; {folder} has only a part of it, without {absent}"
            break
    return InputError(
        f"{source.name} is not in the data directory {root} (looked in {', '.join(source.folders)} for "
        f"{', '.join(names.values())}){missing}. Run `gramscope data fetch {source.name} --data-dir {root}`, allow "
        f"downloads, point --data-dir or ${ENVIRONMENT} to where it lies, or take the files from {source.homepage}"
    )


def ensure(source: Source, root: Path, *, download: bool = True, force: bool = False) -> Files:
    """The data set on disk; downloaded, checked and unpacked first where it is not there and may be.

    Args:
        source: the data set.
        root: the data directory.
        download: fetch what is missing.
        force: fetch what is there too, and replace files whose digest is not the official one.
    """
    files = None if force else locate(source, root)
    if files is None and download:
        from filelock import FileLock

        folder = root / source.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".gramscope-fetch.lock"):  # another process may fetch it while this one waits
                files = None if force else locate(source, root)
                if files is None:
                    _fetch(source, folder, force)
                    files = locate(source, root)
        except DownloadError:
            raise
        except OSError as error:
            raise DownloadError(f"cannot write to {folder} ({error}); choose another data directory") from error
    if files is None:
        raise _not_there(source, root)
    return files


def _fetch(source: Source, folder: Path, force: bool) -> None:
    try:
        import pooch
    except ImportError as error:
        raise MissingExtraError("downloading needs pooch: pip install pooch") from error
    for file in source.archives:
        path = folder / file.name
        if path.exists() and not force and pooch.file_hash(path) != file.sha256:
            raise InputError(
                f"{path} is not the official file: its SHA-256 differs from {file.sha256}; it may be truncated. Delete "
                f"it, or run `gramscope data fetch {source.name} --force` to replace it"
            )
        download = pooch.HTTPDownloader(timeout=TIMEOUT)
        try:
            pooch.retrieve(file.url, f"sha256:{file.sha256}", fname=file.name, path=folder, downloader=download)
        except (OSError, ValueError) as error:  # of the network, the proxy or the server; a digest that differs
            raise DownloadError(
                f"cannot fetch {file.name} ({file.size / 1e6:.0f} MB) of {source.name} from {file.url} ({error}). Without "
                f"a network, put it into {folder} yourself and run `gramscope data fetch {source.name} --data-dir DIR`; "
                f"it is described at {source.homepage}"
            ) from error
    if source.members:
        archive = folder / source.archives[0].name
        unpack(archive, folder, source.members)
        archive.unlink()


def unpack(archive: Path, folder: Path, members: tuple[str, ...]) -> None:
    """Copy the named files out of a tar archive; nothing else in it is looked at.

    Each file appears in ``folder`` as a whole, so that an interrupted unpacking leaves no truncated file.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as name:
        scratch = Path(name)
        try:
            with tarfile.open(archive) as tar:
                for index, member in enumerate(members):
                    file = tar.extractfile(member)
                    if file is None:
                        raise KeyError(member)
                    with file, (scratch / str(index)).open("wb") as out:
                        shutil.copyfileobj(file, out)
        except Exception as error:
            raise InputError(f"{archive} cannot be unpacked ({error}); delete it and fetch it again") from error
        for index, member in enumerate(members):
            (folder / member).parent.mkdir(parents=True, exist_ok=True)
            (scratch / str(index)).replace(folder / member)
