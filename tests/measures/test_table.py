"""Tables as text within the width of a page, by block with nothing lost, and the listing of columns."""

from __future__ import annotations

from pathlib import Path

import pytest

import gramscope as gs
from gramscope.errors import InputError, Note
from gramscope.linalg.measured import Measured
from gramscope.measures.columns import COLUMNS, DEFAULT, columns_of
from gramscope.measures.table import Table


def test_every_value_has_its_place() -> None:
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    rows: dict[str, dict[str, float | None]] = {
        f"model.layers.{b}.{kind}": {"nfa": b + i / 10, "nc1": None} for b in range(30) for i, kind in enumerate(kinds)
    }
    rows["lm_head"] = {"nfa": 0.5, "nc1": 1.0}
    view = Table(rows).by_block("nfa")
    assert max(map(len, str(view).splitlines())) <= 80
    assert view["nfa"]["mlp.gate_proj"][7] == pytest.approx(7.2)
    assert view["nfa"]["lm_head"] == {None: 0.5}
    lines = str(view).split("\n")
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


def deep_table() -> Table:
    """Twenty layers with a common prefix, many columns, an estimate and a trivial value."""
    rows: dict[str, dict[str, float | None]] = {
        f"model.decoder.layers.{i}.mlp.fc": dict.fromkeys(COLUMNS, 0.25 * i) for i in range(20)
    }
    rows["head"] = {"nfa": Measured(0.95, 0.012, "trivial: random eigenvectors too")}
    return Table(rows, {"loss": 0.5}, {"head.nfa": Note("remark", "trivial: random eigenvectors too " * 9)})


def test_layers_are_rows_and_lines_fit_the_page() -> None:
    text = str(deep_table())
    assert max(map(len, text.splitlines())) <= 100
    assert "… stands for model.decoder.layers." in text
    blocks = text.split("\n\n")
    for block in blocks:  # the same rows in each group of columns
        lines = block.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("layer"))
        assert [line.split()[0] for line in lines[start + 1 : start + 22]] == [
            *(f"…{i}.mlp.fc" for i in range(20)),
            "head",
        ]
    assert "0.95* ± 0.01" in text
    shown = " ".join(block.split("…0.mlp.fc")[0] for block in blocks)  # headings in several lines, nothing left out
    assert all(part in shown for name in COLUMNS for part in name.split("_"))


def test_errors_and_marks_are_everywhere() -> None:
    table = deep_table()
    assert table.errors == {"head": {"nfa": 0.012}}
    assert "0.95* ± 0.01" in table._repr_html_()
    assert "0.95* ± 0.01" in str(table.by_block("nfa"))
    frame = table.to_pandas(errors=True)
    assert frame.loc["head", "nfa ±"] == 0.012
    assert table.column("nfa")["head"] == pytest.approx(0.95)


def test_columns_by_name_group_and_all() -> None:
    every = frozenset().union(*(column.needs for column in COLUMNS.values()))
    assert [c.name for c in columns_of(None, every)] == list(DEFAULT)
    assert [c.name for c in columns_of("all", every)] == list(COLUMNS)
    virtual = [c.name for c in columns_of(["nc1", "virtual", "vcs_cosine"], every)]
    assert virtual == ["nc1", "vcs_cosine", "vcs_residual", "vcs_gram_cosine", "vcs_null"]
    assert [c.name for c in columns_of("weights", set())] == ["weight_norm", "spectral_weight"]  # no reference is given
    with pytest.raises(InputError, match="did you mean 'spectra'"):
        columns_of("spectre", every)


def test_the_listing_has_one_line_for_each_column() -> None:
    lines = str(gs.measures()).splitlines()
    assert max(map(len, lines)) <= 100
    listed = [line.strip(" *").split()[0] for line in lines if line.startswith(" ")]
    assert sorted(listed) == sorted(COLUMNS)
    assert {line.strip(" *").split()[0] for line in lines if line.startswith(" *")} == set(DEFAULT)
    assert [column.group for column in gs.measures("collapse", "nfa")].count("collapse") == len(gs.measures("collapse"))


@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_files_give_back_every_float_error_and_note(ending: str, tmp_path: Path) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    rows: dict[str, dict[str, float | None]] = {
        "fc": {"nfa": Measured(0.1 + 0.2, 1e-3), "nc1": None, "vcs_norm": 5e-324},
        "out": {"nfa": Measured(0.95, remark="trivial: so is chance"), "nc1": float("inf"), "vcs_norm": -0.0},
    }
    notes = {"fc.nc1": Note("undefined", "few labels"), "out.nfa": Note("remark", "trivial: so is chance")}
    table = Table(rows, {"loss": 0.7, "accuracy": None}, notes)
    table.save(tmp_path / f"a.{ending}")
    found = Table.load(tmp_path / f"a.{ending}")
    assert (found.rows, found.network, found.notes) == (table.rows, table.network, table.notes)
    assert found.errors["fc"]["nfa"] == pytest.approx(1e-3)
    assert str(found) == str(table)
    assert [p.name for p in tmp_path.iterdir()] == [f"a.{ending}"]
    gs.Series({0: table, 1: table}).save(tmp_path / f"b.{ending}")
    with pytest.raises(InputError, match=r"holds 2 tables; read it with gs\.Series\.load"):
        Table.load(tmp_path / f"b.{ending}")


def test_files_of_other_endings_or_contents_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in \.json or \.parquet"):
        Table({}).save(tmp_path / "a.csv")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(InputError, match="holds no table"):
        Table.load(tmp_path / "a.json")


def test_differences_have_the_errors_of_both_and_name_what_only_one_has() -> None:
    a = Table({"fc": {"nfa": Measured(0.5, 0.03), "nc1": 2.0}, "new": {"nfa": 0.1}}, {"loss": 1.0})
    b = Table({"fc": {"nfa": Measured(0.25, 0.04), "nc1": None}}, {"loss": 3.0})
    found = a - b
    assert found["fc"]["nfa"] == 0.25
    assert found.errors["fc"]["nfa"] == pytest.approx(0.05)
    assert found["fc"]["nc1"] is None
    assert found.network == {"loss": -2.0}
    assert list(found.notes) == ["new"]
    assert a["nfa"]["new"] == 0.1


@pytest.mark.parametrize("backend", ["matplotlib", "plotly"])
def test_figures_show_kinds_by_block_or_a_line_with_its_null(backend: str) -> None:
    pytest.importorskip(backend)
    deep = Table(
        {f"h.{i}.{kind}": {"nfa": i + len(kind)} for i in range(3) for kind in ("q", "fc")} | {"head": {"nfa": 9}}
    )
    flat = Table({"0": {"nfa": 0.5, "nfa_null": 0.1}, "2": {"nfa": 0.6, "nfa_null": 0.2}})
    figures = [deep.plot("nfa", backend), flat.plot("nfa", backend)]  # type: ignore[arg-type]
    if backend == "plotly":
        assert [list(row) for row in figures[0].data[0].z] == [[1, 2, 3], [2, 3, 4]]
        assert [trace.name for trace in figures[1].data] == ["nfa", "nfa_null"]
    else:
        assert figures[0].axes[0].images[0].get_array().tolist() == [[1, 2, 3], [2, 3, 4]]
        assert [line.get_label() for line in figures[1].axes[0].lines] == ["nfa", "nfa_null"]


def test_a_column_without_numbers_can_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    assert Table({"block.0.fc": {"nc1": None}, "block.1.fc": {"nc1": None}}).plot("nc1") is not None
