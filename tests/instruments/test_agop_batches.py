"""Which axis of inputs and outputs holds the samples, and what counts as several batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import InputError
from gramscope.instruments.agop import dual_tangent_kernel
from gramscope.layers.batches import batches
from reference import output_jacobian


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class SequenceFirst(nn.Module):
    """``[time, batch, 6] → [time, batch, 2]``, or ``[batch, 2]`` if pooled."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head, self.pooled = nn.Linear(6, 2), pooled

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        f = self.head(self.attention(h, h, h)[0])
        return f.mean(0) if self.pooled else f


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("batch", [5, 7])
def test_sequence_first_models_take_batch_dim(pooled: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope.instruments.agop.BATCH", 3)
    model, x = SequenceFirst(pooled).double().eval(), normal(7, batch, 6)
    G, K = gs.agop(model, x, batch_dim=1), gs.tangent_kernel(model, {"x": x.numpy()}, batch_dim=1)
    dual = dual_tangent_kernel(model, x, batch_dim=1)
    for name in ("inner", "head"):
        layer = model.get_submodule(name)
        J = torch.stack([output_jacobian(model, layer, x[:, i : i + 1]).squeeze(1) for i in range(batch)])
        rows = J.flatten(2, -2)  # [n, c, time, k]
        expected = torch.einsum("nctk,nctl->kl", rows, rows) / batch
        torch.testing.assert_close(K[name], expected)
        torch.testing.assert_close(G[name], layer.weight.T @ expected @ layer.weight)
        torch.testing.assert_close(dual[name], J.flatten(1) @ J.flatten(1).T)
    # The attention's value projection, through an independent route: one sample at a time.
    single = [gs.tangent_kernel(model, x[:, i : i + 1], batch_dim=1)["attention.v_proj"] for i in range(batch)]
    torch.testing.assert_close(K["attention.v_proj"], torch.stack(single).mean(0))
    centered = gs.tangent_kernel(model, x, reference=SequenceFirst(pooled).double().eval(), batch_dim=1)
    torch.testing.assert_close(centered["inner"].K, K["inner"])


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.r = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.r(torch.tanh(self.e(x)).mean(1))


@pytest.mark.parametrize("rows", [5, 4])
@pytest.mark.parametrize("convert", [lambda x: x, Tensor.numpy], ids=["tensor", "array"])
def test_two_batches_of_different_lengths(rows: int, convert: Callable[[Tensor], Any]) -> None:
    model, a, b = Pooled().double(), normal(5, 4, 5), normal(rows, 7, 5)
    K = gs.tangent_kernel(model, [convert(a), convert(b)])
    total = torch.zeros(6, 6, dtype=torch.float64)
    for x in (*a, *b):
        J = output_jacobian(model, model.e, x.unsqueeze(0)).flatten(1, -2)  # [c, tokens, k]
        total += torch.einsum("ctk,ctl->kl", J, J)
    torch.testing.assert_close(K["e"], total / (5 + rows))
    found = gs.agop(model, [a, b])["e"]
    torch.testing.assert_close(found, gs.agop(model, [(a, None), (b, None)])["e"])
    assert dual_tangent_kernel(model, [a, b], "r")["r"].shape == (5 + rows, 5 + rows)


def test_how_lists_of_two_arrays_are_read() -> None:
    pairs = [
        [normal(5, 4), normal(5, 2)],
        [normal(5, 4), normal(4, 2)],
        [normal(5, 7, 4), normal(5, 7, 2)],
        [normal(5, 3, 8, 8), normal(5, 1, 8, 8)],
        [normal(5, 4), torch.arange(5)],
        [normal(5, 4).numpy(), np.arange(5)],
    ]
    for data in pairs:
        ((_, target),) = batches(data)
        assert target is not None
    for data in ([normal(5, 4), normal(6, 4)], [normal(5, 7, 4), normal(6, 9, 4)], [normal(5, 1), normal(5, 1)]):
        assert [target for _, target in batches(data)] == [None, None]
    ids = torch.zeros(5, 7, dtype=torch.long)
    for data in ([normal(5, 7, 4), normal(5, 9, 4)], [normal(5, 3, 8, 8), normal(5, 3, 4, 4)], [ids, ids[:, :4]]):
        with pytest.raises(InputError, match=r"may be inputs and target or two batches: write the tuple \(x, y\), or"):
            list(batches(data))
        assert len(list(batches(tuple(data)))) == 1
        assert len(list(batches([(x, None) for x in data]))) == 2


def test_several_inputs_without_a_common_length_are_one_batch() -> None:
    class Pointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.a(x * mask.sum())

    model, x = Pointed().double(), normal(6, 3)
    K = gs.tangent_kernel(model, (x, torch.ones(2, 2, dtype=torch.float64)))["a"]
    torch.testing.assert_close(K, torch.eye(2, dtype=torch.float64))
