from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gramscope.data.batchfile import read_batch
from gramscope.data.idx import read_idx
from gramscope.data.matfile import read_mat
from gramscope.data.pixels import scaled
from gramscope.errors import InputError
from official_files import cifar_pickle, idx_bytes, random_images


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path: Path, suffix: str) -> None:
    array = random_images(5, (3, 4), 2)[0]
    path = tmp_path / f"a{suffix}"
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert np.array_equal(read_idx(path, 3), array)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (idx_bytes(np.zeros((2, 3), np.uint8))[:-1], "a", "holds 5 bytes for 2 × 3"),
        (idx_bytes(np.zeros((2, 3), np.uint8)) + b"x", "a", "holds 7 bytes"),
        (idx_bytes(np.zeros(3, np.uint8)), "a", "2 dimensions"),
        (b"<html>", "a", "3c 68 74 6d"),
        (b"", "a", "not an idx file"),
        (b"<html>", "a.gz", "not a gzip file"),
        (gzip.compress(idx_bytes(np.zeros((20, 30), np.uint8)))[:-9], "a.gz", "truncated"),
    ],
    ids=["short", "long", "flat", "page", "empty", "page-gz", "truncated-gz"],  # gzip puts the time into its bytes
)
def test_damaged_idx_is_explained(tmp_path: Path, content: bytes, name: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_idx(path, 2)


numeric = st.sampled_from([np.uint8, np.int16, np.int32, np.float32, np.float64, np.uint64, np.int8])


@given(
    array=numeric.flatmap(lambda t: hnp.arrays(t, hnp.array_shapes(min_dims=2, max_dims=4, max_side=5))),
    compressed=st.booleans(),
    name=st.sampled_from(["X", "y", "a_longer_name"]),
)
def test_mat_reader_agrees_with_scipy(
    tmp_path_factory: pytest.TempPathFactory, array: Any, compressed: bool, name: str
) -> None:
    from scipy.io import savemat

    path = tmp_path_factory.mktemp("mat") / "a.mat"
    savemat(path, {"text": "passed over", name: array, "cell": np.array([{}, 1], object)}, do_compression=compressed)
    found = read_mat(path)
    assert set(found) == {name}
    np.testing.assert_array_equal(found[name], array)


def test_mat_reader_reads_the_other_byte_order(tmp_path: Path) -> None:
    def element(kind: int, data: bytes) -> bytes:
        return struct.pack(">II", kind, len(data)) + data + b"\0" * (-len(data) % 8)

    values = np.arange(6, dtype=">i2")
    matrix = element(6, struct.pack(">II", 10, 0)) + element(5, struct.pack(">ii", 2, 3))
    matrix += struct.pack(">HH", 1, 1) + b"y\0\0\0" + element(3, values.tobytes())  # the name is a packed element
    path = tmp_path / "a.mat"
    path.write_bytes(b"MATLAB 5.0".ljust(124) + b"\x01\x00MI" + element(14, matrix))
    np.testing.assert_array_equal(read_mat(path)["y"], values.reshape(2, 3, order="F"))


@pytest.mark.parametrize("compressed", [True, False])
def test_damaged_mat_is_explained(tmp_path: Path, compressed: bool) -> None:
    from scipy.io import savemat

    path = tmp_path / "a.mat"
    savemat(path, {"X": np.random.default_rng(0).integers(0, 256, (40, 40), np.uint8)}, do_compression=compressed)
    content = path.read_bytes()
    for cut in (len(content) - 1 - 8 * (not compressed), 300, 132):
        path.write_bytes(content[:cut])
        with pytest.raises(InputError, match="truncated or damaged"):
            read_mat(path)
    path.write_bytes(b"\x89HDF\r\n")
    with pytest.raises(InputError, match="not a MATLAB 5 file"):
        read_mat(path)


def test_python_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    images, labels = random_images(7, (3072,), 300)
    path = tmp_path / "data_batch_1"
    path.write_bytes(cifar_pickle(images, labels=labels.astype(int) + 250))
    batch = read_batch(path)
    assert batch["labels"] == (labels.astype(int) + 250).tolist()
    np.testing.assert_array_equal(batch["data"], images)
    # the real unpickler agrees on our hand-written stream
    theirs = pickle.loads(path.read_bytes(), encoding="latin1")
    np.testing.assert_array_equal(theirs["data"], images)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_python_batch_as_python_3_writes_it(tmp_path: Path, protocol: int, order: Any) -> None:
    images, labels = random_images(4, (3072,), 10)
    path = tmp_path / "train"
    batch = {b"data": np.asarray(images, order=order), b"fine_labels": labels.tolist(), b"n": (1, 2.5, None, True)}
    path.write_bytes(pickle.dumps(batch, protocol))
    found = read_batch(path)
    np.testing.assert_array_equal(found["data"], images)
    assert found["fine_labels"] == labels.tolist()
    assert found["n"] == (1, 2.5, None, True)


class Attack:
    """What a hostile file does: call something when unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/gramscope-was-here"),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_batch_is_refused(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Attack()}, protocol))
    with pytest.raises(InputError, match="which is not read"):
        read_batch(path)
    for program in (b"cos\nsystem\n(S'true'\ntR.", b"(S'true'\nios\nsystem\n.", b"cbuiltins\neval\n."):
        path.write_bytes(program)
        with pytest.raises(InputError, match="which is not read"):
            read_batch(path)
    assert not Path("/tmp/gramscope-was-here").exists()


def test_damaged_batches_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    good = cifar_pickle(*random_images(2, (3072,), 2)[:1], labels=np.arange(2))
    for content in (good[:-50], good[:20], b"", b"<html>no such page</html>", b"]."):
        path.write_bytes(content)
        with pytest.raises(InputError, match="data_batch_1"):
            read_batch(path)
    path.write_bytes(pickle.dumps({"data": np.zeros(3)}, 2))
    with pytest.raises(InputError, match="array of f8"):
        read_batch(path)


def test_scales() -> None:
    train, test = random_images(50, (2, 3, 3), 2)[0], random_images(9, (2, 3, 3), 2, seed=1)[0]
    unit = scaled(train, test)
    assert torch.equal(unit[0], torch.tensor(train) / 255)
    signed = scaled(train, test, "signed")
    torch.testing.assert_close(signed[1], 2 * torch.tensor(test).float() / 255 - 1)
    standard = scaled(train, test, "standard")
    exact = torch.tensor(train, dtype=torch.float64)
    std, mean = torch.std_mean(exact, (0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(standard[0], ((exact - mean) / std).float())
    torch.testing.assert_close(standard[1], ((torch.tensor(test) - mean) / std).float())
    with pytest.raises(InputError, match="unit, signed, standard"):
        scaled(train, test, "imagenet")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="channel 1 is constant"):
        scaled(train * np.array([1, 0], np.uint8)[:, None, None], test, "standard")
