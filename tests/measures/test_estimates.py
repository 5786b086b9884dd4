"""Measures of layers whose matrices do not fit the budget: near the dense ones, mergeable, and within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from comparing import collected
from gramscope.linalg.budget import Budget
from gramscope.linalg.stochastic import probes
from gramscope.statistics.matrix_sums import Covariance, Gradient, Kernel
from gramscope.statistics.sums import Plan
from live_bytes import LiveBytes

EXACT = ("weight_norm", "gradient_norm", "weight_change", "surrogate", "surrogate_linearized", "target_linearity")
ESTIMATED = (
    "effective_rank", "stable_rank", "gradient_nuclear_rank", "spectral_weight", "vcs_cosine", "vcs_residual",
    "vcs_gram_cosine", "vcs_null", "nfa", "nfa_null", "nfa_above", "agop_trace", "fact", "fact_residual", "crh_inputs_rg",
    "crh_inputs_rw", "crh_inputs_gw", "crh_outputs_rw",
)  # fmt: skip
MOVED = ("nfa_centered", "nfa_double", "nfa_ptk", "double_ratio", "kernel_spread", "spectral_change")
LOSS = nn.CrossEntropyLoss()


def problem(d: int, k: int, outputs: int = 10, n: int = 48) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer with a few learned directions, and samples of which the first entries say the class."""
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(d, k, bias=False), nn.ReLU(), nn.Linear(k, outputs))
    with torch.no_grad():
        learned = torch.randn(k, 4, generator=g) @ torch.randn(4, d, generator=g)
        model[0].weight += 3 / (k * d) ** 0.5 * learned
    return model, torch.randn(n, d, generator=g), torch.randint(10, (n,), generator=g)


def moved_problem(d: int, k: int, outputs: int) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A net whose weights have moved from a reference, the reference, and data."""
    model, x, y = problem(d, k, outputs)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.5 * p.std() * torch.randn(p.shape, generator=g) + 0.3 * p.std()
    return model, problem(d, k, outputs)[0], x, y


@pytest.mark.parametrize(("d", "k", "outputs"), [(300, 300, 10), (600, 300, 10), (300, 600, 10), (300, 300, 400)])
@pytest.mark.parametrize("center", [False, True])
def test_estimates_agree_with_the_dense_result(d: int, k: int, outputs: int, center: bool) -> None:
    model, reference, x, y = moved_problem(d, k, outputs)
    names = [*EXACT, *ESTIMATED, *MOVED, "fle_residual"]
    options: dict[str, Any] = {"measures": names, "layers": ["0"], "reference": reference, "center": center}
    options |= {"weight_decay": 0.01, "progress": False}
    dense = gs.measure(model, (x, y), LOSS, **options, jacobians=True, memory=2**30)
    options |= {"sketch": 8} if outputs > 256 else {}
    tight = gs.measure(model, (x, y), LOSS, **options, memory=2**19)
    assert not dense.errors
    for name in EXACT:
        assert tight["0"][name] == pytest.approx(dense["0"][name], rel=1e-5), name
    for name in (*ESTIMATED, *MOVED):
        exact, value = dense["0"][name], tight["0"][name]
        if name == "kernel_spread" and k > d:
            assert "column space of W" in tight.notes["0.kernel_spread"].text
            continue
        assert exact is not None
        assert value is not None, tight.notes[f"0.{name}"]
        error = tight.errors["0"].get(name, 0.0)
        assert abs(value - exact) < 4 * error + 5e-3 * abs(exact), (name, value, exact, error)
        assert error < (0.5 * abs(exact) + 0.05 if outputs <= 256 else 0.5 * max(abs(exact), 1.0)), name
        assert "random" in tight.notes[f"0.{name}"].text
    assert tight["0"]["fle_residual"] < 1e-5
    assert " ± " in str(tight)


def test_standard_errors_have_the_size_of_the_errors() -> None:
    """Over independent data the deviations are about as large as they say: neither tiny nor huge."""
    scores = []
    for seed in range(6):
        model, x, y = problem(260 + seed, 260)
        options: dict[str, Any] = {"measures": ["nfa", "vcs_gram_cosine", "agop_trace"], "layers": ["0"]}
        dense = gs.measure(model, (x, y), LOSS, **options)["0"]
        tight = gs.measure(model, (x, y), LOSS, **options, memory=2**18)
        scores += [(tight["0"][name] - dense[name]) / tight.errors["0"][name] for name in dense]
    spread = torch.tensor(scores).square().mean().sqrt()
    assert 0.4 < float(spread) < 2.0


def test_parts_merge_to_the_whole() -> None:
    model, x, y = problem(300, 260)
    plan = Plan((Gradient, Covariance, Kernel), estimates=True, budget=Budget(2**18))
    whole = collected(model, (x, y), LOSS, plan)
    parts = [collected(model, (x[part], y[part]), LOSS, plan) for part in (slice(0, 20), slice(20, None))]
    merged = parts[0].merge(parts[1])
    torch.testing.assert_close(whole["0"].D, merged["0"].D, rtol=1e-4, atol=1e-6)
    for kind in (Covariance, Kernel):
        one, other = whole["0"][kind].numbers, merged["0"][kind].numbers
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * float(one.abs().max()))
    assert whole["0"].JtJ is None
    assert whole["0"].Sigma is None


def test_what_probes_cannot_tell_is_named() -> None:
    model, x, y = problem(300, 300)
    reasons = {
        "nfa_corrupted": "nfa_null has its expectation",
        "nfa_depth": "eigenvalues",
        "nfa_fitted": "eigenvalues",
        "nfa_power": "eigenvalues",
        "crh_outputs_rg": "Σ does not fit",
        "crh_outputs_gw": "Σ does not fit",
        "weight_exponent": "all singular values",
    }
    table = gs.measure(model, (x, y), LOSS, measures=["nfa", *reasons], layers=["0"], memory=2**18)
    assert table["0"]["nfa"] is not None
    for name, reason in reasons.items():
        assert table["0"][name] is None
        assert reason in table.notes[f"0.{name}"].text


def test_the_budget_holds() -> None:
    """Beside copies of the weight and of its gradient, the peak is a few budgets and not k×k or d×d matrices."""
    model, x, y = problem(2048, 1536, n=16)
    weight, memory = 4 * 2048 * 1536, 2**23
    names = [*(name for name in (*EXACT, *ESTIMATED) if name not in ("weight_change", "stable_rank")), "fle_residual"]
    options: dict[str, Any] = {"measures": names, "layers": ["0"], "weight_decay": 0.01, "progress": False}
    with LiveBytes() as live:
        table = gs.measure(model, (x, y), LOSS, memory=memory, **options)
    assert not [name for name in names if table["0"][name] is None]
    assert live.peak < 5 * weight + 4 * memory  # D, the parameter's own gradient, and a sum of each of them
    assert live.peak < 8 * 1536**2 * 5  # what five matrices of the smaller side would take


def test_padding_does_not_count() -> None:
    """As in the dense sums, gradients at left padding, which Mamba's scan passes on, are left out."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=30, hidden_size=300, state_size=4, num_hidden_layers=1)
    model = transformers.MambaForCausalLM(config).eval()
    tokens = torch.randint(1, 30, (4, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[:, :6] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    dense = gs.collect(model, [batch], layers=["*in_proj"])
    plan = Plan((Gradient, Covariance), layers=["*in_proj"], estimates=True, budget=Budget(2**14))
    tight = collected(model, [batch], None, plan)
    for layer in tight:
        found = layer[Covariance].numbers[0]
        W = layer.weight.double()
        exact = dense[layer.name].covariance @ (W @ probes(W.shape[-1], found.shape[-1] - 1, W))
        torch.testing.assert_close(found[:, :-1], exact, rtol=0, atol=1e-4 * float(exact.abs().max()))
