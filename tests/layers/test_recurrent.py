"""Recurrent weights, against torch's own functions; ``tests/instruments/test_models.py`` compares their columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gramscope as gs
from cases import BY_NAME, Around, Case, close, close_to_autograd, normal, sample_losses


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
