"""Notes have a kind and a text; those that were stored as sentences still load."""

from __future__ import annotations

import pickle

import torch
from torch import nn

import gramscope as gs
from gramscope.measures.table import Table
from gramscope.notes import Note
from gramscope.statistics.result import Statistics


def test_statistics_with_sentences_load_and_merge() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.rand(6, 3)
    whole = gs.collect(net, (x, torch.arange(6) % 2), nn.CrossEntropyLoss())
    old = Statistics.__new__(Statistics)
    old.__dict__.update(whole.__dict__, notes={"0": "no gradient: the loss does not reach it; another; remark"})
    loaded = pickle.loads(pickle.dumps(old))
    remarks = (Note("remark", "another"), Note("remark", "remark"))
    assert loaded.notes == {"0": (Note("no gradient", "no gradient: the loss does not reach it"), *remarks)}
    assert loaded.merge(whole).notes == {"0": remarks}  # the other part has a gradient
    assert pickle.loads(pickle.dumps(loaded)).notes == loaded.notes


def test_tables_with_sentences_load_and_show() -> None:
    stored = {"layers": {"0": {"nc1": None}}, "network": {}, "notes": {"0.nc1": "neural collapse needs class labels"}}
    table = Table.from_dict(stored)
    assert "note: 0.nc1: neural collapse needs class labels" in str(table)
    assert table.to_dict() == stored
