"""Where the downloaded sets come from: official files, their published SHA-256, sizes and mirrors.

The digests of the archives are those published by tensorflow-datasets and torchvision for the authors' own files; those
of the files inside the CIFAR archives are published by torchvision's Ruby port; those of the unpacked MNIST files were
computed from files whose MD5 is the published one. A mirror is only a place to fetch from: what arrives has to have the
digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MNIST_PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class RemoteFile:
    """One file to download: its name in the cache, SHA-256, size in bytes and where to get it, best first."""

    name: str
    sha256: str
    size: int
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The files of one data set and where they may lie.

    Args:
        folders: folders below the data directory that are looked into, in order; the first is the one downloads go to.
        archives: what is downloaded.
        members: where an archive is a tar file: the files taken out of it. Empty: the downloads are read as they are.
        checksums: file name → SHA-256 of unpacked official files, for ``verify``.
    """

    homepage: str
    folders: tuple[str, ...]
    archives: tuple[RemoteFile, ...]
    members: tuple[str, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)


def _files(mirrors: tuple[str, ...], digests: dict[str, tuple[int, str]]) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(name, sha256, size, tuple(mirror + name for mirror in mirrors))
        for name, (size, sha256) in digests.items()
    )


def _google_drive(identifier: str) -> str:
    return f"https://drive.usercontent.google.com/download?id={identifier}&export=download&confirm=t"


MNIST = Source(
    homepage="http://yann.lecun.com/exdb/mnist/",
    folders=("mnist", "MNIST/raw", "MNIST"),
    archives=_files(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        {
            "train-images-idx3-ubyte.gz": (
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            "train-labels-idx1-ubyte.gz": (
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            "t10k-images-idx3-ubyte.gz": (
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            "t10k-labels-idx1-ubyte.gz": (
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        },
    ),
    checksums={},
)

FASHION_MNIST = Source(
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist", "fashion"),
    archives=_files(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        ),
        {
            "train-images-idx3-ubyte.gz": (
                26421880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            "train-labels-idx1-ubyte.gz": (
                29515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            "t10k-images-idx3-ubyte.gz": (
                4422102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            "t10k-labels-idx1-ubyte.gz": (
                5148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        },
    ),
)

SVHN = Source(
    homepage="http://ufldl.stanford.edu/housenumbers/",
    folders=("svhn", "SVHN", "."),
    archives=_files(
        ("http://ufldl.stanford.edu/housenumbers/", "https://ufldl.stanford.edu/housenumbers/"),
        {
            "train_32x32.mat": (
                182040794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            "test_32x32.mat": (
                64275384,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        },
    ),
)

CIFAR10 = Source(
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
    archives=_files(
        (
            "https://www.cs.toronto.edu/~kriz/",
            "https://dataset.bj.bcebos.com/cifar/",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
        ),
        {
            "cifar-10-binary.tar.gz": (
                170052171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            )
        },
    ),
    members=(*(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)), "cifar-10-batches-bin/test_batch.bin"),
    checksums={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
)

CIFAR100 = Source(
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folders=("cifar-100-binary", "cifar100/cifar-100-binary"),
    archives=_files(
        ("https://www.cs.toronto.edu/~kriz/", "https://dataset.bj.bcebos.com/cifar/"),
        {
            "cifar-100-binary.tar.gz": (
                168513733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            )
        },
    ),
    members=("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    checksums={
        "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    },
)

CELEBA = Source(
    homepage="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
    folders=("celeba", "CelebA", "."),
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
