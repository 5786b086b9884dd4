"""The columns of later papers through ``gs.measure``, against dense formulas on captured rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, normal, sample_losses, split, twin_of
from gramscope.layers.jacobians import jacobian_chunks
from gramscope.measures.later_columns import LATER_COLUMNS

LATER = [column.name for column in LATER_COLUMNS]
LATER_OF_FEATURES = {column.name for column in LATER_COLUMNS if column.of_features}


def block(A: Tensor) -> Tensor:
    return torch.block_diag(*A) if A.dim() == 3 else A


def rho(A: Tensor, B: Tensor) -> float:
    return float((A * B).sum() / (A.norm() * B.norm()))


@pytest.mark.parametrize("name", ["mlp", "encoder", "conv2d-grouped"])
def test_columns_equal_dense_formulas(name: str) -> None:
    model, x, _ = BY_NAME[name].make()
    x, y = normal(60, *x.shape[1:], seed=5), torch.arange(60) % 3
    reference = twin_of(model)
    table = gs.measure(model, split(x, y, 25), sample_losses, measures=LATER, reference=reference, weight_decay=0.2)
    with gs.capture(model) as tape:
        output = model(x)
        (J,) = jacobian_chunks(tape, output, memory=2**40)
        tape.backward(sample_losses(output, y))
    with gs.capture(reference) as reference_tape:
        reference(x)
    Y = F.one_hot(y).double() - 1 / 3
    names = [record.name for record in tape]
    for record in tape:
        W, D, Sigma = block(record.weight), block(record.D) / 60, block(record.Sigma)
        change = record.weight - reference_tape[record.name].weight
        h = record.h.mean(-2)
        H = h.movedim(0, 1).flatten(1) if h.dim() == 3 else h
        C = block(h.mT @ h)
        K = block(torch.einsum("m...bsk,m...bsl->...kl", J[record.name], J[record.name])) / 60
        values, vectors = torch.linalg.eigh(W.T @ K @ W)
        power = 1 / (len(names) - names.index(record.name))
        raised = torch.where(values > 1e-13 * values[-1], values.clamp(min=1e-300) ** power, 0.0)
        s, g = torch.linalg.svdvals(H), torch.linalg.svdvals(D)
        p = s / s.sum() + 1e-7
        k, d = record.weight.shape[-2:]
        expected = {
            "fact": rho(W.T @ W, -W.T @ D),
            "fact_residual": (W.T @ W + W.T @ D / 0.2).norm() / (W.T @ W).norm(),
            "crh_inputs_rg": rho(C, W.T @ Sigma @ W),
            "crh_inputs_rw": rho(C, W.T @ W),
            "crh_inputs_gw": rho(W.T @ Sigma @ W, W.T @ W),
            "crh_outputs_rg": rho(W @ C @ W.T, Sigma),
            "crh_outputs_rw": rho(W @ C @ W.T, W @ W.T),
            "crh_outputs_gw": rho(Sigma, W @ W.T),
            "log_alignment": 1
            + math.log((W @ C @ W.T).trace() / W.square().sum() / C.trace()) / (2 * math.log(len(C))),
            "spectral_weight": torch.linalg.matrix_norm(W, 2) / math.sqrt(k / d),
            "spectral_change": torch.linalg.matrix_norm(block(change), 2) / math.sqrt(k / d),
            "gradient_nuclear_rank": g.sum() ** 2 / g.square().sum(),
            "input_stable_rank": s.square().sum() / s[0] ** 2,
            "nfa_depth": rho(W.T @ W, (vectors * raised) @ vectors.T),
            "kernel_target_alignment": rho(H @ H.T, Y @ Y.T),
        }
        row = table[record.name]
        for measure, value in expected.items():
            assert row[measure] == pytest.approx(float(value), rel=1e-7), (record.name, measure)
        assert row["rankme"] == pytest.approx(float(torch.exp(-(p * p.log()).sum())), rel=1e-6)
        assert row["nfa_fitted"] >= max(row["nfa_depth"], rho(W.T @ W, W.T @ K @ W)) - 1e-9
        assert "the columns nc1 to nc4 are for labels" in table.notes[f"{record.name}.nrc1"].text


def test_alignment_of_independent_and_of_common_directions() -> None:
    layer, x = nn.Linear(300, 200, bias=False).double(), normal(500, 300)
    assert gs.measure(layer, x, measures="log_alignment")["(model)"]["log_alignment"] == pytest.approx(0.5, abs=0.01)
    layer.weight.data = torch.outer(normal(200), x[0])
    one = gs.measure(layer, x[:1].expand(9, 300), measures="log_alignment")
    assert one["(model)"]["log_alignment"] == pytest.approx(1.0)
    narrow = gs.measure(nn.Linear(1, 2), torch.rand(5, 1), measures="log_alignment")
    assert "base 1" in narrow.notes["(model).log_alignment"].text


def test_a_net_trained_with_weight_decay_converges_to_the_theorem() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = normal(50, 4)
    y = torch.stack([x[:, 0] * 2, torch.tanh(x[:, 1] - x[:, 2])], 1)
    names = ["fact", "fact_residual"]
    before = gs.measure(net, (x, y), nn.MSELoss(), measures=names, weight_decay=0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    for _ in range(3000):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    after = gs.measure(net, (x, y), nn.MSELoss(), measures=names, weight_decay=0.01)
    for layer in ("0", "2"):
        assert before[layer]["fact_residual"] > 1
        assert after[layer]["fact"] == pytest.approx(1.0, abs=1e-4)
        assert after[layer]["fact_residual"] == pytest.approx(0.0, abs=1e-3)
    for decay, reason in ((None, "pass weight_decay="), (0.0, "give the positive λ")):
        table = gs.measure(net, (x, y), nn.MSELoss(), measures="fact_residual", weight_decay=decay)
        assert reason in table.notes["0.fact_residual"].text


def test_collapse_of_regression_targets() -> None:
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    x, y = normal(40, 5), normal(40, 2, seed=1)
    table = gs.measure(model, split(x, y, 15), measures=["nrc1", "nrc2", "nrc3", "alpha_req"])
    with gs.capture(model, gradients=False) as tape:
        model(x)
    H = tape["2"].h[:, 0]
    H = H - H.mean(0)
    values = torch.linalg.svdvals(H).square()
    Q = torch.linalg.qr(model[2].weight.detach().T)[0]
    assert table["2"]["nrc1"] == pytest.approx(float(values[2:].sum() / values.sum()))
    assert table["2"]["nrc2"] == pytest.approx(float((H - H @ Q @ Q.T).square().sum() / H.square().sum()))
    assert 0 < table["2"]["nrc3"] < 4
    assert table["2"]["alpha_req"] > 0
    assert "as many outputs as inputs" in table.notes["0.nrc2"].text
    assert "only at the readout" in table.notes["0.nrc3"].text


def test_outputs_of_modules_have_the_columns_of_features() -> None:
    model, x, y = BY_NAME["encoder"].make()
    table = gs.measure(model, (x, y), sample_losses, measures=LATER, outputs="0", reference=twin_of(model))
    row = table["0"]
    assert {name for name, value in row.items() if value is not None} == LATER_OF_FEATURES - {"nrc1"}


def test_without_targets_or_gram_there_is_a_note() -> None:
    model, x, y = BY_NAME["mlp"].make()
    alone = gs.measure(model, x, measures=["kernel_target_alignment", "nrc1", "rankme"])
    assert alone["0"]["rankme"] is not None
    assert alone.notes["0.kernel_target_alignment"].text == alone.notes["0.nrc1"].text == "the loader gave no targets"
    small = gs.measure(model, (x, y), measures=["rankme", "crh_inputs_rw"], gram=False)
    for name in ("rankme", "crh_inputs_rw"):
        assert "HᵀH was not collected" in small.notes[f"0.{name}"].text


def test_wide_layers_with_few_rows() -> None:
    """Above d = 512 rows are kept while they are fewer than d, in place of HᵀH."""
    model = nn.Linear(600, 2).double()
    x, y = normal(20, 600) + 0.2, normal(20, 2, seed=1)
    names = [column.name for column in LATER_COLUMNS if "features" in column.needs]
    few, dense = (gs.measure(model, (x, y), nn.MSELoss(), measures=names, gram=gram) for gram in ("auto", True))
    for name in names:
        assert few["(model)"][name] is not None, name
        assert few["(model)"][name] == pytest.approx(dense["(model)"][name], rel=1e-7), name


def test_labels_that_are_too_many() -> None:
    labels = torch.arange(40) * 100
    table = gs.measure(nn.Linear(5, 3).double(), (normal(40, 5), labels), measures=["kernel_target_alignment", "nrc1"])
    assert "needs all labels" in table.notes["(model).kernel_target_alignment"].text
    assert "nc1 to nc4 are for labels" in table.notes["(model).nrc1"].text
