"""Every reader and parser as a function of bytes, with valid content to change.

A reader may raise a ``GramscopeError`` and nothing else. It gets :data:`MOST_BYTES` of memory and :data:`MOST_SECONDS` of the
processor's time; beyond them it fails with a ``MemoryError`` or a ``TimeoutError``.
"""

from __future__ import annotations

import gzip
import io
import resource
import signal
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramscope.errors import GramscopeError, GramscopeWarning
from gramscope_lab.cli.flags import parse_assignments, read_config
from gramscope_lab.cli.runs import summary
from gramscope_lab.data import load
from gramscope_lab.data.images import read_idx, read_svhn
from gramscope_lab.report.page import render
from gramscope_lab.report.read import read_runs
from gramscope_lab.runs.checkpoints import read_tensors
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.records import truncate_records
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.layer_measures import load_weights
from official_files import idx_bytes, random_images, write_svhn

#: memory and processor time that one small input may take
MOST_BYTES, MOST_SECONDS = 500 << 20, 5
STATUS = Path("/proc/self/statm")


@contextmanager
def limited() -> Iterator[None]:
    """Let an allocation beyond the limit fail, as on a small machine, and interrupt work that does not end."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if STATUS.exists():
        now = int(STATUS.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, before[1]))
    handler = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _too_long(signal: int, frame: object) -> None:
    raise TimeoutError(f"took more than {MOST_SECONDS} s of the processor's time")


def only_documented(read: Callable[[], object]) -> None:
    """Call a reader; errors that it documents are no failure."""
    with warnings.catch_warnings(), suppress(GramscopeError), limited():
        warnings.simplefilter("ignore", GramscopeWarning)
        read()


@dataclass(frozen=True)
class Target:
    """A reader: ``seeds`` gives valid contents, ``read`` reads one that may be damaged, in a folder of its own."""

    seeds: Callable[[Path], list[bytes]]
    read: Callable[[Path, bytes], None]


# -- data files ---------------------------------------------------------------------------------------------------
def file_target(name: str, reader: Callable[[Path], object], *seeds: Callable[[Path], bytes]) -> Target:
    """A reader of one file called ``name``."""

    def read(folder: Path, content: bytes) -> None:
        (folder / name).write_bytes(content)
        only_documented(lambda: reader(folder / name))

    return Target(lambda folder: [seed(folder) for seed in seeds], read)


def _mat(compressed: bool) -> Callable[[Path], bytes]:
    def make(folder: Path) -> bytes:
        write_svhn(folder, *random_images(1, (3, 32, 32), 10), "seed.mat", compressed=compressed)
        return (folder / "seed.mat").read_bytes()

    return make


def _npz(save: Callable[..., None]) -> Callable[[Path], bytes]:
    def make(folder: Path) -> bytes:
        x, y = np.arange(12.0).reshape(4, 3), np.arange(4) % 2
        save(folder / "seed.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        return (folder / "seed.npz").read_bytes()

    return make


def _npz_header(folder: Path, content: bytes) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': " + content[:60_000]
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(32)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{key}.npy", array)
    (folder / "a.npz").write_bytes(file.getvalue())
    only_documented(lambda: load(str(folder / "a.npz")))


IDX = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


def _npz_file(path: Path) -> object:
    return load(str(path))


def _weights(**options: bool) -> Callable[[Path], bytes]:
    def make(_: Path) -> bytes:
        file = io.BytesIO()
        torch.save(torch.nn.Linear(3, 2).state_dict(), file, **options)
        return file.getvalue()

    return make


def _pickle_in_weights(folder: Path, content: bytes) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in (("data.pkl", content), ("version", b"3\n"), ("data/0", bytes(24)), ("data/1", bytes(8))):
            archive.writestr(f"a/{name}", part)
    (folder / "a.pt").write_bytes(file.getvalue())
    only_documented(lambda: load_weights(torch.nn.Linear(3, 2), folder / "a.pt"))


def _pickle(folder: Path) -> bytes:
    with zipfile.ZipFile(io.BytesIO(_weights()(folder))) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def _linear_weights(path: Path) -> object:
    return load_weights(torch.nn.Linear(3, 2), path)


DATA = {
    "idx": file_target("a", lambda path: read_idx(path, 3), lambda _: IDX),
    "idx.gz": file_target("a.gz", lambda path: read_idx(path, 3), lambda _: gzip.compress(IDX, mtime=0)),
    "mat": file_target("a.mat", read_svhn, _mat(False)),
    "mat, compressed": file_target("a.mat", read_svhn, _mat(True)),
    "npz": file_target("a.npz", _npz_file, _npz(np.savez)),
    "npz, compressed": file_target("a.npz", _npz_file, _npz(np.savez_compressed)),
    "npz header": Target(lambda _: [b"(4, 1), }", b"(2,2), 'descr': '<i8'}"], _npz_header),
    "weights": file_target("a.pt", _linear_weights, _weights(), _weights(_use_new_zipfile_serialization=False)),
    "pickle in weights": Target(lambda folder: [_pickle(folder)], _pickle_in_weights),
}


# -- configurations and flags -------------------------------------------------------------------------------------
CONFIG = {
    "seeds": [0, 1], "epochs": 2.0, "batch_size": 8, "data": {"name": "digits", "seed": 1},
    "model": {"name": "mlp", "hidden": [4]}, "method": {"name": "sgd", "lr": 0.1}, "measure": {"every": 1.0, "names": ["nfa"]},
    "sweep": {"method.lr": [0.1, 0.2]}, "schedule": {"name": "cosine"},
}  # fmt: skip


def _flags(folder: Path, content: bytes) -> None:
    one, _, other = content.decode("utf-8", "replace").partition("\0")
    for read in (
        lambda: parse_assignments([one]),
        lambda: read_config(None, {}, [one], [other]),
        lambda: read_config(None, {}, [], [], one),
    ):
        only_documented(read)


TEXTS = {
    "configuration": file_target(
        "a.toml", TrainConfig.from_toml, lambda _: TrainConfig.from_dict(CONFIG).to_toml().encode()
    ),
    "flags": Target(lambda _: [b"method.lr=0.1\0lr=0.1,0.2", b"3", b"0,3,7", b"model.hidden=[4, 4]\0x=1"], _flags),
}


# -- run directories ----------------------------------------------------------------------------------------------
def run_with_files(folder: Path) -> RunDirectory:
    """A small run with one file of every kind."""
    if (folder / "run").exists():
        return RunDirectory(folder / "run")
    run = RunDirectory.create(folder / "run", TrainConfig.from_dict(CONFIG).to_dict())
    run.write_environment({"torch": "2", "device": "cpu", "command": ["gramscope"]})
    for step in (1, 2):
        run.append(
            {"kind": "evaluation", "step": step, "epoch": step / 2, "test_loss": 0.5, "test_accuracy": 0.25},
            {"kind": "measurement", "step": step, "layer": "fc", "nfa": 0.5, "nc1": None},
            {"step": step, "layers": {"fc": {"nfa": 0.5}}, "network": {"loss": 2.0}, "notes": {}},
        )
    run.append({"kind": "end", "finished": True})
    run.save_checkpoint(1, {"w": torch.ones(2, 2)}, {"m": torch.ones(3), "training": {"a": [1]}})
    run.save_artefact("spectra-000000001", {"layer": torch.ones(3)})
    run.save_artefact("diagonals-000000001", {"layer/nfm": torch.ones(2, 2), "layer/agop": torch.ones(3, 2, 2)})
    return run


CHECKPOINT = "checkpoints/step-000000001.safetensors"


def _run_target(name: str) -> Target:
    """Everything that reads a run directory, with one of its files damaged."""

    def seeds(folder: Path) -> list[bytes]:
        path = run_with_files(folder).path / name
        return [path.read_bytes() if path.exists() else b'{"pid": 1, "host": "here"}']

    def read(folder: Path, content: bytes) -> None:
        run = run_with_files(folder)
        (run.path / name).write_bytes(content)
        for reader in run_readers(run):
            only_documented(reader)

    return Target(seeds, read)


def run_readers(run: RunDirectory) -> list[Callable[[], object]]:
    """Everything that reads a run directory."""

    def cut() -> None:
        copy = run.path / "cut"
        copy.write_bytes((run.path / "records.jsonl").read_bytes())
        truncate_records(copy, 10)

    return [
        lambda: run.config, lambda: run.environment, run.records, run.status, run.artefacts, run.figures,
        lambda: run.load_artefact("spectra-000000001"), run.load_checkpoint, lambda: read_tensors(run.path / CHECKPOINT),
        lambda: TrainConfig.from_dict(run.config), run.lock.described, run.lock.held_by_other, cut,
        lambda: summary(run),
    ]  # fmt: skip


def read_page(run: RunDirectory) -> None:
    """Make the report's page."""
    render(read_runs([run.path]))


def _report_target(name: str) -> Target:
    """The page of a run with one of its files damaged."""

    def read(folder: Path, content: bytes) -> None:
        run = run_with_files(folder)
        (run.path / name).write_bytes(content)
        only_documented(lambda: read_page(run))

    return Target(_run_target(name).seeds, read)


RUNS = {
    **{
        f"run, {name}": _run_target(name)
        for name in ("config.toml", "environment.json", "records.jsonl", "lock.json",
                     "artefacts/spectra-000000001.safetensors", CHECKPOINT)
    },
    "report": _report_target("records.jsonl"),
    **{
        f"report, {name}": _report_target(name)
        for name in ("config.toml", "environment.json", "artefacts/spectra-000000001.safetensors",
                     "artefacts/diagonals-000000001.safetensors")
    },
}  # fmt: skip

TARGETS: dict[str, Target] = {**DATA, **TEXTS, **RUNS}


def corpus(name: str) -> list[bytes]:
    """Inputs that a long search found worth keeping."""
    folder = Path(__file__).parent / "corpus" / name.replace("/", "_")
    return [path.read_bytes() for path in sorted(folder.glob("*"))]


__all__: list[Any] = ["CONFIG", "TARGETS", "Target", "corpus", "only_documented"]
