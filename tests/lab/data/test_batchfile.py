from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gramscope.errors import InputError
from gramscope_lab.data.batchfile import read_batch
from official_files import cifar_pickle, random_images


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
    for content in (good[:-50], good[:20], b"", b"<html>no such page</html>", b"].", rb"S'\q'" + b"\n."):
        path.write_bytes(content)
        with pytest.raises(InputError, match="data_batch_1"):
            read_batch(path)
    path.write_bytes(pickle.dumps({"data": np.zeros(3)}, 2))
    with pytest.raises(InputError, match="array of f8"):
        read_batch(path)


def nested(depth: int) -> bytes:
    """A tuple whose text has 2^depth letters, though its file is short."""
    return b"K\x01" + b"q\x00h\x00\x86" * depth


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}" + nested(60) + b"K\x01s.",  # as a key
        b"\x80\x02c_codecs\nencode\n" + nested(60) + b"U\x06latin1\x86R.",  # as a text
        b"\x80\x02cnumpy\ndtype\n" + nested(60) + b"K\x00K\x01\x87R.",  # as a type
        nested(60) + b")R.",  # as a function
    ],
)
def test_shared_parts_do_not_multiply(tmp_path: Path, program: bytes) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(program)
    with pytest.raises(InputError, match="data_batch_1"):
        read_batch(path)
