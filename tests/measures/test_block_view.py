"""The block view of a table: nothing lost, deep nets wrapped, two stacks told apart."""

from __future__ import annotations

import pytest

from gramscope.errors import InputError
from gramscope.measures.table import Table


def test_every_value_has_its_place() -> None:
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    rows: dict[str, dict[str, float | None]] = {
        f"model.layers.{b}.{kind}": {"nfa": b + i / 10, "nc1": None} for b in range(30) for i, kind in enumerate(kinds)
    }
    rows["lm_head"] = {"nfa": 0.5, "nc1": 1.0}
    view = Table(rows).by_block("nfa")
    assert view["nfa"]["mlp.gate_proj"][7] == pytest.approx(7.2)
    assert view["nfa"]["lm_head"] == {None: 0.5}
    lines = str(view).split("\n")
    assert max(map(len, lines)) <= 120
    headers = [line.split()[1:] for line in lines if line.startswith("nfa")]
    assert [int(b) for header in headers for b in header] == list(range(30))
    shown = [float(v) for line in lines if line.startswith("mlp.gate_proj") for v in line.split()[1:]]
    assert shown == pytest.approx([b + 0.2 for b in range(30)])
    assert set(Table(rows).by_block().values) == {"nfa", "nc1"}
    with pytest.raises(InputError, match="no measure 'nfb'"):
        Table(rows).by_block("nfb")


def test_encoder_and_decoder_are_told_apart() -> None:
    rows: dict[str, dict[str, float | None]] = {
        f"{stack}.block.0.layer.0.q": {"nfa": value} for stack, value in (("encoder", 0.1), ("decoder", 0.2))
    }
    assert Table(rows).by_block()["nfa"] == {
        "encoder.block: layer.0.q": {0: 0.1},
        "decoder.block: layer.0.q": {0: 0.2},
    }


def test_a_plain_net_is_a_list() -> None:
    assert str(Table({"0": {"nfa": 0.5}, "2": {"nfa": 0.25}}).by_block()) == "nfa\n0  0.5000\n2  0.2500"


def test_outputs_of_blocks_are_the_residual_stream() -> None:
    rows: dict[str, dict[str, float | None]] = {
        "h.0.fc": {"nfa": 0.1, "nc1": 1.0}, "h.1.fc": {"nfa": 0.2, "nc1": 2.0},
        "h.0": {"nfa": None, "nc1": 3.0}, "h.1 (output)": {"nfa": None, "nc1": 4.0}, "head": {"nfa": 0.3, "nc1": 5.0},
    }  # fmt: skip
    view = Table(rows).by_block()
    assert view["nc1"]["(residual stream)"] == {0: 3.0, 1: 4.0}
    assert set(view["nfa"]) == {"fc", "head"}
