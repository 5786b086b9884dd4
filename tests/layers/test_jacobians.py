from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, SEEN, Case, normal, refused
from gramscope.errors import LayerError
from gramscope.layers.jacobians import at_own_inputs, check_samples_are_independent, jacobian_chunks
from gramscope.layers.kinds import AttentionProjection
from gramscope.linalg.budget import Budget
from live_bytes import LiveBytes
from reference import output_jacobian


def kernels(model: nn.Module, x: Tensor, **options: object) -> dict[str, Tensor]:
    """K of every layer, summed over chunks, and how many chunks there were under the key ''."""
    result: dict[str, Tensor] = {}
    with gs.capture(model) as tape:
        output = model(x)
        count = 0
        for chunk in jacobian_chunks(tape, output, **options):  # type: ignore[arg-type]
            count += 1
            for name, J in chunk.items():
                K = torch.einsum("m...bsk,m...bsl->...kl", J, J) / x.shape[0]
                result[name] = result.get(name, torch.zeros_like(K)) + K
    result[""] = torch.tensor(count)
    return result


@pytest.mark.parametrize("case", SEEN, ids=lambda c: c.name)
def test_jacobians_equal_the_dense_ones(case: Case) -> None:
    model, x, _ = case.make()
    with gs.capture(model) as tape:
        chunks = list(jacobian_chunks(tape, model(x)))
        records = {r.name: r for r in tape}
    assert len(chunks) == 1
    for name, J in chunks[0].items():
        layer = records[name].layer
        if isinstance(layer, AttentionProjection):
            continue
        for i in range(x.shape[0]):
            native = output_jacobian(model, layer.module, x[i : i + 1])  # [c, applications, 1, ...]
            expected = torch.stack([torch.cat([layer.outputs(z) for z in row], dim=-2) for row in native])
            torch.testing.assert_close(J.select(-3, i), expected.select(-3, 0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "residual", "encoder", "gpt"])
def test_chunks_do_not_change_the_result(name: str) -> None:
    model, x, _ = BY_NAME[name].make()
    whole, parts = kernels(model, x), kernels(model, x, memory=1)
    assert whole.pop("") == 1
    assert parts.pop("") > 1
    for layer, K in whole.items():
        torch.testing.assert_close(K, parts[layer], rtol=1e-10, atol=1e-12)


def test_sketch_is_unbiased() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    exact = kernels(model, x)["0"]
    sketched = torch.stack(
        [kernels(model, x, sketch=2, generator=torch.Generator().manual_seed(s))["0"] for s in range(300)]
    )
    error = sketched.mean(0) - exact
    standard_error = sketched.std(0) / 300**0.5
    assert (error.abs() < 5 * standard_error + 1e-12).all()
    assert sketched.std(0).max() > 0


def test_bad_requests() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    with gs.capture(model) as tape:
        output = model(x)
        refused(next, jacobian_chunks(tape, output, sketch=0), match="sketch=0")
        refused(next, jacobian_chunks(tape, output, memory=0), match="memory=0")
        with pytest.raises(LayerError, match="does not depend on any captured layer"):
            next(jacobian_chunks(tape, output.detach()))
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    refused(check_samples_are_independent, norm, match="BatchNorm1d '1' is in train mode", error=LayerError)
    check_samples_are_independent(norm.eval())


@pytest.mark.parametrize("kind", ["large output", "one layer", "sketch", "reference", "convolution"])
def test_the_peak_stays_near_the_budget(kind: str) -> None:
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 200))
    options: dict[str, object] = {}
    if kind == "one layer":
        options = {"layers": "0"}
    elif kind == "sketch":
        options = {"layers": "0", "sketch": 300, "generator": torch.Generator().manual_seed(0)}
    elif kind == "reference":
        options = {"reference": copy.deepcopy(model)}
    elif kind == "convolution":
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(60))
        x = x.repeat(1, 5).reshape(32, 1, 10, 10)
    model(x)  # makes lazy layers
    budget = 2**22
    with LiveBytes() as before:
        gs.collect(model, x, features=False, jacobians=True, memory=budget // 16, **options)  # type: ignore[arg-type]
    with LiveBytes() as live:
        gs.collect(model, x, features=False, jacobians=True, memory=budget, **options)  # type: ignore[arg-type]
    assert 0.2 * budget < live.peak - before.peak < 1.1 * budget


class Reused(nn.Module):
    """The input of ``shared`` goes elsewhere too, those of ``own`` and ``readout`` do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.narrow = nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.own, self.readout = nn.Linear(4, 5), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + self.narrow(torch.relu(self.shared(h)))
        return self.readout(torch.tanh(self.own(torch.sin(h))).mean(1))  # type: ignore[no-any-return]


def test_jacobians_at_the_inputs_of_layers_that_alone_read_them() -> None:
    model, x = Reused().double(), normal(6, 2, 3)
    with gs.capture(model) as tape:
        output = model(x)
        assert at_own_inputs(tape, output, Budget()).keys() == {"own", "readout"}
        (plain,) = jacobian_chunks(tape, output)
        (inside,) = jacobian_chunks(tape, output, at_inputs=["own", "readout"])
    for name in ("own", "readout"):
        torch.testing.assert_close(inside.pop(name), plain.pop(name) @ model.get_submodule(name).weight)
    assert all(torch.equal(J, plain[name]) for name, J in inside.items())
    names = ["nfa", "agop_trace"]  # with kernel_spread K itself is kept
    found, expected = (gs.measure(model, x, measures=m) for m in (names, [*names, "kernel_spread"]))
    for name, row in found.rows.items():
        assert row == pytest.approx({column: expected[name][column] for column in names}), name
