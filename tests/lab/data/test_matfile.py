from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gramscope.errors import InputError
from gramscope_lab.data.matfile import read_mat

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


@pytest.mark.parametrize(
    ("megabytes", "message"), [(300, "unpacks to more than 268,435,456 bytes"), (1, "more than 10000 elements")]
)
def test_a_mat_bomb_is_refused(tmp_path: Path, megabytes: int, message: str) -> None:
    packed = zlib.compress(bytes(megabytes << 20))
    path = tmp_path / "a.mat"
    path.write_bytes(b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + struct.pack("<II", 15, len(packed)) + packed)
    with pytest.raises(InputError, match=message):
        read_mat(path)
