"""Damaged and hostile input for every reader: only documented errors, little memory, and no hanging.

Hypothesis changes valid files. ``GRAMSCOPE_FUZZ`` multiplies the number of examples, for a long search by hand.
"""

from __future__ import annotations

import gzip
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gramscope.cli.flags import parse_assignments, read_config
from gramscope.data import load
from gramscope.data.batchfile import read_batch
from gramscope.data.idx import read_idx
from gramscope.data.matfile import read_mat
from gramscope.errors import GramscopeError, GramscopeWarning
from gramscope.runs.checkpoints import Checkpoint, read_checkpoint
from gramscope.runs.directory import RunDirectory
from gramscope.training.config import TrainConfig
from official_files import cifar_pickle, idx_bytes, random_images

MORE = int(os.environ.get("GRAMSCOPE_FUZZ", "1"))
#: memory that reading a small file may take
MOST_BYTES = 500 << 20

fuzz = settings(
    max_examples=150 * MORE,
    deadline=timedelta(seconds=5),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

NUMBERS = [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]
change = st.one_of(
    st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("number"), st.floats(0, 1), st.sampled_from(NUMBERS)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.integers(1, 40)),
    st.tuples(st.just("repeat"), st.floats(0, 1), st.integers(1, 40)),
    st.tuples(st.just("end"), st.floats(0, 1), st.none()),
)


def changed(content: bytes, changes: list[tuple[str, float, Any]]) -> bytes:
    for kind, where, what in changes:
        at = int(where * len(content))
        if kind == "put":
            content = content[:at] + what + content[at + len(what) :]
        elif kind == "insert":
            content = content[:at] + what + content[at:]
        elif kind == "number":
            width = next(width for width in (1, 2, 4, 8) if what < 256**width)
            content = content[:at] + what.to_bytes(width, "little") + content[at + width :]
        elif kind == "cut":
            content = content[:at] + content[at + what :]
        elif kind == "repeat":
            content = content[:at] + content[at : at + what] * 5 + content[at:]
        else:
            content = content[:at]
    return content


changes = st.lists(change, min_size=1, max_size=6)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let an allocation beyond the limit fail, as on a small machine."""
    status = Path("/proc/self/statm")
    if not status.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(status.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def only_documented(read: Callable[[], object]) -> None:
    with warnings.catch_warnings(), suppress(GramscopeError), limited_memory():
        warnings.simplefilter("ignore", GramscopeWarning)
        read()


def mat_bytes(folder: Path, *, compressed: bool) -> bytes:
    from scipy.io import savemat

    arrays = {"X": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "y": np.ones((4, 1))}
    savemat(folder / "seed.mat", arrays, do_compression=compressed)
    return (folder / "seed.mat").read_bytes()


def npz_bytes(folder: Path, *, compressed: bool) -> bytes:
    x, y = np.arange(12.0).reshape(4, 3), np.arange(4) % 2
    (np.savez_compressed if compressed else np.savez)(folder / "seed.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return (folder / "seed.npz").read_bytes()


IDX = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
BATCH = cifar_pickle(random_images(2, (3072,), 2)[0], labels=np.arange(2))
SEEDS: dict[str, tuple[Callable[[Path], bytes], str, Callable[[Path], object]]] = {
    "idx": (lambda _: IDX, "a", lambda path: read_idx(path, 3)),
    "idx.gz": (lambda _: gzip.compress(IDX, mtime=0), "a.gz", lambda path: read_idx(path, 3)),
    "mat": (lambda folder: mat_bytes(folder, compressed=False), "a.mat", read_mat),
    "mat, compressed": (lambda folder: mat_bytes(folder, compressed=True), "a.mat", read_mat),
    "npz": (lambda folder: npz_bytes(folder, compressed=False), "a.npz", lambda path: load(str(path))),
    "npz, compressed": (lambda folder: npz_bytes(folder, compressed=True), "a.npz", lambda path: load(str(path))),
    "batch": (lambda _: BATCH[:200] + BATCH[-40:], "a", read_batch),
    "whole batch": (lambda _: BATCH, "a", read_batch),
}


@pytest.mark.parametrize("name", SEEDS)
def test_data_files(name: str, tmp_path: Path) -> None:
    make, file, read = SEEDS[name]
    seed, path = make(tmp_path), tmp_path / file

    @fuzz
    @given(changes)
    def check(changes: Any) -> None:
        path.write_bytes(changed(seed, changes))
        only_documented(lambda: read(path))

    check()


def test_numbers_in_npz_headers(tmp_path: Path) -> None:
    import zipfile

    text = st.text("()[]{},':<>|fiuOSVM8.-0123456789 descrfortan_hpTueFl\\x", max_size=60)

    @fuzz
    @given(text)
    def check(text: str) -> None:
        header = ("{'descr': '<f8', 'fortran_order': False, 'shape': " + text).encode()
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(32)
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
            for key in ("x_train", "y_train", "x_test", "y_test"):
                file.writestr(f"{key}.npy", content)
        only_documented(lambda: load(str(tmp_path / "a.npz")))

    check()


CONFIG = {
    "seeds": [0, 1], "epochs": 2.0, "batch_size": 8, "data": {"name": "digits", "seed": 1},
    "model": {"name": "mlp", "hidden": [4]}, "method": {"name": "sgd", "lr": 0.1}, "measure": {"every": 1.0, "names": ["nfa"]},
    "sweep": {"method.lr": [0.1, 0.2]}, "schedule": {"name": "cosine"},
}  # fmt: skip


def test_configuration_files(tmp_path: Path) -> None:
    seed = TrainConfig.from_dict(CONFIG).to_toml().encode()

    @fuzz
    @given(changes)
    def check(changes: Any) -> None:
        (tmp_path / "a.toml").write_bytes(changed(seed, changes))
        only_documented(lambda: TrainConfig.from_toml(tmp_path / "a.toml"))

    check()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@fuzz
@given(st.sampled_from([*CONFIG, "loss", "dtype", "device", "keep", "execution"]), st.text(max_size=8), values)
def test_configurations_of_any_values(key: str, inner: str, value: Any) -> None:
    only_documented(lambda: TrainConfig.from_dict({**CONFIG, key: value}))
    table = CONFIG.get(key)
    if isinstance(table, dict):
        for name in (*table, inner):
            only_documented(lambda name=name: TrainConfig.from_dict({**CONFIG, key: {**table, name: value}}))  # type: ignore[misc]


setting = st.tuples(
    st.sampled_from(["seeds", "epochs", "data.seed", "model.hidden", "method.lr", "sweep.x", "lr", "x", ""]),
    st.text("0123456789.,-+eE[]{}\"'=#tnTruefals \n\x1b∞", max_size=30) | st.integers(10**18, 10**400).map(str),
).map("=".join)


@fuzz
@given(setting, setting, st.text("0123456789,-+ e²", max_size=12) | st.integers(10**5, 10**30).map(str))
def test_flags(one: str, other: str, seeds: str) -> None:
    only_documented(lambda: parse_assignments([one]))
    only_documented(lambda: read_config(None, {}, [one], []))
    only_documented(lambda: read_config(None, {}, [], [other]))
    only_documented(lambda: read_config(None, {}, [], [], seeds))


def test_deep_flags() -> None:
    for text in ("[" * 100_000, "{a=" * 5_000, "9" * 10_000):
        only_documented(lambda text=text: read_config(None, {}, [f"x={text}"], []))  # type: ignore[misc]


def run_with_files(folder: Path) -> RunDirectory:
    run = RunDirectory.create(folder / "run", TrainConfig.from_dict(CONFIG).to_dict())
    run.write_environment({"torch": "2", "device": "cpu"})
    run.append({"kind": "evaluation", "step": 1, "test_loss": 0.5}, {"kind": "end", "finished": True})
    run.close()
    run.save_checkpoint(
        Checkpoint(1, {"w": torch.ones(2, 2)}, {"m": torch.ones(3)}, {"step": 1, "training": {"a": [1]}})
    )
    run.save_artefact("spectra-000000001", {"layer": torch.ones(3)})
    return run


FILES = (
    "config.toml", "environment.json", "records.jsonl", ".files", "lock", "artefacts/spectra-000000001.safetensors",
    *(f"checkpoints/step-000000001/{name}" for name in ("model.safetensors", "state.json", "manifest.json")),
)  # fmt: skip


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_run_directories(name: str, manifest: bool, tmp_path: Path) -> None:
    run = run_with_files(tmp_path)
    checkpoint = run.path / "checkpoints" / "step-000000001"
    if not manifest:
        if not name.startswith("checkpoints") or name.endswith("manifest.json"):
            return
        (checkpoint / "manifest.json").unlink()
    path = run.path / name
    seed = path.read_bytes() if path.exists() else b'{"pid": 1, "host": "here"}'

    @settings(fuzz, max_examples=60 * MORE)
    @given(changes)
    def check(changes: Any) -> None:
        path.write_bytes(changed(seed, changes))
        for read in (
            lambda: run.config, lambda: run.environment, run.records, run.status, run.artefacts, run.figures,
            lambda: run.load_artefact("spectra-000000001"), lambda: read_checkpoint(checkpoint), run.load_checkpoint,
            lambda: TrainConfig.from_dict(run.config), lambda: run.figure_path("report.html"), run.lock.holder,
        ):  # fmt: skip
            only_documented(read)

    check()
