from __future__ import annotations

import copy
import json
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, normal, randoms, refused, sample_losses, split, twin_of
from gramscope.errors import InputError
from gramscope.layers.jacobians import jacobian_chunks
from gramscope.measures.columns import COLUMNS, DEFAULT
from gramscope.measures.linearity import fit_linear, held_out_target_linearity
from gramscope.measures.table import Table

NAMES = [
    "mlp", "tokens", "residual", "conv2d-grouped", "encoder", "gpt", "repeated", "functions-of-weights", "lstm", "lora",
    "conv-transpose-grouped",
]  # fmt: skip
GAMMA = 5.0  # large, so that the dense difference of covariances keeps its digits


def block(A: Tensor) -> Tensor:
    """A stack of matrices as one block-diagonal matrix."""
    return torch.block_diag(*A) if A.dim() == 3 else A


def rho(A: Tensor, B: Tensor) -> float:
    return float((A * B).sum() / (A.norm() * B.norm()))


def jacobians(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with gs.capture(model) as tape:
        (chunk,) = jacobian_chunks(tape, model(x), memory=2**40)
        return chunk


def r_squared(H: Tensor, Y: Tensor, ridge: float = 0.0) -> float:
    beta = torch.linalg.pinv(H.T @ H + ridge * torch.eye(H.shape[1]), hermitian=True, rtol=1e-10) @ H.T @ Y
    return float(1 - (Y - H @ beta).square().sum() / (Y - Y.mean(0)).square().sum())


@pytest.mark.parametrize("name", NAMES)
def test_every_column_equals_the_dense_formula(name: str) -> None:
    model, x, _ = BY_NAME[name].make()
    x, y = normal(60, *x.shape[1:], seed=5), torch.arange(60) % 3
    reference = twin_of(model)
    table = gs.measure(
        model, split(x, y, 25), sample_losses, measures="all", reference=reference, held_out=(x[:30] + 0.1, y[:30]),
        gamma=GAMMA, ridge=0.5, gram=True,
    )  # fmt: skip
    with gs.capture(model) as tape:
        output = model(x)
        tape.backward(sample_losses(output, y))
    total = sample_losses(model(x), y).sum()
    assert table.network["loss"] == pytest.approx(float(total.detach()) / 60)
    J, J0 = jacobians(model, x), jacobians(reference, x)
    with gs.capture(reference) as reference_tape:
        reference(x)
    onehot = F.one_hot(y).double()
    Y = onehot - onehot.mean(0)
    checked = 0
    for record in tape:
        row = table[record.name]
        W, D, W0 = block(record.weight), block(record.D), block(reference_tape[record.name].weight)
        Sigma = block(record.Sigma)
        gamma = GAMMA / 60
        after, before = (torch.einsum("...bsd,...bse->...de", h, h) for h in (record.h - gamma * record.g, record.h))
        v = block(after - before)
        actual = (W - gamma * D).T @ (W - gamma * D) - W.T @ W
        K = block(torch.einsum("m...bsk,m...bsl->...kl", J[record.name], J[record.name])) / 60
        dJ = J[record.name] - J0[record.name]
        K_bar = block(torch.einsum("m...bsk,m...bsl->...kl", dJ, dJ)) / 60
        W_bar = W - W0
        H = record.h.mean(-2)
        H = H.movedim(0, 1).flatten(1) if H.dim() == 3 else H
        s = torch.linalg.svdvals(record.weight).flatten()
        p = s / s.sum()
        expected = {
            "weight_norm": W.norm(),
            "effective_rank": torch.exp(-(p * p.clamp(min=1e-300).log()).sum()),
            "gradient_norm": D.norm() / 60,
            "fle_residual": 0.0,
            "vcs_cosine": rho(v, actual),
            "vcs_residual": (gamma**2 * (D.T @ D - W.T @ Sigma @ W)).norm() / actual.norm(),
            "vcs_gram_cosine": rho(v, W.T @ W),
            "nfa": rho(W.T @ W, W.T @ K @ W),
            "agop_trace": torch.trace(W.T @ K @ W),
            "weight_change": W_bar.norm() / W0.norm(),
            "nfa_centered": rho(W_bar.T @ W_bar, W_bar.T @ K @ W_bar),
            "double_ratio": torch.trace(W_bar.T @ W_bar @ W_bar.T @ K_bar @ W_bar)
            / torch.trace(W_bar.T @ W_bar @ W_bar.T @ K @ W_bar),
            "target_linearity": r_squared(H, Y, 0.5),
            "surrogate": (H.T @ Y).square().sum(),
            "surrogate_linearized": (W @ H.T @ Y).square().sum(),
        }
        if record.layer.parameter is None:  # computed, so that autograd has no gradient to compare with
            del expected["fle_residual"]
        if K_bar.norm() > 0:
            expected["nfa_double"] = rho(W_bar.T @ W_bar, W_bar.T @ K_bar @ W_bar)
            expected["nfa_ptk"] = rho(W0.T @ W0, W0.T @ K_bar @ W0)
        if record.h.shape[-2] == 1:
            moved_weight = W - gamma * D
            expected["surrogate_change"] = (moved_weight @ H.T @ Y).square().sum() - expected["surrogate_linearized"]
        for measure, value in expected.items():
            assert row[measure] == pytest.approx(float(value), rel=1e-8, abs=1e-10), (record.name, measure)
            checked += 1
    assert checked >= 15 * len(tape)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_measure_alone_has_all_it_needs(name: str) -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x, y = normal(60, 5), torch.arange(60) % 3
    options = {"reference": twin_of(model), "held_out": (x[:30] + 0.1, y[:30]), "ridge": 0.5, "weight_decay": 0.1}
    needs = COLUMNS[name].needs | {"ridge"} | ({"weight_decay"} if name == "fact_residual" else set())
    own = {argument: value for argument, value in options.items() if argument in needs}
    alone = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures=name, **own)
    together = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures="all", **options)
    assert alone.column(name) == pytest.approx(together.column(name))
    elsewhere = name.startswith("nrc") or name == "weight_exponent"  # of real targets, of ten eigenvalues
    assert elsewhere or any(value is not None for value in alone.column(name).values())


def test_held_out_linearity_matches_a_fit_on_arrays() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x = normal(80, 5)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    train, test = (x[:50], y[:50]), (x[50:], y[50:])
    for intercept in (False, True):
        table = gs.measure(
            model, train, held_out=test, measures=["target_linearity_held_out"], ridge=0.1, intercept=intercept
        )
        with gs.capture(model, gradients=False) as tape:
            model(x)
        for record in tape:
            H = record.h[:, 0]
            fit = fit_linear(H[:50], y[:50], ridge=0.1, intercept=intercept)
            expected = float(held_out_target_linearity(fit, H[50:], y[50:]))
            assert table[record.name]["target_linearity_held_out"] == pytest.approx(expected, rel=1e-8)
    refused(gs.measure, model, train, measures="target_linearity_held_out", match="needs held_out=")
    wrong = gs.measure(model, (x[:50], y[:50].clamp(max=1)), held_out=(x[50:], y[50:]))
    assert "classes [2] that the training data lack" in wrong.notes["0.target_linearity_held_out"].text
    mixed = gs.measure(model, train, held_out=(x[50:], normal(30, 3)), measures=["target_linearity_held_out"])
    assert "has labels, the other real targets" in mixed.notes["0.target_linearity_held_out"].text


def test_prediction_of_theorem_3_is_exact_at_the_readout_to_first_order() -> None:
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
    x, y = normal(40, 5), torch.arange(40) % 3
    names = ["surrogate_change", "surrogate_change_predicted"]
    table = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures=names, gamma=1e-7)
    assert table["2"]["surrogate_change_predicted"] == pytest.approx(table["2"]["surrogate_change"], rel=1e-5)
    one_hot, f = nn.functional.one_hot(y).double(), model(x).detach()
    Y, E = one_hot - one_hot.mean(0), one_hot - f.softmax(1)
    for name, H in (("0", x), ("2", model[:2](x).detach())):  # written out, sample by sample
        expected = torch.einsum("jc,lc,jd,id,im,lm->", Y, Y, f, E, H, H) * 2e-7 / 40
        assert table[name]["surrogate_change_predicted"] == pytest.approx(float(expected), rel=1e-8)


def test_default_measures_without_loss_or_targets() -> None:
    model, x, y = BY_NAME["mlp"].make()
    x = x.repeat(5, 1) + torch.arange(30).reshape(30, 1) / 10
    y = y.repeat(5)
    full = gs.measure(model, (x, y), nn.CrossEntropyLoss())
    assert set(full.columns) == {n for n in DEFAULT if not COLUMNS[n].needs & {"reference", "held_out"}}
    assert "gradient_norm" not in gs.measure(model, (x, y)).columns
    alone = gs.measure(model, x)
    assert alone["0"]["target_linearity"] is None
    assert alone.notes["0.target_linearity"].text == "the loader gave no targets"
    assert alone["2"]["feature_rank"] is not None


def test_notes_instead_of_silence() -> None:
    model, x, y = BY_NAME["mlp"].make()
    table = gs.measure(model, (x, y), measures=["target_linearity", "nc3"], gram=False)
    assert table["0"]["target_linearity"] is None
    assert "HᵀH was not collected: d = 5 is large" in table.notes["0.target_linearity"].text
    few = gs.measure(model, (x, y), measures=["target_linearity"])
    assert "near 1 for any target: 6 samples" in few.notes["2.target_linearity"].text
    ridged = gs.measure(model, (x, y), measures=["target_linearity"], layers="0", ridge=1.0)
    assert "0.target_linearity" not in ridged.notes
    one_class = gs.measure(model, (x, torch.zeros(6, dtype=torch.long)), measures=["target_linearity", "nc1"])
    assert one_class["0"] == {"target_linearity": None, "nc1": None}
    bags = nn.Sequential(nn.EmbeddingBag(7, 5), nn.Linear(5, 3))
    table = gs.measure(bags, (torch.arange(8).reshape(4, 2) % 7, torch.arange(4) % 3), measures="nfa")
    assert "lookup table" in table.notes["0"].text


@pytest.mark.parametrize("width", [8, 3])  # the first layer has more outputs than inputs, or fewer
def test_many_outputs_are_sketched(width: int) -> None:
    # a standard error from four parts is itself uncertain: with 7 of 60 seeds a value is off by more than five of them
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 300)).double()
    data, names = (normal(200, 5), torch.arange(200)), ["nfa", "nfa_null", "agop_trace"]
    exact = gs.measure(model, data, measures=names, jacobians=True)
    assert not exact.errors
    assert (
        exact.notes["2.nfa"].text == "trivial: random eigenvectors of K would give ρ ≥ 0.9 too"
    )  # alike in all layers
    with_kernel = gs.measure(model, data, measures=[*names, "kernel_spread"], jacobians=True)
    for options in ({}, {"sketch": 32}):
        table = gs.measure(model, data, measures=names, **options)
        for name in ("nfa", "agop_trace"):
            value, truth, error = table["0"][name], exact["0"][name], table.errors["0"][name]
            assert value is not None
            assert truth is not None
            assert abs(value - truth) < 5 * error < 0.5 * truth
            assert truth == pytest.approx(with_kernel["0"][name])
        assert table["0"]["nfa_null"] == pytest.approx(exact["0"]["nfa_null"], abs=0.1)
        assert table["2"] == pytest.approx(exact["2"])  # the network's output is its own: J is known
    assert table.errors.keys() == {"0"}
    assert "4 random combinations of the 300 outputs" in gs.measure(model, data, measures=names).notes["(output)"].text


def test_the_readout_is_not_sketched() -> None:
    model = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 220)).double()
    data = [(normal(3, 2, 3), torch.arange(6).reshape(3, 2)), (normal(3, 3, 3), torch.arange(9).reshape(3, 3))]
    measure = partial(gs.measure, model, data, measures=["nfa", "agop_trace"], layers="2")
    found, expected = (measure(jacobians=kind) for kind in ("auto", True))
    assert not found.errors
    assert found["2"] == pytest.approx(expected["2"])
    assert found["2"]["nfa"] == pytest.approx(1.0)


def test_sketched_alignments_with_a_reference_have_little_bias() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 30)).double()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * normal(*p.shape, seed=p.numel())
    data = (normal(40, 6), torch.arange(40))
    names = ["nfa", "nfa_centered", "nfa_double", "nfa_ptk", "nfa_corrupted"]
    measure = partial(gs.measure, model, data, measures=names, reference=reference)
    exact = measure()
    assert not exact.errors
    tables = [measure(sketch=8, generator=torch.Generator().manual_seed(seed)) for seed in range(60)]
    for layer, name in [*product("02", names[:2]), *product("0", names[2:4])]:  # the readout's Jacobians do not move
        found = torch.tensor([table[layer][name] for table in tables])
        errors = torch.tensor([table.errors[layer][name] for table in tables])
        assert float(found.mean()) == pytest.approx(exact[layer][name], abs=0.6 * float(found.std()))
        assert 0.5 < float(errors.square().mean().sqrt() / found.std()) < 2
    above = [table for table in tables if (table["2"]["nfa"] or 0) > 1]
    assert above
    assert all("above 1 by chance" in table.notes["2.nfa"].text for table in above)
    assert "from a sketch of K" in tables[0].notes["0.nfa_corrupted"].text
    assert "0.nfa_corrupted" not in exact.notes


class ThreeRows(nn.Module):
    """A network with a layer whose three rows of inputs serve all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.readout = nn.Linear(2, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.readout(x + self.table(torch.ones(3, 2).double()).mean(0))
        return output


def test_features_that_cannot_be_paired_get_one_note() -> None:
    names = ["target_linearity", "surrogate", "rankme"]
    table = gs.measure(ThreeRows(), (normal(8, 4), torch.arange(8) % 3), measures=names)
    reason = "no features: its inputs have 3 rows for 8 samples, so rows and targets cannot be paired"
    assert {name: note.text for name, note in table.notes.items() if name.startswith("table")} == dict.fromkeys(
        ["table", *(f"table.{name}" for name in names)], reason
    )
    assert " ".join(str(table).split()).count(f"note: table: {reason}") == 1


def test_module_outputs_get_rows() -> None:
    model, x, y = BY_NAME["encoder"].make()
    table = gs.measure(model, (x, y), measures=["target_linearity", "weight_norm"], outputs="0", tokens=0, ridge=1.0)
    H = model[0](x)[:, 0].detach()
    Y = F.one_hot(y).double()
    assert table["0"]["target_linearity"] == pytest.approx(r_squared(H, Y - Y.mean(0), 1.0), rel=1e-8)
    assert table["0"]["weight_norm"] is None


def test_unknown_measures() -> None:
    model, x, y = BY_NAME["mlp"].make()
    refused(gs.measure, model, (x, y), measures="nfx", match="no measure 'nfx'; did you mean 'nfa'")
    refused(gs.measure, model, (x, y), measures="virtual", match="'vcs_cosine' needs loss=")
    refused(gs.measure, model, (x, y), measures="gradient_norm", match="'gradient_norm' needs loss=")
    refused(gs.measure, model, (x, y), measures="nfa_centered", match="'nfa_centered' needs reference=")
    refused(gs.measure, model, (x, y), measures=[], match="names nothing")


def test_table_prints_converts_and_round_trips() -> None:
    model, x, y = BY_NAME["mlp"].make()
    table = gs.measure(model, (x, y), nn.CrossEntropyLoss())
    text = str(table)
    assert max(map(len, text.splitlines())) <= 100
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("0", "2", "4", "layer"))] == [
        "layer",
        *"024",
    ]
    narrow = gs.measure(model, (x, y), measures=["weight_norm"])
    assert str(narrow).splitlines()[0].split() == ["layer", "weight_norm"]
    values = json.loads(json.dumps(table.to_dict()))
    assert Table.from_dict(values).to_dict() == table.to_dict()
    frame = table.to_pandas()
    assert list(frame.index) == ["0", "2", "4"]
    assert frame.loc["0", "nfa"] == table["0"]["nfa"]
    assert table.column("nfa")["4"] == table["4"]["nfa"]
    with pytest.raises(InputError, match="no row or column '9'"):
        table["9"]
    refused(table.column, "x", match="no measure 'x'")


def test_change_of_the_surrogate_for_targets_that_are_not_centred() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = normal(30, 5) + 1, normal(30, 2, seed=1) + 2
    names = ["surrogate_change", "surrogate_linearized"]
    before = gs.measure(model, (x, y), nn.MSELoss(), measures=names, gamma=0.1)["0"]
    nn.functional.mse_loss(model(x), y).backward()
    with torch.no_grad():
        model[0].weight -= 0.1 * model[0].weight.grad
    after = gs.measure(model, (x, y), measures=["surrogate_linearized"])["0"]["surrogate_linearized"]
    assert before["surrogate_change"] == pytest.approx(after - before["surrogate_linearized"], rel=1e-8)


def test_rescues_are_noted_and_scales_do_not_matter() -> None:
    x, noise = randoms((50, 2), (50, 1))
    y = x.sum(1, keepdim=True) + noise
    model = nn.Linear(2, 1).double()
    expected = gs.measure(model, (x, y), measures="target_linearity", intercept=True)["(model)"]["target_linearity"]
    moved = x * torch.tensor([1.0, 1e-7]) + torch.tensor([1e6, 1.0])
    table = gs.measure(model, (moved, y), measures="target_linearity", intercept=True)
    assert table["(model)"]["target_linearity"] == pytest.approx(expected, rel=1e-6)
    assert not table.notes
    twins = torch.stack([x[:, 0], x[:, 0] + 1e-9 * x[:, 1]], 1)
    table = gs.measure(model, (twins, y), measures="target_linearity")
    assert (
        "may be off by up to 0.8: it rests on directions of the features"
        in table.notes["(model).target_linearity"].text
    )


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_layer_of_any_scale_keeps_its_alignment(scale: float) -> None:
    """In float32 the squares of such Jacobians leave the range of the type."""
    plain, x, y = BY_NAME["mlp"].make()
    plain, x = plain.float(), x.float()
    scaled, names = copy.deepcopy(plain), ["nfa", "effective_rank"]
    with torch.no_grad():
        scaled[4].weight.mul_(scale)
    expected, found = (gs.measure(m, (x, y), measures=names) for m in (plain, scaled))
    for layer in expected:
        assert found[layer] == pytest.approx(expected[layer], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model, x, y = BY_NAME["mlp"].make()
    names = ["nfa", "effective_rank", "target_linearity", "feature_rank", "nc1", "surrogate_normalized", "vcs_cosine"]
    x, y = torch.cat([x, x.flip(1), x + 1, x - 1]), y.repeat(4)
    expected = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures=names, ridge=0.1)
    found = gs.measure(model.to(dtype), (x.to(dtype), y), nn.CrossEntropyLoss(), measures=names, ridge=0.1)
    for layer in expected:
        assert found[layer] == pytest.approx(expected[layer], rel=0.1)


def test_nc4_reads_the_data_again() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x, y = normal(40, 5, seed=1), torch.arange(40) % 3
    table = gs.measure(model, split(x, y, 15), measures=["nc3", "nc4"])
    with gs.capture(model, gradients=False) as tape:
        model(x)
    expected = gs.neural_collapse(tape["4"].h[:, 0], y, model[4])
    assert table["4"]["nc4"] == expected.nc4
    assert table["4"]["nc3"] == pytest.approx(expected.nc3)
    assert 0.2 < expected.nc4 < 0.9  # a number that says something
    assert "only at the readout" in table.notes["0.nc4"].text
    tokens, x, y = BY_NAME["tokens"].make()
    with gs.capture(tokens, gradients=False) as tape:
        tokens(x)
    expected = gs.neural_collapse(tape["2"].h.mean(-2), y, tokens[2])  # rows are means over sites, as those of nc1
    assert gs.measure(tokens, (x, y), measures="nc4")["2"]["nc4"] == expected.nc4


def test_weights_that_are_shared_have_no_gradient_of_their_own() -> None:
    model, x, y = BY_NAME["tied"].make()
    table = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures="fle_residual")
    assert table["head"]["fle_residual"] == pytest.approx(0.0, abs=1e-12)
    for name in ("a", "b"):
        assert table[name]["fle_residual"] is None
        assert "shared with another module" in table.notes[f"{name}.fle_residual"].text


def test_nothing_is_undefined_without_a_note() -> None:
    model, x, y = BY_NAME["mlp"].make()
    one = gs.measure(model, (x[:1], y[:1]), measures=["feature_rank", "nfa"])
    assert one["0"]["feature_rank"] is None
    assert "one row of features" in one.notes["0.feature_rank"].text
    with torch.no_grad():
        model[2].weight.zero_()
    dead = gs.measure(model, (x, y), measures=["nfa", "effective_rank"])
    assert dead["2"]["nfa"] != dead["2"]["nfa"]
    for key in ("2.nfa", "2.effective_rank"):
        assert "undefined: a side of the quotient is zero" in dead.notes[key].text


def test_the_rounding_of_float32_features_is_no_loss() -> None:
    """Layer norm leaves one direction empty up to rounding, which in float32 is not small enough to be exactly zero."""
    model = nn.Sequential(nn.Linear(40, 32), nn.LayerNorm(32), nn.Linear(32, 3))
    x = torch.randn(60, 40, generator=torch.Generator().manual_seed(0))
    table = gs.measure(model, (x, torch.arange(60) % 3), measures=["target_linearity"])
    assert "2.target_linearity" not in table.notes
