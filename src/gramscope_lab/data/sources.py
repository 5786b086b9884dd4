"""Where the downloaded sets come from: official files, their published digests, sizes, mirrors and layouts.

The SHA-256 of everything that is downloaded is the one published by tensorflow-datasets and by torchvision for the
authors' own files, and those of the files inside the CIFAR archives by torchvision's Ruby port. For Fashion-MNIST files
that were unpacked by hand only an MD5 is published, so ``verify`` uses that; the SHA-256 of unpacked MNIST files was
computed from files that have the published MD5. A mirror is only a place to fetch from: what arrives has to have the
digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RemoteFile:
    """One file to download: its name in the cache, SHA-256, size in bytes and where to get it, best first."""

    name: str
    sha256: str
    size: int
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """One form in which a data set may lie on disk.

    Args:
        folders: folders below the data directory to look into, in order; ``"."`` is the directory itself.
        parts: part of the set → file names that may hold it.
    """

    folders: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Source:
    """The files of one data set.

    Args:
        name: name in the catalogue.
        homepage: where the authors describe the set.
        folder: folder below the data directory that downloads go to.
        archives: what is downloaded.
        layouts: forms that are accepted on disk, the preferred one first.
        members: the files taken out of the archive, where it is a tar file; empty: downloads are read as they are.
        checksums: file name → ``"sha256:…"`` or ``"md5:…"`` of unpacked official files, for ``verify``.
    """

    name: str
    homepage: str
    folder: str
    archives: tuple[RemoteFile, ...]
    layouts: tuple[Layout, ...]
    members: tuple[str, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)


def _files(mirrors: tuple[str, ...], *files: tuple[str, int, str]) -> tuple[RemoteFile, ...]:
    """Files ``(name, size, sha256)`` that lie under their names on every mirror."""
    return tuple(
        RemoteFile(name, sha256, size, tuple(mirror + name for mirror in mirrors)) for name, size, sha256 in files
    )


def _google_drive(identifier: str) -> str:
    return f"https://drive.usercontent.google.com/download?id={identifier}&export=download&confirm=t"


def _idx_parts() -> dict[str, tuple[str, ...]]:
    """The four idx files, gzipped or not, also with the dot that some unpackers write instead of the first dash."""
    parts: dict[str, tuple[str, ...]] = {}
    for part, name in {
        "x_train": "train-images-idx3-ubyte",
        "y_train": "train-labels-idx1-ubyte",
        "x_test": "t10k-images-idx3-ubyte",
        "y_test": "t10k-labels-idx1-ubyte",
    }.items():
        dotted = name.replace("-idx", ".idx")
        parts[part] = (name, f"{name}.gz", dotted, f"{dotted}.gz")
    return parts


MNIST = Source(
    name="mnist",
    homepage="http://yann.lecun.com/exdb/mnist/",
    folder="mnist",
    layouts=(Layout(("mnist", "MNIST/raw", "MNIST"), _idx_parts()),),
    archives=_files(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    checksums={
        "train-images-idx3-ubyte": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)

FASHION_MNIST = Source(
    name="fashion-mnist",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    folder="fashion-mnist",
    layouts=(Layout(("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist", "fashion"), _idx_parts()),),
    checksums={
        "train-images-idx3-ubyte": "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "md5:9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "md5:8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "md5:15d484375f8d13e6eb1aabb0c3f46965",
    },
    archives=_files(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        ),
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
    layouts=(Layout(("svhn", "SVHN", "."), {"train": ("train_32x32.mat",), "test": ("test_32x32.mat",)}),),
    archives=_files(
        ("http://ufldl.stanford.edu/housenumbers/", "https://ufldl.stanford.edu/housenumbers/"),
        ("train_32x32.mat", 182040794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        ("test_32x32.mat", 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    ),
)

_CIFAR10_PARTS = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

CIFAR10 = Source(
    name="cifar10",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folder=".",
    layouts=(
        Layout(
            ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "."),
            {part: (f"{part}.bin",) for part in _CIFAR10_PARTS},
        ),
        Layout(
            ("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "."),
            {part: (part,) for part in _CIFAR10_PARTS},
        ),
    ),
    archives=_files(
        (
            "https://www.cs.toronto.edu/~kriz/",
            "https://dataset.bj.bcebos.com/cifar/",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
        ),
        ("cifar-10-binary.tar.gz", 170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    ),
    members=tuple(f"cifar-10-batches-bin/{part}.bin" for part in _CIFAR10_PARTS),
    checksums={
        "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
)

CIFAR100 = Source(
    name="cifar100",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folder=".",
    layouts=(
        Layout(("cifar-100-binary", "cifar100/cifar-100-binary"), {"train": ("train.bin",), "test": ("test.bin",)}),
        Layout(("cifar-100-python", "cifar100/cifar-100-python"), {"train": ("train",), "test": ("test",)}),
    ),
    archives=_files(
        ("https://www.cs.toronto.edu/~kriz/", "https://dataset.bj.bcebos.com/cifar/"),
        ("cifar-100-binary.tar.gz", 168513733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    ),
    members=("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    checksums={
        "train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        "test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    },
)

CELEBA = Source(
    name="celeba",
    homepage="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
    folder="celeba",
    layouts=(
        Layout(
            ("celeba", "CelebA", "."),
            {
                "attributes": ("list_attr_celeba.txt", "Anno/list_attr_celeba.txt"),
                "partition": ("list_eval_partition.txt", "Eval/list_eval_partition.txt"),
                "images": (
                    "img_align_celeba",
                    "Img/img_align_celeba",
                    "img_align_celeba.zip",
                    "Img/img_align_celeba.zip",
                ),
            },
        ),
    ),
    archives=(
        RemoteFile(
            "list_attr_celeba.txt",
            "f0e5da289d5ccf75ffe8811132694922b60f2af59256ed362afa03fefba324d0",
            26721026,
            (_google_drive("0B7EVK8r0v71pblRyaVFSWGxPY0U"),),
        ),
        RemoteFile(
            "list_eval_partition.txt",
            "fc955bcb3ef8fbdf7d5640d9a8693a8431b5f2ee291a5c1449a1549e7e073fe7",
            2836386,
            (_google_drive("0B7EVK8r0v71pY0NSMzRuSXJEVkk"),),
        ),
        RemoteFile(
            "img_align_celeba.zip",
            "46fb89443c578308acf364d7d379fe1b9efb793042c0af734b6112e4fd3a8c74",
            1443490838,
            (
                "https://s3.amazonaws.com/pytorch-tutorial-assets/img_align_celeba.zip",
                _google_drive("0B7EVK8r0v71pZjFTYXZWM3FlRnM"),
            ),
        ),
    ),
)
