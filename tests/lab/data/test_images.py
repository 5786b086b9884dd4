"""Every image set read from small files in its official formats, and from the real ones where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gramscope.errors import InputError
from gramscope_lab.data import load
from gramscope_lab.data.downloads import data_root
from gramscope_lab.data.images import scaled
from official_files import Array, cifar_records, random_images, write_cifar10, write_idx_set, write_svhn
from refusals import assert_refused


def idx_arrays(seed: int = 0) -> dict[str, Array]:
    (x, y), (x_test, y_test) = random_images(12, (28, 28), 10, seed), random_images(5, (28, 28), 10, seed + 1)
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


@pytest.mark.parametrize(
    ("name", "folder", "zipped", "dotted"),
    [
        ("mnist", "mnist", True, False),
        ("mnist", "mnist", False, True),
        ("mnist", "MNIST/raw", False, False),
        ("fashion-mnist", "fashion-mnist", True, False),
        ("fashion-mnist", "FashionMNIST/raw", False, False),
    ],
)
def test_idx_sets(tmp_path: Path, name: str, folder: str, zipped: bool, dotted: bool) -> None:
    arrays = idx_arrays()
    write_idx_set(tmp_path / folder, arrays, zipped=zipped, dotted=dotted)
    for directory in (tmp_path, tmp_path / folder):  # the folder itself may be named too
        data = load(name, directory, download=False)
        np.testing.assert_array_equal(data.x_train.numpy()[:, 0], arrays["x_train"] / np.float32(255))
        np.testing.assert_array_equal(data.y_test.numpy(), arrays["y_test"])
    assert data.classes == 10
    assert data.citation


def test_mnist_files_are_not_taken_for_fashion_mnist(tmp_path: Path) -> None:
    write_idx_set(tmp_path / "mnist", idx_arrays())
    for directory in (tmp_path, tmp_path / "mnist"):
        assert_refused("fashion-mnist is not in the data directory", load, "fashion-mnist", directory, download=False)


def test_incomplete_and_inconsistent_sets_are_explained(tmp_path: Path) -> None:
    arrays = idx_arrays()
    write_idx_set(tmp_path / "mnist", arrays)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"only a part of it, without t10k-labels.*gramscope data fetch mnist"):
        load("mnist", tmp_path, download=False)
    write_idx_set(tmp_path / "mnist", arrays | {"y_train": arrays["y_train"][:-1]})
    assert_refused(r"12 images.*11 labels", load, "mnist", tmp_path, download=False)
    write_idx_set(tmp_path / "mnist", arrays | {"y_train": arrays["y_train"] + 90})
    assert_refused("labels from 90", load, "mnist", tmp_path, download=False)


def test_cifar10(tmp_path: Path) -> None:
    images, labels = random_images(18, (3, 32, 32), 10)
    write_cifar10(tmp_path / "cifar-10-batches-bin", images, labels)
    for directory in (tmp_path, tmp_path / "cifar-10-batches-bin"):
        data = load("cifar10", directory, download=False)
        assert data.x_train.shape == (15, 3, 32, 32)
        np.testing.assert_array_equal(torch.cat([data.x_train, data.x_test]).numpy(), images / np.float32(255))
        np.testing.assert_array_equal(torch.cat([data.y_train, data.y_test]).numpy(), labels)


@pytest.mark.parametrize("labels", ["fine", "coarse"])
def test_cifar100(tmp_path: Path, labels: str) -> None:
    images, fine = random_images(8, (3, 32, 32), 100)
    coarse = fine // 5
    (tmp_path / "cifar-100-binary").mkdir()
    for name, rows in (("train", slice(0, 6)), ("test", slice(6, 8))):
        content = cifar_records(images[rows], coarse[rows], fine[rows])
        (tmp_path / "cifar-100-binary" / f"{name}.bin").write_bytes(content)
    data = load("cifar100", tmp_path, labels=labels, download=False)
    assert data.classes == {"fine": 100, "coarse": 20}[labels]
    np.testing.assert_array_equal(data.y_train.numpy(), {"fine": fine, "coarse": coarse}[labels][:6])
    np.testing.assert_array_equal(data.x_test.numpy(), images[6:] / np.float32(255))
    assert_refused("fine, coarse", load, "cifar100", tmp_path, labels="super", download=False)


@pytest.mark.parametrize(
    ("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar100/cifar-100-python")]
)
def test_the_python_version_of_cifar_is_never_read(tmp_path: Path, name: str, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for directory in (tmp_path, tmp_path / folder):
        with pytest.raises(InputError, match=rf"pickles.*Take cifar-{name[5:]}-binary\.tar\.gz from https://"):
            load(name, directory, download=False)


def test_svhn(tmp_path: Path) -> None:
    images, labels = random_images(15, (3, 32, 32), 10)
    write_svhn(tmp_path / "svhn", images[:10], labels[:10], "train_32x32.mat")
    write_svhn(tmp_path / "svhn", images[10:], labels[10:], "test_32x32.mat")
    data = load("svhn", tmp_path, download=False)
    np.testing.assert_array_equal(data.x_train.numpy(), images[:10] / np.float32(255))
    np.testing.assert_array_equal(torch.cat([data.y_train, data.y_test]).numpy(), labels)


def test_scales() -> None:
    train, test = random_images(50, (2, 3, 3), 2)[0], random_images(9, (2, 3, 3), 2, seed=1)[0]
    assert torch.equal(scaled(train, test)[0], torch.tensor(train) / 255)
    torch.testing.assert_close(scaled(train, test, "signed")[1], 2 * torch.tensor(test).float() / 255 - 1)
    standard = scaled(train, test, "standard")
    exact = torch.tensor(train, dtype=torch.float64)
    std, mean = torch.std_mean(exact, (0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(standard[0], ((exact - mean) / std).float())
    torch.testing.assert_close(standard[1], ((torch.tensor(test) - mean) / std).float())
    with pytest.raises(InputError, match="unit, signed, standard"):
        scaled(train, test, "imagenet")  # type: ignore[arg-type]
    assert_refused("channel 1 is constant", scaled, train * np.array([1, 0], np.uint8)[:, None, None], test, "standard")


def test_digits_are_scikit_learns_copy() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    test = np.arange(1797) % 5 == 4
    data = load("digits")
    np.testing.assert_array_equal(data.x_train.numpy()[:, 0], theirs.images[~test].astype(np.float32) / 16)
    np.testing.assert_array_equal(data.x_test.numpy()[:, 0], theirs.images[test].astype(np.float32) / 16)
    np.testing.assert_array_equal(data.y_train.numpy(), theirs.target[~test])
    np.testing.assert_array_equal(data.y_test.numpy(), theirs.target[test])


def test_where_the_data_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAMSCOPE_DATA", str(tmp_path / "a"))
    assert data_root() == tmp_path / "a"
    assert data_root(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("GRAMSCOPE_DATA")
    assert data_root().name == "gramscope"
    write_idx_set(tmp_path / "a" / "mnist", idx_arrays())
    monkeypatch.setenv("GRAMSCOPE_DATA", str(tmp_path / "a"))
    assert len(load("mnist", download=False).x_train) == 12


def test_real_mnist(data_dir: Path) -> None:
    if not (data_dir / "mnist").is_dir():
        pytest.skip(f"no mnist in {data_dir}")
    data = load("mnist", data_dir, download=False)
    assert (tuple(data.x_train.shape), tuple(data.x_test.shape)) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert float(data.x_train.mean()) == pytest.approx(0.1307, abs=1e-4)  # the well-known mean and deviation
    assert float(data.x_train.std()) == pytest.approx(0.3081, abs=1e-4)
    assert data.y_train[:5].tolist() == [5, 0, 4, 1, 9]


def test_real_cifar10(data_dir: Path) -> None:
    if not (data_dir / "cifar-10-batches-bin").is_dir():
        pytest.skip(f"no cifar-10-batches-bin in {data_dir}")
    data = load("cifar10", data_dir, download=False)
    assert torch.bincount(data.y_train).tolist() == [5000] * 10
    assert data.x_train.mean((0, 2, 3)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    assert data.y_train[:5].tolist() == [6, 9, 9, 4, 1]
