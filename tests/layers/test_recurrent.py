"""Recurrent weights, against cells written with ``nn.Linear``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gramscope as gs
from cases import BY_NAME, Around, Case, close, close_to_autograd, close_to_twin, normal, sample_losses


class PlainLSTM(nn.Module):
    """One layer in one direction, without projection."""

    def __init__(self, of: nn.LSTM) -> None:
        super().__init__()
        d, k = of.input_size, of.hidden_size
        self.ih, self.hh = nn.Linear(d, 4 * k).double(), nn.Linear(k, 4 * k).double()
        self.ih.weight, self.hh.weight = of.weight_ih_l0, of.weight_hh_l0
        self.ih.bias, self.hh.bias = of.bias_ih_l0, of.bias_hh_l0

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.hh.in_features)
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.ih(x[:, t]) + self.hh(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


def test_lstm_against_linear_layers() -> None:
    inner, head = nn.LSTM(3, 4, batch_first=True).double(), nn.Linear(4, 3).double()
    model = Around(lambda m, x: m.head(m.inner(x)[0].mean(1)), inner=inner, head=head)
    twin = Around(lambda m, x: m.head(m.inner(x).mean(1)), inner=PlainLSTM(inner), head=head)
    names = {"inner.weight_ih_l0": "inner.ih", "inner.weight_hh_l0": "inner.hh", "head": "head"}
    close_to_twin(model, twin, names, normal(6, 5, 3), torch.arange(6) % 3)


@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("lstm", "gru", "rnn", "cells")], ids=lambda c: c.name)
def test_outputs_and_gradients_are_torch_s_own(case: Case) -> None:
    model, x, y = case.make()
    expected = model(x)
    with gs.capture(model) as tape:
        found = model(x)
        tape.backward(sample_losses(found, y))
    close(found, expected)
    close_to_autograd(tape, sample_losses(model(x), y).sum())
    assert len(tape) == len([name for name, _ in model.named_parameters() if "weight" in name])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("inner", [nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), nn.GRU(3, 4, bidirectional=True)])
def test_packed_sequences(inner: nn.RNNBase) -> None:
    x, lengths = normal(4, 5, 3), torch.tensor([2, 5, 1, 3])

    def run(m: nn.Module, x: Tensor) -> Tensor:
        packed, state = m.inner(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        hidden = state[0] if isinstance(state, tuple) else state
        return pad_packed_sequence(packed, batch_first=True)[0].sum(1) + hidden.sum(0).repeat(1, 2)

    model = Around(run, inner=inner)
    expected = model(x)
    with gs.capture(model) as tape:
        found = model(x)
        tape.backward(found.square().sum(1))
    close(found, expected)
    close_to_autograd(tape, model(x).square().sum())
    hidden = tape["inner.weight_hh_l0"].h
    assert hidden.shape[:2] == (4, 5)
    assert not hidden[2, 1:].any()  # the sequence of one step
    assert hidden[1, 1:].all()
