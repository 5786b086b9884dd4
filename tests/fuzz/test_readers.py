"""Damaged and hostile input for every reader: only documented errors, little memory, and no hanging.

Hypothesis changes valid files. ``GRAMSCOPE_FUZZ`` multiplies the number of examples, for a long search by hand; inputs
that such searches found worth keeping are in ``corpus``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets import CONFIG, TARGETS, corpus, only_documented, read_page, run_readers, run_with_files
from gramscope_lab.cli import runs
from gramscope_lab.cli.flags import read_config
from gramscope_lab.training.config import TrainConfig

runs_command = typer.main.get_command(runs.app)
MORE = int(os.environ.get("GRAMSCOPE_FUZZ", "1"))
#: inputs a reader gets; those of whole run directories are slower
MANY, FEW = 150 * MORE, 60 * MORE

fuzz = settings(
    max_examples=MANY,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

NUMBERS = [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]
TOKENS = [b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"\r\n", b"\n\n", b"9" * 5000, b"[" * 5000, b"null", b"\xff"]
change = st.one_of(
    st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=8) | st.sampled_from(TOKENS)),
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


@pytest.mark.parametrize("name", TARGETS)
def test_reader(name: str, tmp_path: Path, record_property: Any) -> None:
    target = TARGETS[name]
    seeds, kept = target.seeds(tmp_path), corpus(name)
    for content in kept:
        target.read(tmp_path, content)
    count = len(kept)

    @settings(fuzz, max_examples=FEW if name.startswith(("run", "report")) else MANY)
    @given(st.sampled_from(seeds), st.lists(change, min_size=1, max_size=6))
    def check(seed: bytes, changes: Any) -> None:
        nonlocal count
        count += 1
        target.read(tmp_path, changed(seed, changes))

    check()
    record_property("fuzz", f"{name}|{count}")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_configurations_of_any_values(record_property: Any) -> None:
    count = 0

    @fuzz
    @given(st.sampled_from([*CONFIG, "loss", "dtype", "device", "keep"]), st.text(max_size=8), values)
    def check(key: str, inner: str, value: Any) -> None:
        nonlocal count
        table = CONFIG.get(key)
        inside = {name: {**table, name: value} for name in (*table, inner)} if isinstance(table, dict) else {}
        for changed in (value, *inside.values()):
            count += 1
            only_documented(lambda changed=changed: TrainConfig.from_dict({**CONFIG, key: changed}))  # type: ignore[misc]

    check()
    record_property("fuzz", f"values of a configuration|{count}")


KINDS = ("evaluation", "measurement", "end", "claim")
KEYS = (
    "step", "epoch", "seconds", "run", "seed", "layer", "layers", "network", "notes", "finished", "reason",
    "test_accuracy", "test_loss", "nfa", "claim",
)  # fmt: skip
anything = (
    st.sampled_from([[], {}, [[]], {"": {}}, None, -1, 10**400, 1e308, float("nan"), "\ud800", "\x1b[2J"]) | values
)
record = st.fixed_dictionaries({"kind": st.sampled_from(KINDS)}, optional=dict.fromkeys(KEYS, anything))


def test_records_of_any_values(tmp_path: Path, record_property: Any) -> None:
    run, count = run_with_files(tmp_path), 0
    sound = (run.path / "records.jsonl").read_text().splitlines()
    show = [("list", str(tmp_path)), ("show", str(run.path)), ("show", str(run.path), "--json")]
    commands = [(lambda words=words: runs_command(words, standalone_mode=False)) for words in show]

    @settings(fuzz, max_examples=FEW)
    @given(st.lists(record, min_size=1, max_size=4), st.booleans())
    def check(found: list[dict[str, Any]], beside: bool) -> None:
        nonlocal count
        count += 1
        lines = [json.dumps(each, default=str) for each in found]
        (run.path / "records.jsonl").write_text("\n".join([*(sound if beside else ()), *lines]) + "\n")
        for read in (*run_readers(run), lambda: read_page(run), *commands):
            only_documented(read)

    check()
    record_property("fuzz", f"values of records|{count}")


setting = st.tuples(
    st.sampled_from(["seeds", "epochs", "data.seed", "model.hidden", "method.lr", "sweep.x", "lr", "x", ""]),
    st.text("0123456789.,-+eE[]{}\"'=#tnTruefals \n\x1b∞", max_size=30) | st.integers(10**18, 10**400).map(str),
).map("=".join)


@fuzz
@given(setting, setting, st.text("0123456789,-+ e²", max_size=12) | st.integers(10**5, 10**30).map(str))
def test_flags_of_the_right_form(one: str, other: str, seeds: str) -> None:
    only_documented(lambda: read_config(None, {}, [one], []))
    only_documented(lambda: read_config(None, {}, [], [other]))
    only_documented(lambda: read_config(None, {}, [], [], seeds))


def test_deep_flags() -> None:
    for text in ("[" * 100_000, "{a=" * 5_000, "9" * 10_000):
        only_documented(lambda text=text: read_config(None, {}, [f"x={text}"], []))  # type: ignore[misc]
