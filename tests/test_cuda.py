"""The measuring core on a CUDA device equals the CPU; skipped where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import BY_NAME, sample_losses
from gramscope.errors import InputError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NAMES = ["mlp", "tokens", "conv2d-grouped", "conv3d", "residual", "encoder", "repeated"]


@pytest.mark.parametrize("name", NAMES)
def test_measures_agree_with_the_cpu(name: str) -> None:
    model, x, y = BY_NAME[name].make()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.9)
    options = {"measures": "all", "ridge": 0.5}
    expected = gs.measure(model, (x, y), sample_losses, reference=twin, **options)
    model.cuda(), twin.cuda()
    rng = torch.cuda.get_rng_state()
    found = gs.measure(
        model, (x, y), sample_losses, reference=twin, **options
    )  # batches are moved to the model's device
    assert torch.equal(rng, torch.cuda.get_rng_state())
    for layer in expected:
        values = {column: value for column, value in expected[layer].items() if value is not None}
        assert {c: value for c, value in found[layer].items() if value is not None} == pytest.approx(
            values, rel=1e-6, abs=1e-8
        ), layer


def test_monitor_capture_and_public_functions_on_cuda() -> None:
    model, x, y = BY_NAME["mlp"].make()
    model.cuda()
    monitor = gs.Monitor(model, (x, y), nn.CrossEntropyLoss(), every=1)
    monitor.step()
    assert len(monitor.records) == 2
    with gs.capture(model) as tape:
        sample_losses(model(x.cuda()), y.cuda()).sum().backward()
    record = tape["0"]
    assert record.D.is_cuda
    assert gs.virtual_covariance_shift(record.weight, record.D, record.Sigma, 0.1).is_cuda
    assert float(gs.target_linearity(record.h[:, 0], y.cuda(), ridge=1.0)) == pytest.approx(
        float(gs.target_linearity(x, y, ridge=1.0))
    )
    K = gs.tangent_kernel(model, x)["0"]
    assert float(gs.nfa(record.weight, K)) == pytest.approx(float(gs.nfa(record.weight.cpu(), K.cpu())))
    assert gs.neural_collapse(record.h[:, 0], y.cuda()).nc1 > 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    "make", [gs.FreeMuon, gs.VCL, lambda model: gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1), model)]
)
def test_steps_inside_a_cuda_graph_are_refused(make) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).cuda()
    optimizer, x = make(model), torch.randn(6, 4, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    with pytest.raises(InputError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
